"""The attention module with its projections and norm, against the original's layout.

B lanes, L queries, M memory rows, C = M + L keys, N heads, H head width, D d_model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from benchmarks.measure import Comparison, timed
from pretrain.config.run import ModelConfig
from pretrain.mixers.attention.module import RelativeAttention
from pretrain.model.positions import RelativePositions
from pretrain.model.visibility import Visibility
from tests.helpers.reference_attention import ReferenceAttention

LANES, HEADS, D_MODEL = 8, 8, 512
GOALS = {128: (1.8, 20), 512: (4.5, 8)}  # segment = memory -> ratio, rounds


def attention_comparisons(peak: float) -> list[Comparison]:
    """Return one comparison of a forward and a backward pass for every segment length."""
    return [
        _comparison(length, peak, *goal_and_rounds) for length, goal_and_rounds in GOALS.items()
    ]


def _comparison(length: int, peak: float, goal: float, rounds: int) -> Comparison:
    generator = torch.Generator().manual_seed(length)
    segment_BLD, memory_BMD, gradient_BLD = (
        torch.randn(LANES, length, D_MODEL, generator=generator) for _ in range(3)
    )
    positions = RelativePositions(D_MODEL, 0)
    encodings_CD = positions.encodings_CD(2 * length, torch.float32, segment_BLD.device)
    return Comparison(
        name=f"attention module, segment = memory = {length}",
        goal=goal,
        baseline=timed(_reference(segment_BLD, memory_BMD, encodings_CD, gradient_BLD)),
        candidate=timed(_ours(segment_BLD, memory_BMD, encodings_CD, gradient_BLD)),
        rounds=rounds,
        floor_seconds=_flops(length, length) / peak,
    )


def _ours(
    segment_BLD: Tensor, memory_BMD: Tensor, encodings_CD: Tensor, gradient_BLD: Tensor
) -> Callable[[], None]:
    config = ModelConfig(num_heads=HEADS, d_model=D_MODEL, untie_biases=True)
    attention, norm = RelativeAttention(config, layer=0), torch.nn.LayerNorm(D_MODEL)
    visibility = Visibility(
        num_queries=segment_BLD.shape[1],
        num_keys=len(encodings_CD),
        dtype=segment_BLD.dtype,
        device=segment_BLD.device,
    )

    def work() -> None:
        hidden_BLD = segment_BLD.detach().requires_grad_()
        attended_BLD = attention(
            hidden_BLD, memory_BMD, encodings_CD, None, None, visibility=visibility, dropout=None
        )
        normed_BLD = layer_norm(hidden_BLD + attended_BLD, (D_MODEL,), norm.weight, norm.bias)
        normed_BLD.backward(gradient_BLD)

    return work


def _reference(
    segment_BLD: Tensor, memory_BMD: Tensor, encodings_CD: Tensor, gradient_BLD: Tensor
) -> Callable[[], None]:
    attention = ReferenceAttention(HEADS, D_MODEL, D_MODEL // HEADS)
    u_NH, v_NH = (torch.nn.Parameter(torch.zeros(HEADS, D_MODEL // HEADS)) for _ in range(2))
    segment_LBD, memory_MBD, gradient_LBD = (
        values.transpose(0, 1).contiguous() for values in (segment_BLD, memory_BMD, gradient_BLD)
    )
    num_queries, num_keys = len(segment_LBD), len(encodings_CD)
    mask_LC = torch.ones(num_queries, num_keys, dtype=torch.bool).triu(1 + num_keys - num_queries)

    def work() -> None:
        hidden_LBD = segment_LBD.detach().requires_grad_()
        attention(hidden_LBD, encodings_CD, u_NH, v_NH, mask_LC, memory_MBD).backward(gradient_LBD)

    return work


def _flops(num_queries: int, num_memory: int) -> float:
    """Return the FLOPs of the products that no implementation can avoid: keys up to each query."""
    products_BLD = 2.0 * LANES * num_queries * D_MODEL * D_MODEL
    products_BMD = 2.0 * LANES * num_memory * D_MODEL * D_MODEL
    # Query, key, value and output have a forward product, an input gradient and a weight gradient.
    # Memory rows have keys and values only, and no input gradient.
    projections = 3 * 4 * products_BLD + 2 * 2 * products_BMD
    seen = num_queries * num_memory + num_queries * (num_queries + 1) / 2
    # Scores take three products forward (content, position, values) and six backward.
    return projections + 9 * 2.0 * LANES * seen * D_MODEL
