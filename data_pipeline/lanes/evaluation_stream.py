"""EvaluationStream: a split read once. Every token is predicted once, for any lanes and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.lane_plan import check_range
from data_pipeline.lanes.lane_stream import check_tokens, read_spans
from data_pipeline.lanes.mixture import plan_of
from data_pipeline.lanes.segment_batch import SegmentBatch

EVALUATION_SEED = 0  # equal for all runs, so that their evaluations can be compared
SLACK = 1.1  # how much longer an evaluation may take with half as many lanes


def useful_lanes(corpus: Corpus, num_lanes: int, segment_length: int, max_tokens: int = 0) -> int:
    """Return how many lanes shorten the evaluation: at most `num_lanes`, equal on any ranks.

    Lanes consist of whole documents, except of a stream. If a few long documents hold most of the
    tokens, more lanes would only be empty sooner.
    """

    def num_batches(lanes: int) -> int:
        return len(EvaluationStream(corpus, lanes, segment_length, range(1), max_tokens))

    pieces = corpus.num_tokens if corpus.manifest.is_stream else corpus.num_documents
    lanes = min(num_lanes, pieces)
    longest = num_batches(lanes) * SLACK
    while lanes > 1 and num_batches(lanes // 2) <= longest:
        lanes //= 2
    return lanes


def evaluated_lanes(num_lanes: int, rank: int, world_size: int) -> range:
    """Return the lanes that the rank evaluates: about equally many each, none on some if few."""
    first, end = (-(-number * num_lanes // world_size) for number in (rank, rank + 1))
    return range(first, end)


class EvaluationStream:
    """The same number of SegmentBatches on every rank; `valid_BL` marks the targets that count.

    Targets are the stream itself, inputs the stream shifted right by one, with an end-of-document
    token before each lane: a document's first token is predicted too. With `max_tokens`, only the
    first tokens of the split in a fixed random order of documents are read, of a stream its first;
    the last document may be cut.
    """

    def __init__(
        self, corpus: Corpus, num_lanes: int, segment_length: int, lanes: range, max_tokens: int = 0
    ) -> None:
        check_range(lanes, num_lanes)
        self.lanes = lanes
        self.num_tokens = min(corpus.num_tokens, max_tokens or corpus.num_tokens)  # of all lanes
        # A plan of one lane gives the order; its first num_tokens are cut into the lanes here.
        plan = plan_of(corpus, 1, EVALUATION_SEED)
        cuts = [lane * self.num_tokens // num_lanes for lane in range(num_lanes)]
        corpus.prefetch_lengths(dict.fromkeys(plan.unit_at(0, cut) for cut in cuts))
        starts = [min(plan.next_start(0, cut), self.num_tokens) for cut in cuts]
        starts.append(self.num_tokens)
        longest = max(end - start for start, end in pairwise(starts))
        self.num_batches = -(-longest // segment_length)
        self._corpus = corpus
        self._segment_length = segment_length
        self._batches_done = 0
        self._remaining = [starts[lane + 1] - starts[lane] for lane in lanes]
        self._walks = [plan.walk(0, 0, starts[lane]) for lane in lanes]
        # The unit that each lane is in, and those that it reads after it.
        self._units = [plan.units_between(0, starts[lane], starts[lane + 1]) for lane in lanes]
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
            taken = walk.take(count)
            if taken:
                self._prefetch_after(self._units[row], taken[-1].unit)
            stream_BL1[row, 1 : count + 1] = read_spans(self._corpus, taken)
            valid_BL1[row, 1 : count + 1] = True
            column = 1
            for spans in taken:
                starts_BL1[row, column + spans.document_starts] = True
                column += spans.num_tokens
        check_tokens(stream_BL1, self._corpus.manifest)
        self._last_B, self._last_starts_B = stream_BL1[:, -1], starts_BL1[:, -1]
        return SegmentBatch(
            tokens_BL=stream_BL1[:, :-1],
            targets_BL=stream_BL1[:, 1:],
            starts_BL=starts_BL1[:, :-1],
            lanes=self.lanes,
            valid_BL=valid_BL1[:, 1:],
        )

    def _prefetch_after(self, units: list[int], current: int) -> None:
        """Prefetch the next unit of a lane when the lane has entered a new one."""
        if units[0] != current:
            del units[: units.index(current)]
            self._corpus.prefetch(units[1:2])
