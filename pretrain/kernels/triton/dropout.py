"""Dropout in one pass over memory: the mask is drawn where it is used, in both directions.

The bits are those that `pretrain.model.dropout` draws on a CPU, Philox 4x64-10 (Salmon et al. 2011)
with the same key and counter. So the masks of a run do not depend on the device. Nothing is kept
for the backward pass, which draws the mask again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.language.random import philox_impl

from pretrain.kernels.triton.settings import DROPOUT_LEVELS

BLOCK = 128  # counters of a program, one per thread
DRAWN = 16  # elements per counter: four words of four times 16 bits
WARPS = 4
NUMBERS = ("seed", "step", "layer", "site")
WORD = (1 << 64) - 1


@dataclass(frozen=True, eq=False)
class Mask:
    """What decides which values of a tensor are dropped."""

    lanes_B: Tensor  # the global lanes, int64, on the device of the values
    numbers: tuple[int, int, int, int]  # seed, step, layer, site
    threshold: int  # of DROPOUT_LEVELS: drop with probability threshold / DROPOUT_LEVELS
    lane_axis: int


def dropped(values: Tensor, mask: Mask) -> Tensor:
    """Return the values, dropped ones zero and the others divided by the probability of keeping."""
    result = _Dropped.apply(values, mask)
    assert isinstance(result, Tensor)
    return result


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Mask) -> Tensor:  # type: ignore[override]
        ctx.mask = mask
        return _launch(values, mask)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _launch(gradients[0], ctx.mask), None


def _launch(values: Tensor, mask: Mask) -> Tensor:
    values = values.contiguous()
    outputs = torch.empty_like(values)
    num_lanes = len(mask.lanes_B)
    count = values.numel() // num_lanes if num_lanes else 0
    if not count:
        return outputs
    with torch.cuda.device_of(values):  # triton launches on the current device
        drop_kernel[triton.cdiv(count, BLOCK * DRAWN), num_lanes](
            values,
            outputs,
            mask.lanes_B,
            *(number & WORD for number in mask.numbers),
            count,
            math.prod(values.shape[mask.lane_axis + 1 :]),
            IS_LANE_FIRST=mask.lane_axis == 0,
            THRESHOLD=mask.threshold,
            SCALE=DROPOUT_LEVELS / (DROPOUT_LEVELS - mask.threshold),
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return outputs


@triton.jit(do_not_specialize=NUMBERS)
def drop_kernel(
    values,
    outputs,
    lanes,
    seed,
    step,
    layer,
    site,
    count,
    inner,
    IS_LANE_FIRST: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draw BLOCK * 16 of the `count` bits of one lane, and write the outputs that are there.

    After the lane's axis come `inner` values.
    """
    lane = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    # numpy's generator counts up before it draws.
    counter = (first + tl.arange(0, BLOCK) + 1).to(tl.uint64)
    zero = tl.zeros([BLOCK], tl.uint64)
    word0, word1, word2, word3 = philox_impl(
        counter,
        zero + tl.load(lanes + lane).to(tl.uint64),
        zero + layer.to(tl.uint64),
        zero + site.to(tl.uint64),
        seed.to(tl.uint64),
        step.to(tl.uint64),
        n_rounds=10,
    )
    # In order along the last axes, so a thread has 16 neighboring elements.
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3))
    shifts = (tl.arange(0, 4) * 16).to(tl.uint64)[None, None, :]
    bits = (tl.reshape(words, [BLOCK, 4, 1]) >> shifts) & 0xFFFF
    bits = tl.reshape(bits, [BLOCK * 16]).to(tl.int32)
    keep = (bits ^ 0x8000) >= THRESHOLD  # the bits are signed
    position = first * 16 + tl.arange(0, BLOCK * 16)
    inside = position < count
    if IS_LANE_FIRST:
        address = lane * count + position
    else:
        address = (position // inner * tl.num_programs(1) + lane) * inner + position % inner
    value = tl.load(values + address, mask=inside, other=0.0)
    value *= tl.where(keep, 1.0, 0.0)  # as on a CPU: what is dropped keeps its sign
    if value.dtype.primitive_bitwidth == 16:
        value = value.to(tl.float32)
    tl.store(outputs + address, (value * SCALE).to(outputs.dtype.element_ty), mask=inside)
