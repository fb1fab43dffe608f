"""One rank's lanes, read in lock step: batches of segments out of a corpus, each with the lanes' state after it.

Shapes: B lanes of this rank, L tokens of a segment, K segments read at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.errors import DataError
from data_pipeline.lanes.evaluation_stream import EvaluationStream
from data_pipeline.lanes.lane_check import check_lanes
from data_pipeline.lanes.lane_plan import LanePlan, LaneWalk, Run
from data_pipeline.lanes.lane_tokens import check_range, copy_run, plan_of, read_runs
from data_pipeline.lanes.mixture import Mixture, tokens_of_parts
from data_pipeline.lanes.segment_batch import LaneCursor, SegmentBatch, check_value
from data_pipeline.shards.shards import ShardReader

__all__ = ["EvaluationStream", "LaneCursor", "LaneStream", "SegmentBatch"]

# Pieces are copied for so many tokens of a lane at once that a step costs a few array operations for all lanes.
BLOCK_TOKENS = 8192
BLOCK_SEGMENTS = 64  # at most: short segments need not be read far ahead


class LaneStream:
    """Endless SegmentBatches of some lanes. A lane's tokens do not depend on which other lanes are read here.

    With a cursor it goes on exactly behind the batch that the cursor came from; the cursor may hold more lanes than
    `lanes`, and another segment length. DataError when the lanes do not suit the corpus (see `check_lanes`) or the
    cursor belongs to other data. `advice` is text for the user, or "".
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
        self.advice = check_lanes(self._plan, corpus.manifest.longest_document)
        state = _checked_cursor(cursor, lanes, self._plan, corpus) if cursor else None
        places = _places(state) if state else [(0, 0)] * len(lanes)
        for lane, place in zip(lanes, places, strict=True):
            corpus.prefetch(self._plan.first_units(lane, *place))
        if state:
            _check_tokens(state, self._plan, corpus)
        self._reader = _BlockReader(corpus, self._plan, lanes, places, segment_length)
        self._segment = self._reader.num_segments  # of the block; this one: the block is used up

    def tokens_read(self, cursor: LaneCursor | None) -> dict[str, int]:
        """Tokens of each corpus that the cursor's lanes have read since the run began, by the corpus' place."""
        corpora = self._corpus.corpora if isinstance(self._corpus, Mixture) else [self._corpus]
        counts = tokens_of_parts(self._corpus, self._plan, cursor) if cursor else [0] * len(corpora)
        return {corpus.place: count for corpus, count in zip(corpora, counts, strict=True)}

    def __iter__(self) -> Iterator[SegmentBatch]:
        return self

    def __next__(self) -> SegmentBatch:
        if self._segment == self._reader.num_segments:
            self._reader.fill()
            self._segment = 0
        length, block = self._segment_length, self._reader
        begin = self._segment * length
        self._segment += 1
        stream_BL1 = block.tokens_BK[:, begin : begin + length + 1].astype(np.int64)
        tokens_BL = stream_BL1[:, :-1]
        # Copies: the next block will overwrite them, and the batch may be asked for its cursor after that.
        epochs_B, positions_B = (
            block.epochs_SB[self._segment].copy(),
            block.positions_SB[self._segment].copy(),
        )
        return SegmentBatch(
            tokens_BL=tokens_BL,
            targets_BL=stream_BL1[:, 1:],
            starts_BL=block.starts_BK[:, begin : begin + length].copy(),
            lanes=self.lanes,
            make_cursor=partial(self._cursor_after, tokens_BL, epochs_B, positions_B),
        )

    def _cursor_after(
        self, tokens_BL: np.ndarray, epochs_B: np.ndarray, positions_B: np.ndarray
    ) -> LaneCursor:
        length = self._segment_length
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
    """The next K segments of every lane, one token more than that, and where each lane stands after each segment."""

    def __init__(
        self,
        corpus: Corpus | Mixture,
        plan: LanePlan,
        lanes: range,
        places: list[tuple[int, int]],
        segment_length: int,
    ) -> None:
        self.num_segments = max(1, min(BLOCK_SEGMENTS, BLOCK_TOKENS // segment_length))
        self._segment_length = segment_length
        self._block_tokens = self.num_segments * segment_length
        self._corpus = corpus
        shape = (len(lanes), self._block_tokens + 1)
        self.tokens_BK = np.zeros(shape, corpus.manifest.dtype)
        self.starts_BK = np.zeros(shape, bool)
        self.epochs_SB = np.zeros((self.num_segments + 1, len(lanes)), np.int64)
        self.positions_SB = np.zeros_like(self.epochs_SB)
        self._walks = [plan.walk(lane, *place) for lane, place in zip(lanes, places, strict=True)]
        self._readers: list[tuple[int, ShardReader | None]] = [(-1, None)] * len(lanes)
        self._asked: list[list[int]] = [[]] * len(
            lanes
        )  # units that are read next, as the corpus was told
        # Per lane: tokens since the block's begin at which an epoch began (negative: before it), and that epoch.
        self._marks = [[(self._block_tokens - position, epoch)] for epoch, position in places]
        self._fill_columns(
            self._block_tokens
        )  # the last column: the token ahead, which the first block begins with
        self._shift_marks()

    def fill(self) -> None:
        """Read the next block. The token ahead of the last one is the first of this one."""
        self.tokens_BK[:, 0] = self.tokens_BK[:, -1]
        self.starts_BK[:, 0] = self.starts_BK[:, -1]
        self._fill_columns(1)
        self._note_places()
        self._shift_marks()

    def _fill_columns(self, first: int) -> None:
        """Read into the columns from `first` on, for all lanes."""
        self.starts_BK[:, first:] = False
        itemsize = self.tokens_BK.itemsize
        for row, walk in enumerate(self._walks):
            out = self.tokens_BK[row].data.cast("B")
            column = first
            for run in walk.take(self._block_tokens + 1 - first):
                self._mark(row, run.epoch, column)
                self._copy(row, run, out[column * itemsize :])
                begins = column + np.cumsum(run.lengths) - run.lengths
                self.starts_BK[row, begins[run.offsets == 0]] = True
                column += run.num_tokens
            self._ask_ahead(row, walk.units_ahead(self._block_tokens))

    def _ask_ahead(self, row: int, units: list[int]) -> None:
        if units != self._asked[row]:
            self._asked[row] = units
            self._corpus.prefetch(units)

    def _copy(self, row: int, run: Run, out: memoryview) -> None:
        unit, reader = self._readers[row]
        if unit != run.unit or reader is None:
            reader = self._corpus.shard(run.unit)
            self._readers[row] = (run.unit, reader)
        copy_run(reader, run, out)

    def _mark(self, row: int, epoch: int, column: int) -> None:
        if epoch != self._marks[row][-1][1]:
            self._marks[row].append((column, epoch))

    def _note_places(self) -> None:
        boundaries_S = np.arange(self.num_segments + 1) * self._segment_length
        for row, marks in enumerate(self._marks):
            columns, epochs = np.array(marks).T
            # The last epoch begun strictly before the boundary: at an epoch's end a lane stays there until it reads on.
            current_S = np.maximum(np.searchsorted(columns, boundaries_S, "left") - 1, 0)
            self.epochs_SB[:, row] = epochs[current_S]
            self.positions_SB[:, row] = boundaries_S - columns[current_S]

    def _shift_marks(self) -> None:
        """Count from the begin of the next block, and forget epochs that ended before it."""
        for row, marks in enumerate(self._marks):
            shifted = [(column - self._block_tokens, epoch) for column, epoch in marks]
            past = sum(column < 0 for column, _ in shifted)
            self._marks[row] = shifted[max(past - 1, 0) :]


def _checked_cursor(
    cursor: LaneCursor, lanes: range, plan: LanePlan, corpus: Corpus | Mixture
) -> LaneCursor:
    """The state of these lanes, after it was found to belong to this plan."""
    expected = {"seed": plan.seed, "num_lanes": plan.num_lanes, "manifest_hash": corpus.identity}
    for name, value in expected.items():
        if getattr(cursor, name) != value:
            raise DataError(
                f"the state to resume from has {name}={getattr(cursor, name)}, this run has {value}; "
                "resume with the corpus and settings the run was started with"
            )
    return cursor.take(lanes)


def _places(cursor: LaneCursor) -> list[tuple[int, int]]:
    """(epoch, position) of each lane."""
    return list(zip(cursor.epochs_B.tolist(), cursor.positions_B.tolist(), strict=True))


def _check_tokens(cursor: LaneCursor, plan: LanePlan, corpus: Corpus | Mixture) -> None:
    """DataError unless the corpus has the tokens that the lanes have read last."""
    for lane, (epoch, position), check in zip(
        cursor.lanes, _places(cursor), cursor.checks_B.tolist(), strict=True
    ):
        found = check_value(
            read_runs(corpus, _last_runs(plan, lane, epoch, position, cursor.segment_length))
        )
        if found != check:
            raise DataError(
                f"lane {lane} at epoch {epoch}, position {position}: the corpus gives the check value {found:016x}, "
                f"the state to resume from has {check:016x}; restore the corpus the run was started with"
            )


def _last_runs(plan: LanePlan, lane: int, epoch: int, position: int, count: int) -> list[Run]:
    count = min(count, position)
    return LaneWalk(plan, lane, epoch, position - count).take(count) if count else []
