"""Dropout masks that are a pure function of (seed, step, layer, site, lane).

There is no random-number state. The masks of a lane do not depend on the rank, the world size, the
micro-batch or the order of lanes, and recomputing a checkpointed layer gives the same masks. So a
resumed run needs no generator state to drop the same values.

Rates are rounded to multiples of 1/65536: a mask compares 16 random bits per element with
round(rate * 65536). Kept values are divided by the realized probability, so expectations are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.kernels.triton.settings import has_triton, missing_for_compiling

LEVELS = 1 << 16  # values of 16 random bits
WORD = (1 << 64) - 1
SEGMENT_BITS = 40  # bits of a step's number; a segment's number in its step is in the bits above
ALL_LANES = -1  # replaces the lane in a mask that all lanes share
GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # of SplitMix64


class Site(IntEnum):
    """Where the model applies dropout. Masks depend on the numbers: do not change them."""

    EMBEDDING = 1
    POSITIONS = 2
    ATTENTION = 3
    ATTENTION_OUTPUT = 4
    FEED_FORWARD_INNER = 5
    FEED_FORWARD_OUTPUT = 6
    FINAL = 7


class DropoutStream:
    """The masks of one optimizer step; `lanes` are the global lanes of the batch's rows.

    The bits come from Philox 4x64-10 (Salmon et al. 2011) with key (seed, step) and counter (block,
    lane, layer, site). The counter differs between any two masks, so they never share bits. A CPU
    draws them with numpy's generator, a GPU in the kernel that drops; the masks are the same.
    """

    def __init__(self, seed: int, step: int, lanes: Sequence[int] | Tensor) -> None:
        self.seed = seed
        self.step = step
        self.lanes = [int(lane) for lane in lanes]
        self._lanes_on_device: Tensor | None = None
        self._philox: np.random.Philox | None = None

    def of_segment(self, number: int) -> DropoutStream:
        """Return the masks of a further segment of the same step; 0 is the first."""
        if not number:
            return self
        step = self.step + (number << SEGMENT_BITS)
        return DropoutStream(self.seed, step, self.lanes)

    def drop(
        self, values: Tensor, rate: float, site: Site, layer: int = 0, lane_axis: int = 0
    ) -> Tensor:
        """Zero a fraction `rate` of the values and rescale the rest, with a mask per lane."""
        if not values.is_cpu and has_triton() and missing_for_compiling() is None:
            from pretrain.kernels.triton.dropout import Mask, dropped

            self._check(values.shape, lane_axis)
            numbers = (self.seed, self.step, layer, int(site))
            lanes_B = self._lanes_on(values.device)
            return dropped(values, Mask(lanes_B, numbers, _threshold(rate), lane_axis))
        keep = self.keep(values.shape, rate, site, layer, lane_axis)
        scale = LEVELS / (LEVELS - _threshold(rate))
        dropped = _Dropped.apply(values, keep.to(values.device), scale)
        assert isinstance(dropped, Tensor)
        return dropped

    def keep(
        self, shape: Sequence[int], rate: float, site: Site, layer: int = 0, lane_axis: int = 0
    ) -> Tensor:
        """Return the mask of `drop` on the CPU: True with probability 1 - `realized_rate(rate)`."""
        self._check(shape, lane_axis)
        others = [size for axis, size in enumerate(shape) if axis != lane_axis]
        count, threshold = math.prod(others), _threshold(rate)
        least = threshold - LEVELS // 2  # the 16 bits are signed
        keep = torch.empty(len(self.lanes), count, dtype=torch.bool)
        for row, lane in zip(keep, self.lanes, strict=True):
            torch.ge(self._philox_bits(lane, count, site, layer)[:count], least, out=row)
        return keep.view(len(self.lanes), *others).movedim(0, lane_axis)

    def drop_shared(self, values: Tensor, rate: float, site: Site) -> Tensor:
        """Like `drop`, for values that all lanes share: the mask depends on (seed, step, site)."""
        shared = DropoutStream(self.seed, self.step, [ALL_LANES])
        return shared.drop(values[None], rate, site)[0]

    def lane_keys(self, site: Site, layer: int, device: torch.device) -> Tensor:
        """Return a random int64 per lane, the seed of the fused attention's own masks.

        They come from SplitMix64 (Steele, Lea, Flood 2014) over seed, step, layer, site and lane.
        """
        key = 0
        for part in (self.seed, self.step, layer, int(site)):
            key = _mix(((key ^ (part & WORD)) + GOLDEN_GAMMA) & WORD)
        return _mix_tensor(self._lanes_on(device) ^ _signed(key))

    def _check(self, shape: Sequence[int], lane_axis: int) -> None:
        assert shape[lane_axis] == len(self.lanes), (tuple(shape), lane_axis, len(self.lanes))

    def _philox_bits(self, lane: int, count: int, site: Site, layer: int) -> Tensor:
        """Return `count` random int16, rounded up to whole words."""
        if self._philox is None:
            self._philox = np.random.Philox(key=_words(self.seed, self.step))
        self._philox.state = {
            "bit_generator": "Philox",
            "state": {"counter": _words(0, lane, layer, site), "key": _words(self.seed, self.step)},
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": 4,  # the buffer is empty: the next draw starts at the counter
            "has_uint32": 0,
            "uinteger": 0,
        }
        return torch.from_numpy(self._philox.random_raw(-(-count // 4)).view(np.int16))

    def _lanes_on(self, device: torch.device) -> Tensor:
        if self._lanes_on_device is None or self._lanes_on_device.device != device:
            lanes_B = torch.tensor(self.lanes, dtype=torch.int64)
            self._lanes_on_device = lanes_B.to(device, non_blocking=True)
        return self._lanes_on_device


def drop(
    values: Tensor,
    rate: float,
    stream: DropoutStream | None,
    site: Site,
    layer: int = 0,
    lane_axis: int = 0,
) -> Tensor:
    """Return `stream.drop(...)`, or `values` themselves if there is nothing to drop."""
    if stream is None or rate == 0.0:
        return values
    return stream.drop(values, rate, site, layer, lane_axis)


def realized_rate(rate: float) -> float:
    """Return the actual probability of dropping: `rate` rounded to a multiple of 1/65536."""
    return _threshold(rate) / LEVELS


def _threshold(rate: float) -> int:
    return min(round(rate * LEVELS), LEVELS - 1)


class _Dropped(torch.autograd.Function):
    """Applies one mask, a byte per value, to values and gradients; each makes one new tensor."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, keep: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(keep)
        ctx.scale = scale
        # A product with bytes takes half the time of `where`, on a CPU.
        return torch.mul(values, keep.view(torch.uint8)).mul_(scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (keep,) = ctx.saved_tensors
        return torch.mul(gradient, keep.view(torch.uint8)).mul_(ctx.scale), None, None


def _words(*values: int) -> np.ndarray:
    return np.array([value & WORD for value in values], dtype=np.uint64)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _mix(word: int) -> int:
    """Apply the finalizer of SplitMix64, a bijection; every input bit affects every output bit."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & WORD
    return word ^ (word >> 31)


def _mix_tensor(words: Tensor) -> Tensor:
    """Apply `_mix` to int64 tensors, whose products wrap like 64-bit words."""
    words = (words ^ _shifted(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shifted(words, 27)) * _signed(0x94D049BB133111EB)
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    # Shifts of int64 copy the sign bit; the shift of a word must not.
    return (words >> bits) & ((1 << (64 - bits)) - 1)
