"""The documents that each lane reads, in order: arithmetic on token counts, without tokens.

A unit is a shard. Each epoch permutes the units, and the documents inside each unit. The result is
a virtual stream of T tokens. Lane i of N has a *share* of it: the documents whose first token is in
[i*T/N, (i+1)*T/N). After its share of one epoch a lane continues with its share of the next. So
every document is read whole, once per epoch.

A corpus can be a *stream*: one document that lanes enter at any token, as in Dai et al. 2019. Then
nothing is permuted; lane i reads exactly the tokens [i*T/N, (i+1)*T/N) in every epoch and starts
there with an empty memory. The stream was cut into documents for storage only.

A lane's tokens are a function of (unit tokens, seed, number of lanes, lane). Ranks do not occur
here, so any number of ranks reads the same lanes. Permuting at two levels keeps the state small: a
rank holds prefix sums over units, and needs document lengths only of units that a lane reads
now or where a share begins or ends. In this module a *position* counts tokens in a lane's share,
and an *offset* tokens in the epoch's stream, unless a class says otherwise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data_pipeline.lanes.random_order import key_of, permutation, sort_order
from foundation.errors import ConfigError, DataError, EmptyLaneError

EPOCHS_KEPT = 4  # orders in the cache: lanes enter the next epoch at different steps
LAYOUTS_KEPT = 32  # layouts in the cache
ALWAYS_EMPTY_EPOCHS = 1000  # a lane without tokens in these many epochs is an error
COMFORTABLE_RATIO = 20  # lanes this many times as long as the longest document are about even
FEW_LANES = 16  # training with fewer lanes costs more than training with uneven ones


class EpochOrder(NamedTuple):
    """The units in an epoch's order, the offset of each unit's start, and the epoch's end."""

    units: np.ndarray  # int32 [U]
    offsets: np.ndarray  # int64 [U + 1], the last one is the end


class UnitLayout(NamedTuple):
    """The documents of a unit in an epoch's order. Offsets count from the unit's first token."""

    documents: np.ndarray  # int64 [D]
    offsets: np.ndarray  # int64 [D + 1]


@dataclass(frozen=True, slots=True)
class DocumentSpans:
    """Consecutive tokens of one lane in one unit. Each span is a document or a part of one."""

    epoch: int
    unit: int
    documents: np.ndarray  # [spans], index in the unit as stored
    offsets: np.ndarray  # [spans], of the span's first token in its document
    lengths: np.ndarray  # [spans], tokens
    are_starts: np.ndarray  # [spans], bool: the first of a document, or of a share of a stream

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def document_starts(self) -> np.ndarray:
        """Indices, among these tokens, where a lane starts a document or its share of a stream."""
        return (np.cumsum(self.lengths) - self.lengths)[self.are_starts]


