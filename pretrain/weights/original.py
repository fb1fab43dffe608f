"""The original PyTorch code's settings and state dict in this project's terms.

The mapping only splits and renames, so it serves gradients as well as weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from data_pipeline.errors import CheckpointError
from pretrain.config.run import ModelConfig
from pretrain.model.embedding_and_softmax import bin_ranges

# theirs -> ours, inside one layer
LAYER_NAMES = {
    "dec_attn.r_net.weight": "attention.position_weight",
    "dec_attn.o_net.weight": "attention.output_weight",
    "dec_attn.layer_norm.weight": "attention_norm.gain",
    "dec_attn.layer_norm.bias": "attention_norm.bias",
    "pos_ff.CoreNet.0.weight": "feed_forward.inner_weight",
    "pos_ff.CoreNet.0.bias": "feed_forward.inner_bias",
    "pos_ff.CoreNet.3.weight": "feed_forward.output_weight",
    "pos_ff.CoreNet.3.bias": "feed_forward.output_bias",
    "pos_ff.layer_norm.weight": "feed_forward_norm.gain",
    "pos_ff.layer_norm.bias": "feed_forward_norm.bias",
}


def config_of_original(settings: Mapping[str, Any]) -> ModelConfig:
    """The model that the original builds from these settings (its own names; `untie_r` as in its TensorFlow code)."""
    cutoffs = tuple(settings["cutoffs"])
    return ModelConfig(
        vocab_size=settings["n_token"],
        num_layers=settings["n_layer"],
        d_model=settings["d_model"],
        num_heads=settings["n_head"],
        d_head=settings["d_head"],
        d_inner=settings["d_inner"],
        d_embed=settings["d_embed"],
        memory_length=settings["mem_len"],
        norm_position="pre" if settings["pre_lnorm"] else "post",
        untie_biases=bool(settings.get("untie_r", False)),
        # without memory it sees the segment alone, whatever this says
        same_length=settings["same_length"] and settings["mem_len"] > 0,
        clamp_length=max(0, settings["clamp_len"]),
        tie_embeddings=settings["tie_weight"],
        cutoffs=cutoffs,
        div_val=settings["div_val"],
        # its list may be longer than the bins it is used for
        tie_projections=tuple(settings["tie_projs"] or [False] * (len(cutoffs) + 1))[
            : len(cutoffs) + 1
        ],
    )


def original_to_ours(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of the original's state dict under this project's parameter names; tied ones appear once.

    Names tied in the original may be there or not. Raises CheckpointError on a missing or unknown name.
    """
    remaining = _Remaining(state)
    ours = dict(_embedding(remaining, config))
    ours.update(_biases(remaining, config))
    for layer in range(config.num_layers):
        ours.update(_layer(remaining, config, layer))
    ours.update(_head(remaining, config))
    remaining.refuse_leftovers()
    return ours


class _Remaining:
    """A state dict whose names are crossed out as they are used."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state
        self._unused = set(state) - {"pos_emb.inv_freq"}

    def take(self, name: str) -> Tensor:
        if name not in self._state:
            raise CheckpointError(
                f"the original's state has no {name!r}, which these settings imply; "
                "check the configuration it was trained with"
            )
        self._unused.discard(name)
        return self._state[name]

    def skip(self, name: str) -> None:
        self._unused.discard(name)

    def refuse_leftovers(self) -> None:
        if self._unused:
            raise CheckpointError(
                f"the original's state holds {', '.join(sorted(self._unused))}, "
                "which these settings have no use for; check the configuration it was trained with"
            )


Named = Iterator[tuple[str, Tensor]]


def _embedding(remaining: _Remaining, config: ModelConfig) -> Named:
    ranges = bin_ranges(config)
    for index, tokens in enumerate(ranges):
        if config.div_val > 1:
            yield (
                f"embedding.bins.{index}.weight",
                remaining.take(f"word_emb.emb_layers.{index}.weight"),
            )
            yield (
                f"embedding.bins.{index}.projection",
                remaining.take(f"word_emb.emb_projs.{index}"),
            )
        else:
            table = remaining.take("word_emb.emb_layers.0.weight")
            yield f"embedding.bins.{index}.weight", table[tokens.start : tokens.stop]
    if config.div_val == 1 and config.embedding_width != config.d_model:
        yield "embedding.projection", remaining.take("word_emb.emb_projs.0")


def _biases(remaining: _Remaining, config: ModelConfig) -> Named:
    for theirs, name in (("r_w_bias", "content_bias"), ("r_r_bias", "position_bias")):
        bias = remaining.take(theirs)
        if config.untie_biases and len(bias) != config.num_layers:
            raise CheckpointError(
                f"{theirs} is for {len(bias)} layers, model.num_layers is {config.num_layers}; "
                "use the configuration it was trained with"
            )
        if config.untie_biases:
            yield from (
                (f"layers.{layer}.attention.{name}", bias[layer])
                for layer in range(config.num_layers)
            )
        else:
            yield name, bias


def _layer(remaining: _Remaining, config: ModelConfig, layer: int) -> Named:
    width = config.num_heads * config.head_width
    query_key_value = remaining.take(f"layers.{layer}.dec_attn.qkv_net.weight")
    yield f"layers.{layer}.attention.query_weight", query_key_value[:width]
    yield f"layers.{layer}.attention.key_value_weight", query_key_value[width:]
    for theirs, name in LAYER_NAMES.items():
        yield f"layers.{layer}.{name}", remaining.take(f"layers.{layer}.{theirs}")


def _head(remaining: _Remaining, config: ModelConfig) -> Named:
    projected = config.div_val > 1 or config.embedding_width != config.d_model
    for index, tokens in enumerate(bin_ranges(config)):
        # With div_val 1 the original keeps one table for all bins.
        layer, rows = (
            (index, slice(None)) if config.div_val > 1 else (0, slice(tokens.start, tokens.stop))
        )
        if config.tie_embeddings:
            remaining.skip(f"crit.out_layers.{layer}.weight")
        else:
            yield (
                f"head.bins.{index}.weight",
                remaining.take(f"crit.out_layers.{layer}.weight")[rows],
            )
        yield f"head.bins.{index}.bias", remaining.take(f"crit.out_layers.{layer}.bias")[rows]
        if config.ties_projection(index):
            remaining.skip(f"crit.out_projs.{index}")
        elif projected:
            yield f"head.bins.{index}.projection", remaining.take(f"crit.out_projs.{index}")
    if config.cutoffs:
        yield "head.bins.0.cluster_weight", remaining.take("crit.cluster_weight")
        yield "head.bins.0.cluster_bias", remaining.take("crit.cluster_bias")
