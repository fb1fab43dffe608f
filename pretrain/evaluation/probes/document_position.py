"""Loss by position in the document: what a longer context, and the memory, are worth.

The module also has what all probes need: bins of distances, the borders of what a model can see,
and intervals of proportions.

`PositionScorer` keeps the losses that `evaluate` sums, so both are of the same tokens. Letters of
shapes as in `pretrain.model`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.segment_batch import SegmentBatch
from pretrain.config.lane_parts import lane_parts
from pretrain.config.model import ModelConfig
from pretrain.engines.engine import Scorer
from pretrain.evaluation.evaluate import EvaluationResult, evaluate
from pretrain.model.memory import Memory

NORMAL_975 = 1.959963984540054  # quantile of the normal distribution, for intervals of 95%
MOST_BINS = 64


def distance_bins(distances: Tensor) -> Tensor:
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

    A state, such as memory tokens are, has no such limit: then `total` is 0.
    """

    segment: int
    direct: int  # segment, memory and compressed memory: what one layer attends to
    total: int  # through all layers: each adds a memory (section 3.2 of Dai et al. 2019)


def memory_borders(config: ModelConfig, memory_length: int, segment_length: int) -> Borders:
    """Return the borders of a model that reads segments with a memory of this length."""
    lengths = config.memory_lengths(memory_length)
    compressed = 0
    if memory_length and config.compressed_length:
        # Rows beyond the compressed ones wait, until they are enough to be compressed.
        compressed = config.compression_rate * (config.compressed_length + 1)
    before = 0  # how much of the stream before its segment a token depends on
    for length in lengths:
        # A memory row saw as far back as the first token of its segment.
        if length:
            before = -(-before // segment_length) * segment_length + length + compressed
    direct, total = segment_length + memory_length + compressed, segment_length + before
    if config.same_length and memory_length:
        direct = min(direct, memory_length)
        total = min(total, sum(length - 1 for length in lengths) + 1)
    parts = lane_parts(config, memory_length)
    if any(part.kind == "state" for part in parts) and not parts.is_forgotten:
        total = 0
    return Borders(segment_length, direct, total)


@dataclass(frozen=True, kw_only=True)
class PositionLoss:
    """The losses of one memory length by position in the document; 0 is its first token."""

    memory_length: int
    loss: float  # mean of all tokens, in nats, as `evaluate` returns it
    first_positions: tuple[int, ...]  # where each bin starts
    losses: tuple[float, ...]  # of each bin
    # Half of each bin's 95% interval, as if tokens were independent; None for fewer than two.
    margins: tuple[float | None, ...]
    tokens: tuple[int, ...]  # of each bin


class PositionScorer(Scorer):
    """Passes a scorer's losses on, and sums them by the token's position in its document."""

    def __init__(self, scorer: Scorer) -> None:
        self.world, self._scorer = scorer.world, scorer
        self._sums = torch.zeros(3, MOST_BINS, dtype=torch.float64)  # losses, squares, tokens
        self._last_B = np.zeros(0, np.int64)  # position of the last token read
        # Loss and validity of the last target, which is the first token of the next batch.
        self._waiting: tuple[np.ndarray, np.ndarray] | None = None

    def evaluate(
        self, batch: SegmentBatch, memory: Memory | None, memory_length: int, num_tokens: int = 0
    ) -> tuple[Tensor, Memory]:
        nll_BL, after = self._scorer.evaluate(batch, memory, memory_length, num_tokens)
        losses_BL, valid_BL = nll_BL.double().cpu().numpy(), np.asarray(batch.valid_BL)
        waiting = self._waiting
        if waiting is None:  # first is the token before each lane, which was not predicted
            num_lanes = len(losses_BL)
            self._last_B = np.full(num_lanes, -1)
            waiting = np.zeros((num_lanes, 1)), np.zeros((num_lanes, 1), bool)
        losses_BX = np.concatenate([waiting[0], losses_BL[:, :-1]], axis=1)
        valid_BX = np.concatenate([waiting[1], valid_BL[:, :-1]], axis=1)
        self._add(losses_BX, valid_BX, batch.starts_BL)
        self._waiting = losses_BL[:, -1:], valid_BL[:, -1:]
        return nll_BL, after

    def result(self, evaluated: EvaluationResult) -> PositionLoss:
        """Add each lane's last token, which starts no document, and return means by position."""
        if self._waiting is not None:
            self._add(*self._waiting, np.zeros_like(self._waiting[1]))
            self._waiting = None
        used = int(self._sums[2].nonzero().max()) + 1
        losses_X, squares_X, tokens_X = self._sums[:, :used]
        counts_X = tokens_X.clamp(min=1)
        means_X = losses_X / counts_X
        variances_X = (squares_X / counts_X - means_X.square()).clamp(min=0)
        margins_X = NORMAL_975 * (variances_X / counts_X).sqrt()
        return PositionLoss(
            memory_length=evaluated.memory_length,
            loss=evaluated.loss,
            first_positions=first_distances(used),
            losses=tuple(means_X.tolist()),
            margins=tuple(
                margin if count > 1 else None
                for margin, count in zip(margins_X.tolist(), tokens_X.tolist(), strict=True)
            ),
            tokens=tuple(tokens_X.long().tolist()),
        )

    def _add(self, losses_BX: np.ndarray, valid_BX: np.ndarray, starts_BX: np.ndarray) -> None:
        positions_BX = document_positions(self._last_B, starts_BX)
        self._last_B = positions_BX[:, -1]
        bins = distance_bins(torch.from_numpy(positions_BX[valid_BX]))
        losses = torch.from_numpy(losses_BX[valid_BX])
        for row, values in enumerate((losses, losses.square(), torch.ones_like(losses))):
            self._sums[row].index_add_(0, bins, values)


def document_positions(last_B: np.ndarray, starts_BX: np.ndarray) -> np.ndarray:
    """Return each token's position in its document, [B, X], after tokens at `last_B`."""
    steps_BX = last_B[:, None] + 1 + np.arange(starts_BX.shape[1])
    return steps_BX - np.maximum.accumulate(np.where(starts_BX, steps_BX, 0), axis=1)


def loss_by_position(
    scorer: Scorer,
    corpus: Corpus,
    memory_lengths: Sequence[int],
    *,
    segment_length: int,
    num_lanes: int,
    max_tokens: int = 0,
) -> list[PositionLoss]:
    """Return the losses of the tokens that `evaluate` scores, with each memory length."""
    results = []
    for memory_length in memory_lengths:
        by_position = PositionScorer(scorer)
        evaluated = evaluate(
            by_position,
            corpus,
            memory_length=memory_length,
            segment_length=segment_length,
            num_lanes=num_lanes,
            max_tokens=max_tokens,
        )
        results.append(by_position.result(evaluated))
    return results