class LanePlan:
    """The order that lanes read in. Caches a few epochs' orders and a few units' layouts."""

    def __init__(
        self,
        unit_tokens: Sequence[int] | np.ndarray,
        num_lanes: int,
        seed: int,
        document_lengths: Callable[[int], np.ndarray],
        units_at: Callable[[int], np.ndarray] | None = None,
        is_stream: bool = False,
    ) -> None:
        """`document_lengths(unit)` returns the number of tokens of each document as stored, [D].

        `units_at(epoch)` lists an epoch's units, a unit as often as it is read: by default once.
        """
        self.unit_tokens = np.asarray(unit_tokens, np.int64)
        self.num_lanes = num_lanes
        self.seed = seed
        self.is_stream = is_stream
        self._document_lengths = document_lengths
        self._units_at = units_at or (lambda epoch: np.arange(len(self.unit_tokens)))
        self._epochs: OrderedDict[int, EpochOrder] = OrderedDict()
        self._layouts: OrderedDict[tuple[int, int], UnitLayout] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Tokens of the first epoch. If repeats are fractional, epochs can differ by a shard."""
        return self.epoch_tokens(0)

    def epoch_tokens(self, epoch: int) -> int:
        """Return the tokens that all lanes together read in that epoch."""
        return int(self.epoch_order(epoch).offsets[-1])

    def epoch_order(self, epoch: int) -> EpochOrder:
        """Return the epoch's permutation of the units."""
        order = self._epochs.get(epoch)
        if order is None:
            units = self._units_at(epoch)
            if not self.is_stream:
                units = units[permutation(len(units), key_of(self.seed, "units", epoch))]
            order = EpochOrder(units.astype(np.int32), _offsets(self.unit_tokens[units]))
        return _keep(self._epochs, epoch, order, EPOCHS_KEPT)

    def unit_layout(self, epoch: int, unit: int) -> UnitLayout:
        """Return the epoch's permutation of a unit's documents."""
        layout = self._layouts.get((epoch, unit))
        if layout is None:
            lengths = self._document_lengths(unit)
            documents = np.arange(len(lengths))
            if not self.is_stream:
                documents = sort_order(len(lengths), key_of(self.seed, "documents", epoch, unit))
            layout = UnitLayout(documents, _offsets(lengths[documents]))
        return _keep(self._layouts, (epoch, unit), layout, LAYOUTS_KEPT)

    def lane_start(self, epoch: int, lane: int) -> int:
        """Return the offset where the lane's share starts; for lane N the end of the last share.

        It is the first start of a document at or after the even cut. The lanes on both sides of
        the cut compute the same start, so no document is read twice or skipped.
        """
        return self.next_start(epoch, self._even_cut(epoch, lane))

    def next_start(self, epoch: int, offset: int) -> int:
        """Return the first offset at or after `offset` where a share can start.

        It can start at a document or at the end; in a stream, at any token.
        """
        if self.is_stream or offset >= self.epoch_tokens(epoch):
            return min(offset, self.epoch_tokens(epoch))
        units, unit_offsets = self.epoch_order(epoch)
        index = int(np.searchsorted(unit_offsets, offset, "right")) - 1
        inside = self.unit_layout(epoch, int(units[index])).offsets
        start = inside[np.searchsorted(inside, offset - unit_offsets[index], "left")]
        return int(unit_offsets[index] + start)

    def unit_at(self, epoch: int, offset: int) -> int:
        """Return the unit at an offset. Needs no document lengths."""
        units, offsets = self.epoch_order(epoch)
        offset = min(offset, int(offsets[-1]) - 1)
        return int(units[np.searchsorted(offsets, offset, "right") - 1])

    def units_between(self, epoch: int, start: int, end: int) -> list[int]:
        """Return the units that have the offsets [start, end), in order. Needs no lengths."""
        units, offsets = self.epoch_order(epoch)
        first = int(np.searchsorted(offsets, start, "right")) - 1
        return units[first : int(np.searchsorted(offsets, end, "left"))].tolist()

    def border_units(self, lane: int, epoch: int) -> list[int]:
        """Return the units at the share's even cuts: their documents decide where it starts.

        This needs no document lengths, so a caller can fetch the lengths for many lanes at once.
        """
        cuts = (self._even_cut(epoch, lane), self._even_cut(epoch, lane + 1))
        return [self.unit_at(epoch, cut) for cut in cuts]

    def first_unit(self, lane: int, epoch: int, position: int = 0) -> int:
        """Return the unit at a position in the lane's share, or a neighbor of that unit.

        It counts from the even cut instead of the share's start, and so needs no document lengths.
        """
        return self.unit_at(epoch, self._even_cut(epoch, lane) + position)

    def _even_cut(self, epoch: int, lane: int) -> int:
        return lane * self.epoch_tokens(epoch) // self.num_lanes

    def lane_length(self, epoch: int, lane: int) -> int:
        """Return the tokens that the lane reads in that epoch."""
        return self.lane_start(epoch, lane + 1) - self.lane_start(epoch, lane)

    def lane_lengths(self, epoch: int) -> np.ndarray:
        """Return the tokens that each lane reads in that epoch: int64 [N]."""
        return np.diff([self.lane_start(epoch, lane) for lane in range(self.num_lanes + 1)])

    def locate(self, lane: int, token: int) -> tuple[int, int]:
        """Return (epoch, position) of the lane's token number `token`, counted from epoch 0."""
        epoch = 0
        while token >= (length := self.lane_length(epoch, lane)):
            token -= length
            epoch += 1
        return epoch, token

    def walk(self, lane: int, epoch: int = 0, position: int = 0) -> LaneWalk:
        """Return the lane's tokens from a position on, found by binary search."""
        return LaneWalk(self, lane, epoch, position)


