"""EvaluationStream: a split read once. Every token is predicted once, for any lanes and ranks.

An evaluation of less than a whole split reads either its first documents, for long text, or the
heads (first tokens) of documents, for a loss: so a few tokens come from many documents.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.lane_plan import DocumentSpans, LanePlan, check_range
from data_pipeline.lanes.lane_stream import check_tokens, read_spans
from data_pipeline.lanes.mixture import plan_of
from data_pipeline.lanes.segment_batch import SegmentBatch

EVALUATION_SEED = 0  # equal for all runs, so that their evaluations can be compared
SLACK = 1.1  # lanes are halved if the evaluation then takes at most 1.1 times as long
NUM_PARTS = 64  # parts of a split; each has a loss of its own
FEWEST_DOCUMENTS = 100  # at least 100 documents have a head read, if the split has them


def useful_lanes(
    corpus: Corpus, num_lanes: int, segment_length: int, max_tokens: int = 0, heads: bool = False
) -> int:
    """Return how many lanes shorten the evaluation: at most `num_lanes`, equal on all ranks.

    A lane has whole documents, unless the split is a stream. If a few long documents have most of
    the tokens, more lanes would only be empty sooner.
    """

    def num_batches(lanes: int) -> int:
        return len(EvaluationStream(corpus, lanes, segment_length, range(1), max_tokens, heads))

    pieces = corpus.num_tokens if corpus.manifest.is_stream else corpus.num_documents
    lanes = min(num_lanes, pieces)
    longest = num_batches(lanes) * SLACK
    while lanes > 1 and num_batches(lanes // 2) <= longest:
        lanes //= 2
    return lanes


def evaluated_lanes(num_lanes: int, rank: int, world_size: int) -> range:
    """Return the lanes that the rank evaluates; the numbers of two ranks differ by one at most."""
    first, end = (-(-number * num_lanes // world_size) for number in (rank, rank + 1))
    return range(first, end)


class EvaluationStream:
    """The same number of SegmentBatches on every rank; `valid_BL` marks the targets that count.

    Targets are the stream itself, inputs the stream shifted right by one, with an end-of-document
    token before each lane: a document's first token is predicted too. `max_tokens` is the most
    targets: the first tokens of a stream, or of the documents in a fixed random order, or with
    `heads` of `heads_plan`. The last document may be cut. `parts_BL` has the number of each
    target's part: successive documents with a NUM_PARTS-th of the tokens, or a stretch of a stream.
    """

    def __init__(
        self,
        corpus: Corpus,
        num_lanes: int,
        segment_length: int,
        lanes: range,
        max_tokens: int = 0,
        heads: bool = False,
    ) -> None:
        check_range(lanes, num_lanes)
        self.lanes = lanes
        # Tokens that all lanes read together.
        self.num_tokens = min(corpus.num_tokens, max_tokens or corpus.num_tokens)
        # A plan of one lane gives the order; its first num_tokens are cut into the lanes here.
        heads &= self.num_tokens < corpus.num_tokens and not corpus.manifest.is_stream
        plan = heads_plan(corpus, self.num_tokens) if heads else plan_of(corpus, 1, EVALUATION_SEED)
        cuts = [lane * self.num_tokens // num_lanes for lane in range(num_lanes)]
        corpus.prefetch_lengths(dict.fromkeys(plan.unit_at(0, cut) for cut in cuts))
        starts = [min(plan.next_start(0, cut), self.num_tokens) for cut in cuts]
        starts.append(self.num_tokens)
        longest = max(end - start for start, end in pairwise(starts))
        self.num_batches = -(-longest // segment_length)
        self._corpus, self._plan = corpus, plan
        self._segment_length = segment_length
        self._batches_done = 0
        self.num_documents = 0  # documents that began in the batches until now
        self._remaining = [starts[lane + 1] - starts[lane] for lane in lanes]
        self._walks = [plan.walk(0, 0, starts[lane]) for lane in lanes]
        # The unit that each lane is in, and the units that it reads later.
        self._units = [plan.units_between(0, starts[lane], starts[lane + 1]) for lane in lanes]
        for units in self._units:
            corpus.prefetch(units[:2])
        self._last_B = np.full(len(lanes), corpus.manifest.end_id, np.int64)
        self._last_starts_B = np.ones(len(lanes), bool)
        self._offsets = [starts[lane] for lane in lanes]  # each lane's next token in the plan

    def __len__(self) -> int:
        return self.num_batches

    @property
    def all_documents(self) -> int:
        """Documents that all lanes read together."""
        if self._corpus.manifest.is_stream:
            return 1
        if self.num_tokens == self._corpus.num_tokens:
            return self._corpus.num_documents
        taken = self._plan.walk(0).take(self.num_tokens)
        return sum(int(spans.are_starts.sum()) for spans in taken)

    def __iter__(self) -> Iterator[SegmentBatch]:
        return self

    def __next__(self) -> SegmentBatch:
        if self._batches_done == self.num_batches:
            raise StopIteration
        self._batches_done += 1
        shape = (len(self.lanes), self._segment_length + 1)
        stream_BL1 = np.full(shape, self._corpus.manifest.end_id, np.int64)
        starts_BL1, valid_BL1 = np.zeros(shape, bool), np.zeros(shape, bool)
        parts_BL1 = np.zeros(shape, np.int64)
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
                end = column + spans.num_tokens
                parts_BL1[row, column:end] = self._parts_of(self._offsets[row], spans)
                self._offsets[row] += end - column
                column = end
        check_tokens(stream_BL1, self._corpus.manifest)
        self.num_documents += int(starts_BL1[:, 1:].sum())
        self._last_B, self._last_starts_B = stream_BL1[:, -1], starts_BL1[:, -1]
        return SegmentBatch(
            tokens_BL=stream_BL1[:, :-1],
            targets_BL=stream_BL1[:, 1:],
            starts_BL=starts_BL1[:, :-1],
            lanes=self.lanes,
            valid_BL=valid_BL1[:, 1:],
            parts_BL=parts_BL1[:, 1:],
        )

    def _parts_of(self, offset: int, spans: DocumentSpans) -> np.ndarray:
        """Return the part of each token of the spans; `offset` is where they begin in the plan."""
        if self._corpus.manifest.is_stream:
            firsts = offset + np.arange(spans.num_tokens)
        else:
            before = offset + np.cumsum(spans.lengths) - spans.lengths
            firsts = np.repeat(before - spans.offsets, spans.lengths)
        return firsts * NUM_PARTS // self.num_tokens

    def _prefetch_after(self, units: list[int], current: int) -> None:
        """Prefetch the next unit of a lane when the lane has entered a new one."""
        if units[0] != current:
            del units[: units.index(current)]
            self._corpus.prefetch(units[1:2])


def heads_plan(corpus: Corpus, num_tokens: int) -> LanePlan:
    """Return a plan of one lane that reads at least `num_tokens`: the heads of documents.

    A head has a FEWEST_DOCUMENTS-th of `num_tokens`, and shards in their random order are read
    until they have enough. If all have too few, heads have the shortest length that is enough.
    """
    order = plan_of(corpus, 1, EVALUATION_SEED).epoch_order(0).units
    head, total = -(-num_tokens // FEWEST_DOCUMENTS), 0
    lengths: dict[int, np.ndarray] = {}
    for unit in order.tolist():
        lengths[unit] = corpus.document_lengths(unit)
        total += int(np.minimum(lengths[unit], head).sum())
        if total >= num_tokens:
            break
    else:
        lengths_D = np.concatenate(list(lengths.values()))
        candidates = range(int(lengths_D.max()))
        head = bisect_left(candidates, num_tokens, key=lambda h: np.minimum(lengths_D, h).sum())
    heads = {unit: np.minimum(lengths_D, head) for unit, lengths_D in sorted(lengths.items())}
    unit_tokens = np.zeros(len(order), np.int64)
    unit_tokens[list(heads)] = [heads_D.sum() for heads_D in heads.values()]
    return LanePlan(
        unit_tokens, 1, EVALUATION_SEED, heads.__getitem__, lambda _: np.array(list(heads))
    )
