"""Which runs can share lanes among ranks (`engine.sequence_ranks`). Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from foundation.errors import ConfigError
from pretrain.config.engine import Attention, EngineConfig, attention_in
from pretrain.config.model import ModelConfig


def check_sequence_ranks(engine: EngineConfig, model: ModelConfig, segment_length: int) -> None:
    """Raise ConfigError if ranks cannot share segments, memories and heads evenly and exactly."""
    ranks = engine.sequence_ranks
    if ranks == 1:
        return
    divided = {
        "data.segment_length": segment_length,
        **{f"model.memory_length: {length}": length for length in model.memory_lengths()},
        "model.num_heads": model.num_heads,
        "model.num_key_heads": model.key_heads,
    }
    for name, number in divided.items():
        if number % ranks:
            found = name if ":" in name else f"{name}={number}"
            raise ConfigError(
                f"{found} does not divide by engine.sequence_ranks={ranks}, the ranks that share "
                f"it; use a multiple of {ranks}, or fewer ranks"
            )
    for problem in _unsupported(engine, model):
        raise ConfigError(f"engine.sequence_ranks={ranks} {problem}; change one of them")


def num_groups(ranks: range, shared: int) -> int:
    """How many groups of ranks that share lanes have one among these consecutive `ranks`."""
    return ranks[-1] // shared - ranks[0] // shared + 1


def _unsupported(engine: EngineConfig, model: ModelConfig) -> Iterator[str]:
    if engine.compile:
        yield "excludes engine.compile=true"
    if model.compressed_length:
        yield f"excludes compressed memory, found model.compressed_length={model.compressed_length}"
    if model.memory_tokens:
        yield f"excludes memory tokens, found model.memory_tokens={model.memory_tokens}"
    if model.num_deltanet_layers:
        yield (
            "needs attention in all layers, found a deltanet in model.layer_kinds, whose state "
            "passes from token to token"
        )
    kind, _ = attention_in(engine, model, on_gpu=False)
    if model.attention_dropout and kind is not Attention.PLAIN:
        yield (
            f"with model.attention_dropout={model.attention_dropout:g} needs "
            f"engine.attention_kernel=plain, found {engine.attention_kernel}: the fused kernels "
            "draw masks of all heads"
        )
