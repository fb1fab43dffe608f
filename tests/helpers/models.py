"""Tiny models with reproducible weights, and streams of random tokens cut into segments."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.config.run import ModelConfig
from pretrain.model.dropout import DropoutStream
from pretrain.model.memory import Memory
from pretrain.model.transformer_xl import TransformerXL

SMALL = {"vocab_size": 37, "num_layers": 2, "d_model": 16, "num_heads": 2}
TINY = ModelConfig(**SMALL, d_inner=24, memory_length=8)

# Members of the family that do not exclude each other.
TOGETHER: dict[str, Any] = {
    "num_layers": 3, "layer_kinds": ("attention", "deltanet", "attention"),
    "memory_length": (3, 0, 8), "attention_sinks": True, "softmax_scaling": "log_length",
    "isolate_documents": True, "norm_position": "pre", "base_width": 8,
}  # fmt: skip

# Every option of the model at least once, for properties that must hold for all of them.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pre_norm": {"norm_position": "pre"},
    "untied_biases": {"untie_biases": True},
    "clamp": {"clamp_length": 5},
    "isolated": {"isolate_documents": True},
    "narrow_embedding": {"d_embed": 10, "d_head": 6, "tie_projections": (True,)},
    "untied_embedding": {"tie_embeddings": False},
    "adaptive": {"cutoffs": (9, 20)},
    "adaptive_div2": {"cutoffs": (9, 20), "div_val": 2, "tie_projections": (False, True, True)},
    "rope": {
        "positions": "rope", "norm": "rmsnorm", "feed_forward": "swiglu", "norm_position": "pre",
        "z_loss": 0.01,
    },
    "alibi": {"positions": "alibi", "feed_forward": "gelu", "num_heads": 4, "num_key_heads": 2},
    "t5": {"positions": "t5", "query_key_norm": True},
    "relative_modern": {
        "num_heads": 4, "num_key_heads": 1, "query_key_norm": True, "untie_biases": True,
        "norm": "rmsnorm", "norm_position": "pre",
    },
    "mup": {
        "base_width": 4, "cutoffs": (9, 20), "div_val": 2, "tie_projections": (True, False, True),
    },
    "sinks": {"attention_sinks": True, "num_heads": 4, "num_key_heads": 2, "memory_length": (3, 8)},
    "scaled": {"softmax_scaling": "log_length", "isolate_documents": True},
    "deltanet": {"layer_kinds": ("deltanet", "attention")},
    "deltanet_alone": {
        "layer_kinds": ("deltanet",), "norm_position": "pre", "isolate_documents": True,
    },
    "deltanet_compressive": {
        "layer_kinds": ("attention", "deltanet", "attention"), "num_layers": 3,
        "compressed_length": 4, "compression_rate": 2,
    },
    "memory_tokens": {"memory_tokens": 2, "isolate_documents": True},
    "memory_tokens_alone": {"memory_tokens": 3, "memory_length": 0, "norm_position": "pre"},
    "memory_tokens_deltanet": {
        "memory_tokens": 1, "layer_kinds": ("deltanet", "attention"), "positions": "rope",
        "compressed_length": 4,
    },
    "memory_per_layer": {"memory_length": (3, 8)},
    "compressive": {"compressed_length": 4, "compression_rate": 2},
    "compressive_rope": {
        "compressed_length": 3, "positions": "rope", "isolate_documents": True,
        "norm_position": "pre",
    },
    "compressive_scaled": {
        "softmax_scaling": "log_length", "attention_sinks": True, "positions": "alibi",
        "isolate_documents": True, "compressed_length": 4, "compression_rate": 2,
    },
    # Together with those above, every pair of members that a model can have.
    "members_together": {**TOGETHER, "positions": "rope", "num_key_heads": 1},
    "members_with_tokens": {**TOGETHER, "memory_tokens": 2},
}  # fmt: skip

# With enough memory it does not matter where segments end; memory tokens come once per segment.
CUT_ANYWHERE = [name for name, options in VARIANTS.items() if "memory_tokens" not in options]


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> TransformerXL:
    """Return a model whose weights are large enough for every part to affect the loss."""
    model = TransformerXL(replace(TINY, **options)).to(dtype)
    numbers = np.random.RandomState(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.from_numpy(numbers.standard_normal(tuple(parameter.shape)))
            parameter.copy_(1.0 + 0.2 * values if name.endswith("gain") else 0.3 * values)
    return model


def random_tokens(num_lanes: int, length: int, seed: int = 0, vocab_size: int = 37) -> Tensor:
    """Token ids [B, T]."""
    return torch.from_numpy(np.random.RandomState(seed).randint(0, vocab_size, (num_lanes, length)))


def other_tokens(tokens: Tensor) -> Tensor:
    """Return another id for each, in the same bin of an adaptive softmax with cutoffs 9 and 20.

    So as many rows reach each of its products, and CPUs may round by that number.
    """
    other_V = torch.arange(1, TINY.vocab_size + 1)
    other_V[[8, 19, 36]] = torch.tensor([0, 9, 20])
    return other_V[tokens]


def random_starts(num_lanes: int, length: int, seed: int = 0) -> Tensor:
    """Document starts [B, T], about every fifth token."""
    numbers_BT = np.random.RandomState(seed + 1000).uniform(size=(num_lanes, length))
    return torch.from_numpy(numbers_BT < 0.2)


def stream_nll(
    model: TransformerXL,
    stream_BT: Tensor,
    segment_lengths: Iterable[int],
    starts_BT: Tensor | None = None,
    dropout: DropoutStream | None = None,
    memory: Memory | None = None,
    memory_length: int | None = None,
) -> tuple[Tensor, Memory | None]:
    """Return the NLL [B, T - 1] of a stream read in segments with memory, and the last memory."""
    parts = []
    first = 0
    for length in segment_lengths:
        last = first + length
        tokens_BL, targets_BL = stream_BT[:, first:last], stream_BT[:, first + 1 : last + 1]
        starts_BL = None if starts_BT is None else starts_BT[:, first:last]
        inputs = (tokens_BL, targets_BL, memory, starts_BL)
        nll_BL, memory = model(*inputs, dropout=dropout, memory_length=memory_length)
        parts.append(nll_BL)
        first = last
    assert first == stream_BT.shape[1] - 1
    return torch.cat(parts, dim=1), memory
