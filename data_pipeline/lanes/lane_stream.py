"""One rank's lanes, read in lockstep as batches of segments, each with the cursor after it.

`_BlockReader` reads tokens of all lanes in blocks and advances the lanes. `LaneStream.__next__`
cuts batches out of the blocks; `LaneStream._cursor_after` makes a batch's cursor.
Shapes: B lanes of this rank, L tokens of a segment, S segments of a block, K = S * L + 1 tokens.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.manifest import Manifest
from data_pipeline.lanes.lane_plan import DocumentSpans, LanePlan, check_lanes, check_range
from data_pipeline.lanes.mixture import Mixture, plan_of, tokens_of_parts
from data_pipeline.lanes.segment_batch import LaneCursor, SegmentBatch, check_value
from data_pipeline.shards.shards import ShardReader
from foundation.errors import DataError

# Lanes are read in blocks of many segments, so that most steps cost a few array operations instead
# of a Python loop over the documents of each lane.
BLOCK_TOKENS = 32768  # the most tokens of a lane in a block of more than one segment
BLOCK_SEGMENTS = 64  # the most segments of a block


class LaneStream:
    """Endless SegmentBatches of some lanes. A lane's tokens do not depend on the other lanes.

    With a cursor, the stream continues right after the cursor's batch. The cursor may have more
    lanes than `lanes` and another segment length. Raises DataError if a lane is empty
    (`check_lanes`) or the cursor belongs to other data. `advice` is a message for the user, or "".
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
        # Request the first lengths and shards of all lanes before waiting for any of them.
        for lane, (epoch, position) in zip(lanes, starts, strict=True):
            corpus.prefetch_lengths(self._plan.border_units(lane, epoch))
            corpus.prefetch([self._plan.first_unit(lane, epoch, position)])
        if state:
            _check_tokens(state, self._plan, corpus)
        self._reader = _BlockReader(corpus, self._plan, lanes, starts, segment_length)
        self._segment = self._reader.num_segments  # next segment of the block, here past its end

    def tokens_read(self, cursor: LaneCursor | None) -> dict[str, int]:
        """Return location of a corpus -> how many of its tokens the cursor's lanes have read."""
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
        # The cursor is made on demand, because it hashes tokens and only checkpoints need it. By
        # then the next block may have overwritten these arrays, so copy them.
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
        # Hash only tokens of the current epoch: if the position is below L, the segment began in
        # the previous one.
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
    """The next S segments of every lane and one more token, with cursors at all segment boundaries.

    The extra token is the last target of this block and the first input of the next one. So walks
    are always one token ahead of the segments of the block.
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
        # Epoch marks of each lane: (column of the block where an epoch starts, that epoch). A lane
        # at position p started its epoch p columns before the block, at a negative column. The very
        # first token is read as the extra one of an imaginary block before the first. So the marks
        # refer to that block until `_shift_marks`.
        self._marks = [[(self._block_tokens - position, epoch)] for epoch, position in starts]
        self._fill_columns(self._block_tokens)
        self._shift_marks()

    def fill(self) -> None:
        """Read the next block; its first token is the extra one of the previous block."""
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
        """Return the lane's shard. It stays open, and so in the cache, until the lane leaves it."""
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
            # "left": an epoch that starts exactly at a boundary does not count there. Until a lane
            # reads on, it is at the end of the previous epoch, as in LaneWalk.take.
            current_S = np.maximum(np.searchsorted(columns, boundaries_S, "left") - 1, 0)
            self.epochs_SB[:, row] = epochs[current_S]
            self.positions_SB[:, row] = boundaries_S - columns[current_S]

    def _shift_marks(self) -> None:
        """Make the marks relative to the next block, and drop epochs that ended before it."""
        for row, marks in enumerate(self._marks):
            shifted = [(column - self._block_tokens, epoch) for column, epoch in marks]
            past = sum(column < 0 for column, _ in shifted)
            self._marks[row] = shifted[max(past - 1, 0) :]  # the last past mark is still current


def check_tokens(tokens: np.ndarray, manifest: Manifest) -> None:
    """Raise DataError if a token is not in the vocabulary: the embedding has no row for it."""
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
    """Return the tokens of spans, as `LaneWalk.take` returns them."""
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
        if (value := check_value(read_spans(corpus, taken))) != check:
            raise DataError(
                f"lane {lane} at epoch {epoch}, position {position}: the corpus gives the check "
                f"value {value:016x}, the state to resume from has {check:016x}; "
                "restore the corpus that the run was started with"
            )
