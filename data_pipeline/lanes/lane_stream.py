"""LaneStream: one rank's lanes read in lockstep, as batches of segments with the lanes' cursor.

`LaneStream.__next__` returns a batch, `_BlockReader` reads its tokens and advances the lanes, and
`LaneStream._cursor_after` makes the cursor that belongs to the batch.
Shapes: B lanes of this rank, L tokens of a segment, S segments of a block, K = S * L + 1 tokens.

`EvaluationStream` reads a split once: every token is predicted once, for any lanes and ranks.
Batches are prefetched in one thread, and carry their own lane cursor, so prefetched ones do not
affect a checkpoint.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.manifest import Manifest
from data_pipeline.lanes.lane_plan import DocumentSpans, LanePlan, check_lanes, check_range
from data_pipeline.lanes.mixture import Mixture, plan_of, tokens_of_parts
from data_pipeline.lanes.segment_batch import LaneCursor, SegmentBatch, check_value
from data_pipeline.shards.shards import ShardReader
from foundation.errors import DataError

# A block is read for all lanes at once: a step then costs a few array operations, not a Python
# loop over the documents of each lane. Its length divides what each lane costs beside its tokens.
BLOCK_TOKENS = 32768
BLOCK_SEGMENTS = 64  # at most: short segments need no longer blocks


class LaneStream:
    """Endless SegmentBatches of some lanes. A lane's tokens do not depend on the other lanes.

    With a cursor, the stream continues exactly after the batch that the cursor came from. The
    cursor may have more lanes than `lanes`, and another segment length. DataError if the lanes do
    not suit the corpus (see `check_lanes`) or the cursor belongs to other data. `advice` is a
    message for the user, or "".
    """

    def __init__(
        self,
        corpus: Corpus | Mixture,
        num_lanes: int,
        seed: int,
        segment_length: int,
        lanes: range,
        cursor: LaneCursor | None = None,
    ) -> None:
        check_range(lanes, num_lanes)
        self.lanes = lanes
        self._corpus = corpus
        self._segment_length = segment_length
        self._plan = plan_of(corpus, num_lanes, seed)
        self.advice = check_lanes(self._plan, corpus.manifest.longest_whole)
        state = _checked_cursor(cursor, lanes, self._plan, corpus) if cursor else None
        starts = _positions(state) if state else [(0, 0)] * len(lanes)
        # Request what all lanes need first before any of it is waited for.
        for lane, (epoch, position) in zip(lanes, starts, strict=True):
            corpus.prefetch_lengths(self._plan.border_units(lane, epoch))
            corpus.prefetch([self._plan.first_unit(lane, epoch, position)])
        if state:
            _check_tokens(state, self._plan, corpus)
        self._reader = _BlockReader(corpus, self._plan, lanes, starts, segment_length)
        self._segment = self._reader.num_segments  # next one of the block; here: none is left

    def tokens_read(self, cursor: LaneCursor | None) -> dict[str, int]:
        """Return the tokens that the cursor's lanes have read of each corpus, by its location."""
        corpora = self._corpus.corpora if isinstance(self._corpus, Mixture) else [self._corpus]
        counts = tokens_of_parts(self._corpus, self._plan, cursor) if cursor else [0] * len(corpora)
        return {corpus.location: count for corpus, count in zip(corpora, counts, strict=True)}

    def __iter__(self) -> Iterator[SegmentBatch]:
        return self

    def __next__(self) -> SegmentBatch:
        if self._segment == self._reader.num_segments:
            self._reader.fill()
            self._segment = 0
        length, block = self._segment_length, self._reader
        first = self._segment * length
        self._segment += 1
        stream_BL1 = block.tokens_BK[:, first : first + length + 1].astype(np.int64)
        tokens_BL = stream_BL1[:, :-1]
        # Copied, because the next block overwrites the arrays, possibly before the batch is asked
        # for its cursor. The cursor is made on demand because it hashes the tokens, and only a
        # checkpoint needs it.
        epochs_B = block.epochs_SB[self._segment].copy()
        positions_B = block.positions_SB[self._segment].copy()
        return SegmentBatch(
            tokens_BL=tokens_BL,
            targets_BL=stream_BL1[:, 1:],
            starts_BL=block.starts_BK[:, first : first + length].copy(),
            lanes=self.lanes,
            make_cursor=partial(self._cursor_after, tokens_BL, epochs_B, positions_B),
        )

    def _cursor_after(
        self, tokens_BL: np.ndarray, epochs_B: np.ndarray, positions_B: np.ndarray
    ) -> LaneCursor:
        length = self._segment_length
        # Only the tokens of the current epoch: at a position below L, the rest is the last one's.
        known_B = np.minimum(positions_B, length).tolist()
        checks = [
            check_value(tokens_L[length - known :])
            for tokens_L, known in zip(tokens_BL, known_B, strict=True)
        ]
        return LaneCursor(
            seed=self._plan.seed,
            num_lanes=self._plan.num_lanes,
            manifest_hash=self._corpus.identity,
            lanes=self.lanes,
            segment_length=length,
            epochs_B=epochs_B,
            positions_B=positions_B,
            checks_B=np.array(checks, np.uint64),
        )


