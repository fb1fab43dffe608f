"""Dropout masks that are a pure function of (seed, step, layer, site, lane).

No random-number state is involved: a lane's masks do not depend on the rank, the number of ranks, the micro-batch or
the order of the lanes, and recomputing a checkpointed layer meets the same masks again.

Probabilities are quantised to 1/65536: a mask compares 16 random bits per element with round(rate * 65536), and what is
kept is rescaled by the probability that was realised, so that the expectation is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

LEVELS = 1 << 16  # what 16 random bits can distinguish
WORD = (1 << 64) - 1
ALL_LANES = WORD  # stands in for the lane of a mask that all lanes share
GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # SplitMix64 (Steele, Lea, Flood 2014)


class Site(IntEnum):
    """The places of the model where dropout acts. The numbers enter the masks: changing one changes every result."""

    EMBEDDING = 1
    POSITIONS = 2
    ATTENTION = 3
    ATTENTION_OUTPUT = 4
    FEED_FORWARD_INNER = 5
    FEED_FORWARD_OUTPUT = 6
    FINAL = 7


class DropoutStream:
    """The masks of one optimizer step for the given global lanes; lane i of the stream is row i of the batch.

    On the CPU the bits come from Philox 4x64-10 with key (seed, step) and counter (block, lane, layer, site), so two
    masks never share bits; elsewhere from SplitMix64 over a hash of the same five numbers. Masks of the two differ.
    """

    def __init__(self, seed: int, step: int, lanes: Sequence[int] | Tensor) -> None:
        self.seed = seed
        self.step = step
        self.lanes = [int(lane) for lane in lanes]
        self._lanes_on_device: Tensor | None = None
        self._philox: np.random.Philox | None = None

    def drop(
        self, values: Tensor, rate: float, site: Site, layer: int = 0, lane_axis: int = 0
    ) -> Tensor:
        """`values` with a fraction `rate` of its elements zeroed and the rest rescaled, a mask per lane."""
        keep = self.keep(values.shape, rate, site, layer, lane_axis, device=values.device)
        return _masked(values, keep, _threshold_of(rate))

    def keep(
        self,
        shape: Sequence[int],
        rate: float,
        site: Site,
        layer: int = 0,
        lane_axis: int = 0,
        *,
        device: torch.device,
    ) -> Tensor:
        """The mask of `drop` for values of `shape`: True with probability 1 - `realised_rate(rate)`."""
        assert shape[lane_axis] == len(self.lanes), (tuple(shape), lane_axis, len(self.lanes))
        others = [size for axis, size in enumerate(shape) if axis != lane_axis]
        count, threshold = math.prod(others), _threshold_of(rate)
        if device.type == "cpu":
            keep = self._cpu_keep(self.lanes, count, threshold, site, layer)
        else:
            keep = self._hashed_keep(self._lanes_on(device), count, threshold, site, layer)
        return keep.view(len(self.lanes), *others).movedim(0, lane_axis)

    def drop_shared(self, values: Tensor, rate: float, site: Site) -> Tensor:
        """As `drop` for values that all lanes share: one mask, a function of (seed, step, site) alone."""
        threshold = _threshold_of(rate)
        if values.device.type == "cpu":
            keep = self._cpu_keep([ALL_LANES], values.numel(), threshold, site, 0)
        else:
            all_lanes = torch.full((1,), _signed(ALL_LANES), device=values.device)
            keep = self._hashed_keep(all_lanes, values.numel(), threshold, site, 0)
        return _masked(values, keep.view(values.shape), threshold)

    def lane_keys(self, site: Site, layer: int, device: torch.device) -> Tensor:
        """A random int64 per lane, for a kernel that draws its own masks from it: a pure function as the masks are."""
        return _lane_keys(
            self._lanes_on(device), seed=self.seed, step=self.step, site=site, layer=layer
        )

    def _cpu_keep(
        self, lanes: list[int], count: int, threshold: int, site: Site, layer: int
    ) -> Tensor:
        keep = torch.empty(len(lanes), count, dtype=torch.bool)
        for row, lane in zip(keep, lanes, strict=True):
            torch.ge(
                self._philox_bits(lane, count, site, layer)[:count],
                threshold - LEVELS // 2,
                out=row,
            )
        return keep

    def _hashed_keep(
        self, lanes_B: Tensor, count: int, threshold: int, site: Site, layer: int
    ) -> Tensor:
        bits = hashed_bits(lanes_B, count, seed=self.seed, step=self.step, site=site, layer=layer)
        return bits[:, :count] >= threshold - LEVELS // 2

    def _philox_bits(self, lane: int, count: int, site: Site, layer: int) -> Tensor:
        """`count` random int16, rounded up to whole words."""
        if self._philox is None:
            self._philox = np.random.Philox(key=_words(self.seed, self.step))
        self._philox.state = {
            "bit_generator": "Philox",
            "state": {"counter": _words(0, lane, layer, site), "key": _words(self.seed, self.step)},
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": 4,  # the buffer is used up
            "has_uint32": 0,
            "uinteger": 0,
        }
        return torch.from_numpy(self._philox.random_raw(-(-count // 4)).view(np.int16))

    def _lanes_on(self, device: torch.device) -> Tensor:
        if self._lanes_on_device is None or self._lanes_on_device.device != device:
            self._lanes_on_device = torch.tensor(self.lanes, dtype=torch.int64).to(
                device, non_blocking=True
            )
        return self._lanes_on_device


def hashed_bits(
    lanes_B: Tensor, count: int, *, seed: int, step: int, site: Site, layer: int
) -> Tensor:
    """[B, `count` rounded up to a multiple of 4] random int16 in torch operations only, the same on every device."""
    lane_keys_B = _lane_keys(lanes_B, seed=seed, step=step, site=site, layer=layer)
    states_X = torch.arange(1, -(-count // 4) + 1, device=lanes_B.device) * _signed(GOLDEN_GAMMA)
    return _mix_tensor(lane_keys_B[:, None] + states_X).view(torch.int16)


def _lane_keys(lanes_B: Tensor, *, seed: int, step: int, site: Site, layer: int) -> Tensor:
    key = 0
    for part in (seed, step, layer, int(site)):
        key = _mix(((key ^ (part & WORD)) + GOLDEN_GAMMA) & WORD)
    return _mix_tensor(lanes_B ^ _signed(key))


def drop(
    values: Tensor,
    rate: float,
    stream: DropoutStream | None,
    site: Site,
    layer: int = 0,
    lane_axis: int = 0,
) -> Tensor:
    """`stream.drop`, or `values` unchanged when there is nothing to drop."""
    if stream is None or rate == 0.0:
        return values
    return stream.drop(values, rate, site, layer, lane_axis)


def realised_rate(rate: float) -> float:
    """The probability with which an element is really dropped: `rate` rounded to a multiple of 1/65536."""
    return _threshold_of(rate) / LEVELS


def _threshold_of(rate: float) -> int:
    return min(round(rate * LEVELS), LEVELS - 1)


def _masked(values: Tensor, keep: Tensor, threshold: int) -> Tensor:
    # `where` saves only the one-byte mask for the backward pass; a product would save a mask as wide as the values.
    return torch.where(keep, values, values.new_zeros(())).mul_(LEVELS / (LEVELS - threshold))


def _words(*values: int) -> np.ndarray:
    return np.array([value & WORD for value in values], dtype=np.uint64)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _mix(word: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit words in which every input bit reaches every output bit."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & WORD
    return word ^ (word >> 31)


def _mix_tensor(words: Tensor) -> Tensor:
    """`_mix` of int64 tensors, whose products wrap as 64-bit words do."""
    words = (words ^ _shifted(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shifted(words, 27)) * _signed(0x94D049BB133111EB)
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    return (words >> bits) & (
        (1 << (64 - bits)) - 1
    )  # int64 shifts copy the sign bit; a word's shift must not
