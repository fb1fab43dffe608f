"""A split read once, for evaluation: every token is predicted exactly once, whatever the lanes and ranks.

Shapes: B lanes of this rank, L tokens of a segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.lane_plan import Run
from data_pipeline.lanes.lane_tokens import check_range, plan_of, read_runs
from data_pipeline.lanes.segment_batch import SegmentBatch

EVALUATION_SEED = 0  # evaluations compare between runs, so their order is the same in all


SLACK = 1.1  # how much longer an evaluation may take for half as many lanes


def useful_lanes(
    corpus: Corpus, num_lanes: int, segment_length: int, max_tokens: int = 0, multiple_of: int = 1
) -> int:
    """At most `num_lanes`, rounded up to a multiple of the ranks: as many as shorten the evaluation.

    Lanes consist of whole documents, so where a few long ones hold most of the tokens, further lanes would wait empty.
    """

    def num_batches(per_rank: int) -> int:
        return len(
            EvaluationStream(corpus, per_rank * multiple_of, segment_length, range(1), max_tokens)
        )

    per_rank = -(-min(num_lanes, corpus.num_documents) // multiple_of)
    longest = num_batches(per_rank) * SLACK
    while per_rank > 1 and num_batches(per_rank // 2) <= longest:
        per_rank //= 2
    return per_rank * multiple_of


class EvaluationStream:
    """The same number of SegmentBatches on every rank; `valid_BL` says which targets count.

    Targets are the stream itself and inputs the stream shifted by one, with an end-of-document token in front of each
    lane, so that a document's first token is predicted too. Lanes consist of whole documents. With `max_tokens` it is
    the first so many tokens of the split in a fixed random order of documents; the last one may be cut.
    """

    def __init__(
        self, corpus: Corpus, num_lanes: int, segment_length: int, lanes: range, max_tokens: int = 0
    ) -> None:
        check_range(lanes, num_lanes)
        self.lanes = lanes
        self.num_tokens = min(corpus.num_tokens, max_tokens or corpus.num_tokens)  # of all lanes
        plan = plan_of(corpus, 1, EVALUATION_SEED)
        shares = [lane * self.num_tokens // num_lanes for lane in range(num_lanes + 1)]
        corpus.prefetch(dict.fromkeys(plan.unit_at(0, place) for place in shares[:-1]))
        begins = [min(plan.document_begin(0, place), self.num_tokens) for place in shares[:-1]] + [
            self.num_tokens
        ]
        longest = max(end - begin for begin, end in pairwise(begins))
        self.num_batches = -(-longest // segment_length)
        self._corpus = corpus
        self._segment_length = segment_length
        self._batches_done = 0
        self._remaining = [begins[lane + 1] - begins[lane] for lane in lanes]
        self._walks = [plan.walk(0, 0, begins[lane]) for lane in lanes]
        # Of each lane, what it still reads: the unit it stands in and those behind it.
        self._units = [plan.units_between(0, begins[lane], begins[lane + 1]) for lane in lanes]
        for units in self._units:
            corpus.prefetch(units[:2])
        self._last_B = np.full(len(lanes), corpus.manifest.end_id, np.int64)
        self._last_starts_B = np.ones(len(lanes), bool)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[SegmentBatch]:
        return self

    def __next__(self) -> SegmentBatch:
        if self._batches_done == self.num_batches:
            raise StopIteration
        self._batches_done += 1
        shape = (len(self.lanes), self._segment_length + 1)
        stream_BL1 = np.full(shape, self._corpus.manifest.end_id, np.int64)
        starts_BL1, valid_BL1 = np.zeros(shape, bool), np.zeros(shape, bool)
        stream_BL1[:, 0], starts_BL1[:, 0] = self._last_B, self._last_starts_B
        for row, walk in enumerate(self._walks):
            count = min(self._segment_length, self._remaining[row])
            self._remaining[row] -= count
            runs = walk.take(count)
            if runs:
                self._ask_behind(self._units[row], runs[-1].unit)
            stream_BL1[row, 1 : count + 1] = read_runs(self._corpus, runs)
            starts_BL1[row, 1 : count + 1] = _starts(runs, count)
            valid_BL1[row, 1 : count + 1] = True
        self._last_B, self._last_starts_B = stream_BL1[:, -1], starts_BL1[:, -1]
        return SegmentBatch(
            tokens_BL=stream_BL1[:, :-1],
            targets_BL=stream_BL1[:, 1:],
            starts_BL=starts_BL1[:, :-1],
            lanes=self.lanes,
            valid_BL=valid_BL1[:, 1:],
        )

    def _ask_behind(self, units: list[int], current: int) -> None:
        """When a lane has entered a unit, have the next one fetched."""
        if units[0] != current:
            del units[: units.index(current)]
            self._corpus.prefetch(units[1:2])


def _starts(runs: list[Run], count: int) -> np.ndarray:
    starts = np.zeros(count, bool)
    place = 0
    for run in runs:
        begins = place + np.cumsum(run.lengths) - run.lengths
        starts[begins[run.offsets == 0]] = True
        place += run.num_tokens
    return starts
