"""The settings of the original code, under its own names, as those of this model."""

from collections.abc import Mapping
from typing import Any

from pretrain.config.run import ModelConfig


def config_of_original(settings: Mapping[str, Any]) -> ModelConfig:
    """Return the model that the original builds from these settings.

    `untie_r` is a setting of the original's TensorFlow code.
    """
    cutoffs, memory_length = settings["cutoffs"] or [], settings["mem_len"]
    # Its list may be longer than the bins it is used for.
    tied = (settings["tie_projs"] or [False] * (len(cutoffs) + 1))[: len(cutoffs) + 1]
    sizes = {
        name: settings[name] for name in ("d_model", "d_head", "d_inner", "d_embed", "div_val")
    }
    return ModelConfig(
        vocab_size=settings["n_token"],
        num_layers=settings["n_layer"],
        num_heads=settings["n_head"],
        memory_length=memory_length,
        norm_position="pre" if settings["pre_lnorm"] else "post",
        untie_biases=bool(settings.get("untie_r")),
        # Without memory the original ignores it.
        same_length=bool(settings["same_length"]) and memory_length > 0,
        clamp_length=max(0, settings["clamp_len"]),
        tie_embeddings=bool(settings["tie_weight"]),
        cutoffs=tuple(cutoffs),
        tie_projections=tuple(map(bool, tied)),
        **sizes,
    )
