"""What Muon computes and keeps, which AdamW does not. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from pretrain.config.choices import (
    feed_forward_traits,
    learns_to_compress,
    optimizer_traits,
    position_traits,
)
from pretrain.config.model import ModelConfig
from pretrain.config.optim import OptimConfig

NEWTON_SCHULZ_STEPS = 5
MOMENT_BYTES = 4  # float32; AdamW has two moments


def orthogonalizing_flops(model: ModelConfig, optim: OptimConfig) -> float:
    """Return the FLOPs of one update in making matrices orthogonal, of all ranks together."""
    if not optimizer_traits(optim.name).orthogonalizes:
        return 0.0
    return sum(newton_schulz_flops(*shape) for shape in _matrices(model))


def moment_bytes(model: ModelConfig, optim: OptimConfig, parameters: int) -> float:
    """Return the bytes of the moments of all `parameters`: two each, of Muon's matrices one."""
    total = 2.0 * MOMENT_BYTES * parameters
    if not optimizer_traits(optim.name).orthogonalizes:
        return total
    return total - MOMENT_BYTES * sum(rows * width for rows, width in _matrices(model))


def newton_schulz_flops(rows: int, width: int) -> float:
    """Return the FLOPs of making a matrix orthogonal.

    Each step takes X X^T, its square, and the product of a polynomial of both with X, where X is
    the matrix or its transpose, whichever has fewer rows.
    """
    rows, width = min(rows, width), max(rows, width)
    return float(NEWTON_SCHULZ_STEPS * (4 * rows * rows * width + 2 * rows**3))


def _matrices(model: ModelConfig) -> Iterator[tuple[int, int]]:
    """Yield the shapes of the layers' matrices."""
    d, f, n = model.d_model, model.inner_width, model.num_heads
    queries, keys = (heads * model.head_width for heads in (n, model.key_heads))
    of_attention = [(queries, d), (keys, d), (keys, d), (d, queries)]
    if position_traits(model.positions).projects_encodings:
        of_attention.append((queries, d))
    if model.compressed_length and learns_to_compress(model.compression):
        of_attention.append((d, model.compression_rate * d))
    for _ in range(model.num_attention_layers):
        yield from of_attention
    for _ in range(model.num_deltanet_layers):
        values = n * model.deltanet_value_width
        yield from ((queries, d), (queries, d), (values, d), (values, d), (n, d), (n, d))
        yield d, values
    gated = feed_forward_traits(model.feed_forward).is_gated
    for _ in range(model.num_layers):
        yield from ((f, d), (d, f), *(((f, d),) if gated else ()))
