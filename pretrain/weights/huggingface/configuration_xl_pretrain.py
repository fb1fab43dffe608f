"""The settings of a Transformer-XL that xl-pretrain has trained, for Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from transformers import PretrainedConfig

from pretrain.config.mixer import Mixer
from pretrain.config.model import ModelConfig

# An export has this table, and the next definitions, instead of the project's own. The export's
# last lines enter its kinds of layers.
FACTS: dict[str, type[Mixer]] = {}


def mixer_facts(kind: str) -> Mixer:
    """Return the facts of a kind of layer."""
    return FACTS[kind](kind)


def adopted_facts(tree: dict[str, Any]) -> Any:
    """Refuse an adopted model: it is exported as its own class."""
    raise ConfigError(f"adopted: found {tree}, expected a model of this family")


class ConfigError(ValueError):
    """A setting is missing, unknown, or contradicts another one."""


def abbreviated(value: object) -> str:
    """Return `value` for an error message."""
    return repr(value)[:60]


class XLPretrainConfig(PretrainedConfig):
    """The settings of `ModelConfig`, the length of a segment, and the token that ends a document.

    `memory_length` may be another one than in training. `rope_extension` (ntk or yarn) is relative
    to `trained_keys`: the most keys that a segment saw in training, of each layer.
    """

    model_type = "xl-pretrain"
    keys_to_ignore_at_inference = ["mems", "past_key_values"]  # noqa: RUF012  (Trainer adds a list)
    attribute_map = {  # noqa: RUF012  (transformers declares it so)
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
    }

    def __init__(
        self,
        segment_length: int = 128,
        document_end_id: int = 0,
        trained_keys: Sequence[int] = (),
        **settings: Any,
    ) -> None:
        self.segment_length = segment_length
        self.trained_keys = tuple(trained_keys)
        self.document_end_id = document_end_id
        for entry in fields(ModelConfig):
            default = entry.default_factory() if callable(entry.default_factory) else entry.default
            value = settings.pop(entry.name, default)
            setattr(self, entry.name, tuple(value) if isinstance(value, list) else value)
        # What is tied follows from `tie_embeddings` and other settings, not from this value.
        super().__init__(**{**settings, "tie_word_embeddings": True})

    def model_config(self) -> ModelConfig:
        """Return the settings of the model; ValueError if they are inconsistent."""
        return ModelConfig(
            **{field.name: getattr(self, field.name) for field in fields(ModelConfig)}
        )
