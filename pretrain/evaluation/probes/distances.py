"""Distances: their bins, the borders of what a model can see, and intervals of proportions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pretrain.config.lane_parts import lane_parts
from pretrain.config.model import ModelConfig

NORMAL_975 = 1.959963984540054  # for intervals of 95%


def bins_of(distances: Tensor) -> Tensor:
    """Return the bin of each distance: 0, 1, 2 to 3, 4 to 7, and so on; 0 for negative ones."""
    return torch.frexp(distances.clamp(min=0).double()).exponent.long()


def first_distances(num_bins: int) -> tuple[int, ...]:
    """Return the first distance of each bin."""
    return tuple((1 << number) >> 1 for number in range(num_bins))


def bin_names(first: tuple[int, ...]) -> list[str]:
    """Return the texts of bins: 0, 1, 2-3, ..., and 64+ for the last."""
    names = [
        str(start) if start == end - 1 else f"{start}-{end - 1}" for start, end in pairwise(first)
    ]
    return [*names, f"{first[-1]}+"]


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """Return the interval of 95% of a proportion (Wilson 1927); `successes` may be fractional."""
    share, square = successes / trials, NORMAL_975**2
    center = (share + square / (2 * trials)) / (1 + square / trials)
    width = NORMAL_975 * math.sqrt(share * (1 - share) / trials + square / (4 * trials**2))
    half = width / (1 + square / trials)
    return max(0.0, center - half), min(1.0, center + half)


@dataclass(frozen=True)
class Borders:
    """How far back a token can see, in tokens; from `total` on, nothing can be recalled.

    The state of a deltanet layer and memory tokens have no such limit: then `total` is 0.
    """

    segment: int
    direct: int  # segment, memory and compressed memory: what one layer attends to
    total: int  # through all layers: each adds a memory (section 3.2 of Dai et al. 2019)


def borders_of(config: ModelConfig, memory_length: int, segment_length: int) -> Borders:
    """Return the borders of a model that reads segments with a memory of this length."""
    lengths = config.memory_lengths(memory_length)
    compressed = 0
    if memory_length and config.compressed_length:
        # Up to a group less one waits for its group.
        compressed = config.compression_rate * (config.compressed_length + 1)
    before = 0  # how much of the stream before its segment a token depends on
    for length in lengths:
        # Memory rows are as old as the first token that was in their segment.
        if length:
            before = -(-before // segment_length) * segment_length + length + compressed
    direct, total = segment_length + memory_length + compressed, segment_length + before
    if config.same_length and memory_length:
        direct = min(direct, memory_length)
        total = min(total, sum(length - 1 for length in lengths) + 1)
    carries_state = config.num_deltanet_layers or config.memory_tokens
    if carries_state and not lane_parts(config, memory_length).is_forgotten:
        total = 0
    return Borders(segment_length, direct, total)