class _BlockReader:
    """The next S segments of every lane and one token more, and each lane's cursor in between.

    The extra token is the last target of the block. It is also the first token of the next block,
    so the walks are always one token ahead of the segments that were handed out.
    """

    def __init__(
        self,
        corpus: Corpus | Mixture,
        plan: LanePlan,
        lanes: range,
        starts: list[tuple[int, int]],
        segment_length: int,
    ) -> None:
        self.num_segments = max(1, min(BLOCK_SEGMENTS, BLOCK_TOKENS // segment_length))
        self._segment_length = segment_length
        self._block_tokens = self.num_segments * segment_length
        self._corpus = corpus
        shape = (len(lanes), self._block_tokens + 1)
        self.tokens_BK = np.zeros(shape, corpus.manifest.dtype)
        self.starts_BK = np.zeros(shape, bool)
        self.epochs_SB = np.zeros((self.num_segments + 1, len(lanes)), np.int64)  # S + 1 boundaries
        self.positions_SB = np.zeros_like(self.epochs_SB)
        self._walks = [plan.walk(lane, *start) for lane, start in zip(lanes, starts, strict=True)]
        self._readers: list[tuple[int, ShardReader | None]] = [(-1, None)] * len(lanes)
        self._prefetched: list[list[int]] = [[]] * len(lanes)
        # Epoch marks of each lane: (column of the block at which an epoch starts, that epoch). A
        # lane at position p started its epoch p columns before the block: the column is negative.
        # Here all is shifted by one block, because the first column is filled as if it were the
        # last of a block before.
        self._marks = [[(self._block_tokens - position, epoch)] for epoch, position in starts]
        self._fill_columns(self._block_tokens)
        self._shift_marks()

    def fill(self) -> None:
        """Read the next block. The extra token of the last one becomes its first."""
        self.tokens_BK[:, 0] = self.tokens_BK[:, -1]
        self.starts_BK[:, 0] = self.starts_BK[:, -1]
        self._fill_columns(1)
        self._set_cursors()
        self._shift_marks()

    def _fill_columns(self, first: int) -> None:
        """Read tokens of all lanes into the columns from `first` on."""
        self.starts_BK[:, first:] = False
        itemsize = self.tokens_BK.itemsize
        for row, walk in enumerate(self._walks):
            out = self.tokens_BK[row].data.cast("B")
            column = first
            for spans in walk.take(self._block_tokens + 1 - first):
                if spans.epoch != self._marks[row][-1][1]:
                    self._marks[row].append((column, spans.epoch))
                copy_spans(self._reader_of(row, spans.unit), spans, out[column * itemsize :])
                self.starts_BK[row, column + spans.document_starts] = True
                column += spans.num_tokens
            units, borders = walk.units_ahead(self._block_tokens)
            if units != self._prefetched[row]:
                self._prefetched[row] = units
                self._corpus.prefetch_lengths(borders)
                self._corpus.prefetch(units)
        check_tokens(self.tokens_BK[:, first:], self._corpus.manifest)

    def _reader_of(self, row: int, unit: int) -> ShardReader:
        """Return the lane's open shard, which keeps it in the cache until the lane leaves it."""
        current, reader = self._readers[row]
        if current != unit or reader is None:
            reader = self._corpus.shard(unit)
            self._readers[row] = (unit, reader)
        return reader

    def _set_cursors(self) -> None:
        """Compute epoch and position of every lane at every boundary between segments."""
        boundaries_S = np.arange(self.num_segments + 1) * self._segment_length
        for row, marks in enumerate(self._marks):
            columns, epochs = np.array(marks).T
            # The last epoch started strictly before the boundary: at the end of its share a lane
            # stays in the epoch until it reads on, as in LaneWalk.take.
            current_S = np.maximum(np.searchsorted(columns, boundaries_S, "left") - 1, 0)
            self.epochs_SB[:, row] = epochs[current_S]
            self.positions_SB[:, row] = boundaries_S - columns[current_S]

    def _shift_marks(self) -> None:
        """Count from the start of the next block, and drop epochs that ended before it."""
        for row, marks in enumerate(self._marks):
            shifted = [(column - self._block_tokens, epoch) for column, epoch in marks]
            past = sum(column < 0 for column, _ in shifted)
            self._marks[row] = shifted[max(past - 1, 0) :]  # the last of the past is current


def check_tokens(tokens: np.ndarray, manifest: Manifest) -> None:
    """Raise DataError if a token is none of the tokenizer's: no row of the embedding is for it."""
    if (largest := int(tokens.max(initial=0))) >= manifest.vocab_size:
        raise DataError(
            f"the corpus has the token {largest}, expected tokens below {manifest.vocab_size}; "
            "`data-pipeline verify` names the document"
        )


def copy_spans(reader: ShardReader, spans: DocumentSpans, out: memoryview) -> None:
    """Copy the tokens of the spans, one after the other, to the start of `out`."""
    itemsize, shard = reader.itemsize, reader.view
    starts = (reader.token_offsets[spans.documents] + spans.offsets * itemsize).tolist()
    position = 0
    for start, size in zip(starts, (spans.lengths * itemsize).tolist(), strict=True):
        out[position : position + size] = shard[start : start + size]
        position += size


def read_spans(corpus: Corpus | Mixture, taken: list[DocumentSpans]) -> np.ndarray:
    """Return the tokens that a walk has taken."""
    parts = [np.zeros(0, corpus.manifest.dtype)]
    for spans in taken:
        tokens = np.empty(spans.num_tokens, corpus.manifest.dtype)
        copy_spans(corpus.shard(spans.unit), spans, tokens.data.cast("B"))
        parts.append(tokens)
    return np.concatenate(parts)


def _checked_cursor(
    cursor: LaneCursor, lanes: range, plan: LanePlan, corpus: Corpus | Mixture
) -> LaneCursor:
    """Return the cursor of these lanes; DataError if it belongs to another plan."""
    expected = {"seed": plan.seed, "num_lanes": plan.num_lanes, "manifest_hash": corpus.identity}
    for name, value in expected.items():
        if getattr(cursor, name) != value:
            raise DataError(
                f"the state to resume from has {name}={getattr(cursor, name)}, this run has "
                f"{value}; resume with the corpus and settings that the run was started with"
            )
    return cursor.take(lanes)


def _positions(cursor: LaneCursor) -> list[tuple[int, int]]:
    """Return (epoch, position) of each lane."""
    return list(zip(cursor.epochs_B.tolist(), cursor.positions_B.tolist(), strict=True))


def _check_tokens(cursor: LaneCursor, plan: LanePlan, corpus: Corpus | Mixture) -> None:
    """Raise DataError unless the corpus holds the tokens that the lanes read last."""
    for lane, (epoch, position), check in zip(
        cursor.lanes, _positions(cursor), cursor.checks_B.tolist(), strict=True
    ):
        count = min(cursor.segment_length, position)
        taken = plan.walk(lane, epoch, position - count).take(count) if count else []
        if (found := check_value(read_spans(corpus, taken))) != check:
            raise DataError(
                f"lane {lane} at epoch {epoch}, position {position}: the corpus gives the check "
                f"value {found:016x}, the state to resume from has {check:016x}; "
                "restore the corpus that the run was started with"
            )


T = TypeVar("T")
CLOSE_SECONDS = 2.0


class Prefetcher(Generic[T]):
    """The items of `stream` in their order, up to `depth` of them read in advance.

    An error of the stream is raised by the call that would have returned the item. `wait_seconds`
    is the total time that callers have waited.
    """

    def __init__(self, stream: Iterable[T], depth: int = 2) -> None:
        self.wait_seconds = 0.0
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(max(depth, 1))
        self._stop = threading.Event()
        self._ended: BaseException | None = None
        self._thread = threading.Thread(
            target=self._read, args=(iter(stream),), name="prefetch", daemon=True
        )
        self._thread.start()

    def _read(self, stream: Iterator[T]) -> None:
        while not self._stop.is_set():
            try:
                outcome: tuple[T | None, BaseException | None] = (next(stream), None)
            except BaseException as error:  # raised again in __next__
                outcome = (None, error)
            self._put(outcome)
            if outcome[1] is not None:
                return

    def _put(self, outcome: tuple[T | None, BaseException | None]) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(outcome, timeout=0.1)  # so that close() is noticed
                break
            except queue.Full:
                continue

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._ended is not None:
            raise self._ended
        started = time.perf_counter()
        item, error = self._ready.get()
        self.wait_seconds += time.perf_counter() - started
        if error is not None:
            self._ended = error
            raise error
        return item  # type: ignore[return-value]  (None only with an error)

    def close(self) -> None:
        """Stop reading; `next` then raises StopIteration.

        A thread that is blocked by a slow store is not waited for: it ends later, or with the
        process.
        """
        self._stop.set()
        self._thread.join(CLOSE_SECONDS)
        self._ended = self._ended or StopIteration()

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


EVALUATION_SEED = 0  # equal for all runs, so that their evaluations can be compared
SLACK = 1.1  # how much longer an evaluation may take with half as many lanes


def useful_lanes(corpus: Corpus, num_lanes: int, segment_length: int, max_tokens: int = 0) -> int:
    """Return how many lanes shorten the evaluation: at most `num_lanes`, and as many on any ranks.

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
