"""Training, evaluation and scaling laws of Transformer-XL.

The names below are for use from Python (docs/python.md). They are imported when they are first
used: `import pretrain` loads neither torch nor DeepSpeed.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pretrain.config.model import ModelConfig
    from pretrain.config.run import RunConfig
    from pretrain.evaluation.sampling import Sampling, generate, prompt_tokens
    from pretrain.model.transformer_xl import TransformerXL
    from pretrain.weights.export import TrainedModel, load_tokenizer, load_trained

__all__ = [
    "ModelConfig",
    "RunConfig",
    "Sampling",
    "TrainedModel",
    "TransformerXL",
    "generate",
    "load_tokenizer",
    "load_trained",
    "prompt_tokens",
]
_HOMES = {
    "pretrain.config.model": ("ModelConfig",),
    "pretrain.config.run": ("RunConfig",),
    "pretrain.evaluation.sampling": ("Sampling", "generate", "prompt_tokens"),
    "pretrain.model.transformer_xl": ("TransformerXL",),
    "pretrain.weights.export": ("TrainedModel", "load_tokenizer", "load_trained"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
