"""SegmentBatch, what a step reads, and LaneCursor, the state of its lanes after the step.

Shapes: B lanes, L tokens of a segment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any

import numpy as np

from data_pipeline.config import LARGEST_SEED
from foundation.errors import DataError
from foundation.typed_values import Count, Line, Positive, between, from_tree

CURSOR_FORMAT = 1


@dataclass(kw_only=True)
class LaneCursor:
    """The position of each lane: all that a checkpoint stores of the data, a few numbers per lane.

    `checks_B` are hashes of the last `min(segment_length, position)` tokens that each lane has read
    in its epoch.
    """

    seed: int
    num_lanes: int
    manifest_hash: str
    lanes: range
    segment_length: int
    epochs_B: np.ndarray  # int64
    positions_B: np.ndarray  # int64, tokens read of the lane's share of the epoch
    checks_B: np.ndarray  # uint64
    format: int = CURSOR_FORMAT

    def to_tree(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "format": self.format,
            "seed": self.seed,
            "num_lanes": self.num_lanes,
            "manifest_hash": self.manifest_hash,
            "lanes": [self.lanes.start, self.lanes.stop],
            "segment_length": self.segment_length,
            "epochs": self.epochs_B.tolist(),
            "positions": self.positions_B.tolist(),
            "checks": [f"{check:016x}" for check in self.checks_B.tolist()],
        }

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> LaneCursor:
        """Return the cursor that `to_tree` described; DataError if it is invalid."""
        version = tree.get("format") if isinstance(tree, dict) else None
        if version != CURSOR_FORMAT:
            raise DataError(
                f"the lane cursor has format {version!r}, this version reads format "
                f"{CURSOR_FORMAT}; resume with the version that wrote it"
            )
        try:
            stored = from_tree(_StoredCursor, tree)
            cursor = cls(
                seed=stored.seed,
                num_lanes=stored.num_lanes,
                manifest_hash=stored.manifest_hash,
                lanes=range(*stored.lanes),
                segment_length=stored.segment_length,
                epochs_B=np.array(stored.epochs, np.int64),
                positions_B=np.array(stored.positions, np.int64),
                checks_B=np.array([int(check, 16) for check in stored.checks], np.uint64),
            )
        except (ValueError, OverflowError) as error:
            raise DataError(
                f"the lane cursor is corrupted ({error}); use another checkpoint"
            ) from None
        arrays = (cursor.lanes, cursor.epochs_B, cursor.positions_B, cursor.checks_B)
        if len(counts := set(map(len, arrays))) > 1:
            raise DataError(
                f"the lane cursor is corrupted: its lists have {sorted(counts)} entries; "
                "use another checkpoint"
            )
        return cursor

    def take(self, lanes: range) -> LaneCursor:
        """Return the cursor of some of its lanes."""
        is_inside = self.lanes.start <= lanes.start < lanes.stop <= self.lanes.stop
        if not is_inside or lanes.step != 1:
            raise DataError(
                f"the cursor holds lanes {_range_text(self.lanes)}, expected lanes "
                f"{_range_text(lanes)} among them"
            )
        rows = slice(lanes.start - self.lanes.start, lanes.stop - self.lanes.start)
        return replace(
            self,
            lanes=lanes,
            epochs_B=self.epochs_B[rows],
            positions_B=self.positions_B[rows],
            checks_B=self.checks_B[rows],
        )

    @classmethod
    def join(cls, cursors: Sequence[LaneCursor]) -> LaneCursor:
        """Merge cursors of consecutive lanes; DataError if lanes are missing or runs differ."""
        ordered = sorted(cursors, key=lambda cursor: cursor.lanes.start)
        first = ordered[0]
        for before, after in pairwise(ordered):
            if before.lanes.stop != after.lanes.start:
                raise DataError(
                    f"lanes {_range_text(before.lanes)} and {_range_text(after.lanes)} "
                    "are not consecutive"
                )
            if before._identity() != after._identity():
                raise DataError(
                    f"cursors of different runs: {before._identity()} and {after._identity()}"
                )
        return replace(
            first,
            lanes=range(first.lanes.start, ordered[-1].lanes.stop),
            epochs_B=np.concatenate([cursor.epochs_B for cursor in ordered]),
            positions_B=np.concatenate([cursor.positions_B for cursor in ordered]),
            checks_B=np.concatenate([cursor.checks_B for cursor in ordered]),
        )

    def _identity(self) -> tuple[Any, ...]:
        return self.format, self.seed, self.num_lanes, self.manifest_hash, self.segment_length

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LaneCursor) and self.to_tree() == other.to_tree()


@dataclass(frozen=True)
class _StoredCursor:
    """A cursor as JSON; LaneCursor explains its fields."""

    format: int
    seed: Annotated[int, between(0, LARGEST_SEED)]
    num_lanes: Count
    manifest_hash: Line
    lanes: tuple[Count, Count]
    segment_length: Positive
    epochs: tuple[Count, ...]
    positions: tuple[Count, ...]
    checks: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class SegmentBatch:
    """The next L tokens of B lanes. `targets_BL` is the same stream, shifted by one token."""

    tokens_BL: np.ndarray  # int64
    targets_BL: np.ndarray  # int64
    starts_BL: np.ndarray  # bool: the token is the first of its document
    lanes: range
    valid_BL: np.ndarray | None = None  # bool: the target counts; None: all count
    parts_BL: np.ndarray | None = None  # int64, of evaluations: the target's part of the split
    make_cursor: Callable[[], LaneCursor] | None = field(default=None, repr=False)

    @cached_property
    def cursor(self) -> LaneCursor:
        """The state of the lanes after this batch, regardless of what was read since."""
        assert self.make_cursor is not None, "evaluation batches and slots have no cursor"
        return self.make_cursor()

    def split(self, count: int) -> list[SegmentBatch]:
        """Return `count` slots of B / count consecutive lanes each."""
        assert len(self.lanes) % count == 0, (
            f"{len(self.lanes)} lanes do not divide into {count} slots"
        )
        size = len(self.lanes) // count
        starts = range(0, len(self.lanes), size)
        return [self._part(rows=slice(row, row + size)) for row in starts]

    def segments(self, count: int) -> list[SegmentBatch]:
        """Return `count` batches of all lanes, each with its L / count tokens of every lane."""
        length = self.tokens_BL.shape[1]
        assert length % count == 0, f"{length} tokens do not divide into {count} segments"
        size = length // count
        starts = range(0, length, size)
        return [self._part(columns=slice(column, column + size)) for column in starts]

    def _part(self, rows: slice = slice(None), columns: slice = slice(None)) -> SegmentBatch:
        return SegmentBatch(
            self.tokens_BL[rows, columns],
            self.targets_BL[rows, columns],
            self.starts_BL[rows, columns],
            self.lanes[rows],
            None if self.valid_BL is None else self.valid_BL[rows, columns],
        )


def check_value(tokens: np.ndarray) -> int:
    """Return a 64-bit hash of some tokens that does not depend on their dtype."""
    content = tokens.astype("<u4").tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _range_text(lanes: range) -> str:
    return f"{lanes.start}-{lanes.stop - 1}"