class LaneWalk:
    """One lane's endless document spans. `epoch` and `position` are the lane's cursor."""

    def __init__(self, plan: LanePlan, lane: int, epoch: int, position: int) -> None:
        self._plan = plan
        self.lane = lane
        self._enter(epoch)
        if not 0 <= position <= self.length:
            raise DataError(
                f"lane {lane} has {self.length} tokens in epoch {epoch}, so position {position} "
                "does not exist; the state belongs to another corpus, seed or number of lanes"
            )
        self.position = position
        if position < self.length:
            self._seek()

    def _enter(self, epoch: int) -> None:
        self.epoch = epoch
        self._start = self._plan.lane_start(epoch, self.lane)
        self.length = self._plan.lane_start(epoch, self.lane + 1) - self._start
        self.position = 0

    def _seek(self) -> None:
        """Find the unit that holds the current position."""
        units, offsets = self._plan.epoch_order(self.epoch)
        index = int(np.searchsorted(offsets, self._start + self.position, "right")) - 1
        self._unit_start, self._unit_end = int(offsets[index]), int(offsets[index + 1])
        self._unit = int(units[index])
        self._index = index
        self._layout = self._plan.unit_layout(self.epoch, self._unit)

    def _next_epoch(self) -> None:
        # A long document of another lane may cover a share, which is then empty in this epoch. The
        # next epoch has another order.
        first = self.epoch + 1
        for epoch in range(first, first + ALWAYS_EMPTY_EPOCHS):
            self._enter(epoch)
            if self.length:
                return self._seek()
        raise DataError(
            f"lane {self.lane} is empty in {ALWAYS_EMPTY_EPOCHS} epochs in a row; use fewer lanes"
        )

    def take(self, count: int) -> list[DocumentSpans]:
        """Return the next `count` tokens of the lane, in order, and advance past them."""
        taken = []
        while count:
            # Enter an epoch only when its first token is read. So at the end of a share the cursor
            # is (epoch, length), and not (epoch + 1, 0).
            if self.position == self.length:
                self._next_epoch()
            elif self._start + self.position == self._unit_end:
                self._seek()
            spans = self._take_from_unit(count)
            taken.append(spans)
            count -= spans.num_tokens
        return taken

    def units_ahead(self, count: int) -> tuple[list[int], list[int]]:
        """Return the units after the current one that the next `count` tokens need, at least one.

        If the lane's share ends in the current unit, this is the first unit of its next share, and
        the second list has that share's border units. Otherwise the second list is empty.
        """
        end = self._start + self.length
        if self._unit_end >= end:
            plan, epoch = self._plan, self.epoch + 1
            return [plan.first_unit(self.lane, epoch)], plan.border_units(self.lane, epoch)
        units, offsets = self._plan.epoch_order(self.epoch)
        last = int(np.searchsorted(offsets, min(self._unit_end + count, end), "left"))
        return units[self._index + 1 : last].tolist(), []

    def _take_from_unit(self, count: int) -> DocumentSpans:
        documents, offsets = self._layout
        # `first`, `last` and `offsets` count from the start of the unit.
        first = self._start + self.position - self._unit_start
        end_of_share = first + self.length - self.position
        last = min(first + count, self._unit_end - self._unit_start, end_of_share)
        # Documents low to high - 1 overlap [first, last). All but the first and the last of them
        # are inside as a whole.
        low = int(np.searchsorted(offsets, first, "right")) - 1
        high = int(np.searchsorted(offsets, last, "left"))
        starts = np.maximum(offsets[low:high], first)
        lengths = np.minimum(offsets[low + 1 : high + 1], last) - starts
        inside = starts - offsets[low:high]
        if self._plan.is_stream:
            # Only the share's first token is a start: span 0 at position 0.
            are_starts = np.arange(len(starts)) == -self.position
        else:
            are_starts = inside == 0
        self.position += last - first
        return DocumentSpans(
            self.epoch, self._unit, documents[low:high], inside, lengths, are_starts
        )


def check_range(lanes: range, num_lanes: int) -> None:
    """Raise ConfigError unless `lanes` are consecutive lanes of the run."""
    if not lanes or lanes.step != 1 or lanes.start < 0 or lanes.stop > num_lanes:
        raise ConfigError(
            f"lanes {lanes.start} to {lanes.stop - 1} are not among the {num_lanes} lanes "
            "of the run"
        )


def comfortable_lanes(num_tokens: int, longest_whole: int) -> int:
    """Return the most lanes that have about equal lengths, given the longest whole document.

    If these are fewer than FEW_LANES, return how many uneven lanes the text fills, up to FEW_LANES.
    """
    longest = max(longest_whole, 1)
    even = num_tokens // (COMFORTABLE_RATIO * longest)
    return even if even >= FEW_LANES else max(1, min(FEW_LANES, num_tokens // longest))


def check_lanes(plan: LanePlan, longest_whole: int) -> str:
    """Return advice on the number of lanes, or ""; EmptyLaneError if one has nothing to read.

    A lane is empty if one document covers its whole share. This cannot happen while T/N is at least
    `longest_whole`, the tokens of the longest document that is read whole.
    """
    share = plan.num_tokens // plan.num_lanes
    # Stop at the first empty lane: to measure all of far too many lanes would take long.
    lanes = range(plan.num_lanes) if share < longest_whole else ()
    empty = next((lane for lane in lanes if not plan.lane_length(0, lane)), None)
    if empty is not None:
        most = max(1, plan.num_tokens // max(longest_whole, 1))
        raise EmptyLaneError(
            f"{plan.num_tokens} tokens are too few for {plan.num_lanes} lanes: the longest "
            f"document has {longest_whole} tokens and lane {empty} would be "
            f"empty; use at most {most} lanes (data.lanes={most}), more text, or shorter documents"
        )
    most = comfortable_lanes(plan.num_tokens, longest_whole)
    if share < COMFORTABLE_RATIO * longest_whole and plan.num_lanes > most:
        lanes = "1 lane" if most == 1 else f"up to {most:,} lanes"
        is_even = plan.num_tokens // most >= COMFORTABLE_RATIO * longest_whole
        return (
            f"{plan.num_lanes:,} lanes of {share:,} tokens may differ in length by the longest "
            f"document, {longest_whole:,} tokens, and then enter epochs at different steps; use "
            f"{lanes}{':' if is_even else ', or so much more text that they are even:'} lanes of "
            f"{COMFORTABLE_RATIO} times its length are about even"
        )
    return ""


def _offsets(lengths: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _keep(cache: OrderedDict, key, value, limit: int):  # type: ignore[no-untyped-def]
    """Put `value` into a cache that drops the least recently used entry beyond `limit`."""
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > limit:
        cache.popitem(last=False)
    return value
