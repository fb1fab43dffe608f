"""Which documents each lane reads and in which order: pure arithmetic on token counts, no tokens, no files.

A unit is a shard. In each epoch the units are permuted, and inside each unit its documents; this gives one virtual
stream of T tokens. Lane i of N is the documents whose first token lies in [i*T/N, (i+1)*T/N) of it. A lane that has
read its share of an epoch goes on with its share of the next, so every token is read once per epoch and every
document whole. Ranks are not mentioned: a lane's stream is a function of (unit tokens, seed, number of lanes, lane).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.lanes.permutation import key_of, permutation, sort_order

EPOCHS_KEPT = 4  # lanes cross into the next epoch at different steps
LAYOUTS_KEPT = 32
ALWAYS_EMPTY_EPOCHS = 1000


class EpochOrder(NamedTuple):
    """The units in their order and where each begins in the epoch's virtual stream; one more begin for the end."""

    units: np.ndarray  # int32 [U]
    begins: np.ndarray  # int64 [U + 1]


class UnitLayout(NamedTuple):
    """The documents of a unit in their order and where each begins inside the unit; one more begin for the end."""

    documents: np.ndarray  # int64 [D]
    begins: np.ndarray  # int64 [D + 1]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive pieces of one lane out of one unit: piece k is `lengths[k]` tokens of a document from an offset."""

    epoch: int
    unit: int
    documents: np.ndarray  # [pieces], place in the unit as it is stored
    offsets: np.ndarray  # [pieces]; 0: the piece begins its document
    lengths: np.ndarray  # [pieces]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())


class LanePlan:
    """The order of reading. Holds prefix sums of the units' tokens for a few epochs, and a few units' layouts."""

    def __init__(
        self,
        unit_tokens: Sequence[int] | np.ndarray,
        num_lanes: int,
        seed: int,
        document_lengths: Callable[[int], np.ndarray],
        units_at: Callable[[int], np.ndarray] | None = None,
    ) -> None:
        """`document_lengths(unit)` gives the tokens of each document of a unit as stored, [D].

        `units_at(epoch)` lists the units of an epoch, each as often as it is read there; without it, each is read once.
        """
        self.unit_tokens = np.asarray(unit_tokens, np.int64)
        self.num_lanes = num_lanes
        self.seed = seed
        self._document_lengths = document_lengths
        self._units_at = units_at or (lambda epoch: np.arange(len(self.unit_tokens)))
        self._epochs: OrderedDict[int, EpochOrder] = OrderedDict()
        self._layouts: OrderedDict[tuple[int, int], UnitLayout] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Tokens of the first epoch; the others have as many, or a shard's difference where repeats are fractions."""
        return self.epoch_tokens(0)

    def epoch_tokens(self, epoch: int) -> int:
        """Tokens that all lanes together read in that epoch."""
        return int(self.epoch_order(epoch).begins[-1])

    def epoch_order(self, epoch: int) -> EpochOrder:
        """The epoch's permutation of the units."""
        order = self._epochs.get(epoch)
        if order is None:
            listed = self._units_at(epoch)
            units = listed[permutation(len(listed), key_of(self.seed, "units", epoch))]
            order = EpochOrder(units.astype(np.int32), _begins(self.unit_tokens[units]))
        return _keep(self._epochs, epoch, order, EPOCHS_KEPT)

    def unit_layout(self, epoch: int, unit: int) -> UnitLayout:
        """The epoch's permutation of a unit's documents."""
        layout = self._layouts.get((epoch, unit))
        if layout is None:
            lengths = self._document_lengths(unit)
            documents = sort_order(len(lengths), key_of(self.seed, "documents", epoch, unit))
            layout = UnitLayout(documents, _begins(lengths[documents]))
        return _keep(self._layouts, (epoch, unit), layout, LAYOUTS_KEPT)

    def lane_begin(self, epoch: int, lane: int) -> int:
        """Where the lane's share begins in the epoch's stream; lane N begins at its end."""
        return self.document_begin(epoch, lane * self.epoch_tokens(epoch) // self.num_lanes)

    def document_begin(self, epoch: int, place: int) -> int:
        """The place at or after `place` in the epoch's stream where a document begins, or where the stream ends."""
        if place >= (end := self.epoch_tokens(epoch)):
            return end
        units, begins = self.epoch_order(epoch)
        slot = int(np.searchsorted(begins, place, "right")) - 1
        inside = self.unit_layout(epoch, int(units[slot])).begins
        return int(begins[slot] + inside[np.searchsorted(inside, place - begins[slot], "left")])

    def unit_at(self, epoch: int, place: int) -> int:
        """The unit at a place in the epoch's stream; arithmetic alone."""
        units, begins = self.epoch_order(epoch)
        place = min(place, int(begins[-1]) - 1)
        return int(units[np.searchsorted(begins, place, "right") - 1])

    def units_between(self, epoch: int, begin: int, end: int) -> list[int]:
        """The units that hold the tokens from `begin` to `end` of the epoch's stream, in order; arithmetic alone."""
        units, begins = self.epoch_order(epoch)
        first = int(np.searchsorted(begins, begin, "right")) - 1
        return units[first : int(np.searchsorted(begins, end, "left"))].tolist()

    def first_units(self, lane: int, epoch: int, position: int = 0) -> list[int]:
        """The units that tell where the lane's share of the epoch begins and ends, and the one at a position in it.

        Found without a document's length, so the last may be the neighbour of the right one.
        """
        tokens = self.epoch_tokens(epoch)
        begin, end = (number * tokens // self.num_lanes for number in (lane, lane + 1))
        return [self.unit_at(epoch, place) for place in (begin, end, begin + position)]

    def lane_length(self, epoch: int, lane: int) -> int:
        """Tokens that the lane reads in that epoch."""
        return self.lane_begin(epoch, lane + 1) - self.lane_begin(epoch, lane)

    def lane_lengths(self, epoch: int) -> np.ndarray:
        """Tokens that each lane reads in that epoch: int64 [N]."""
        return np.diff([self.lane_begin(epoch, lane) for lane in range(self.num_lanes + 1)])

    def locate(self, lane: int, token: int) -> tuple[int, int]:
        """(epoch, position in the lane's share of that epoch) of the lane's token number `token` since the start."""
        epoch = 0
        while token >= (length := self.lane_length(epoch, lane)):
            token -= length
            epoch += 1
        return epoch, token

    def walk(self, lane: int, epoch: int = 0, position: int = 0) -> LaneWalk:
        """The lane's stream from a position on; found by binary search."""
        return LaneWalk(self, lane, epoch, position)


class LaneWalk:
    """Goes along one lane's stream, through the epochs, without end."""

    def __init__(self, plan: LanePlan, lane: int, epoch: int, position: int) -> None:
        self._plan = plan
        self.lane = lane
        self._enter(epoch)
        if not 0 <= position <= self.length:
            raise DataError(
                f"lane {lane} has {self.length} tokens in epoch {epoch}, so position {position} does not exist; "
                "the state belongs to another corpus, seed or number of lanes"
            )
        self.position = position
        if position < self.length:
            self._seek()

    def _enter(self, epoch: int) -> None:
        self.epoch = epoch
        self._begin = self._plan.lane_begin(epoch, self.lane)
        self.length = self._plan.lane_begin(epoch, self.lane + 1) - self._begin
        self.position = 0

    def _seek(self) -> None:
        units, begins = self._plan.epoch_order(self.epoch)
        place = self._begin + self.position
        slot = int(np.searchsorted(begins, place, "right")) - 1
        self._unit_begin, self._unit_end = int(begins[slot]), int(begins[slot + 1])
        self._unit = int(units[slot])
        self._slot = slot
        self._layout = self._plan.unit_layout(self.epoch, self._unit)

    def _next_epoch(self) -> None:
        for epoch in range(self.epoch + 1, self.epoch + ALWAYS_EMPTY_EPOCHS):
            self._enter(epoch)
            if self.length:
                return self._seek()
        raise DataError(
            f"lane {self.lane} is empty in {ALWAYS_EMPTY_EPOCHS} epochs on end; use fewer lanes"
        )

    def take(self, count: int) -> list[Run]:
        """The next `count` tokens of the lane, in order."""
        runs = []
        while count:
            if self.position == self.length:
                self._next_epoch()
            elif self._begin + self.position == self._unit_end:
                self._seek()
            run = self._take_from_unit(count)
            runs.append(run)
            count -= run.num_tokens
        return runs

    def units_ahead(self, count: int) -> list[int]:
        """What the lane reads behind its current unit: what `count` tokens need, at least a unit.

        Where its share ends there, the units of its share in the next epoch that are known without a document's length.
        """
        end = self._begin + self.length
        if self._unit_end >= end:
            return self._plan.first_units(self.lane, self.epoch + 1)
        units, begins = self._plan.epoch_order(self.epoch)
        last = int(np.searchsorted(begins, min(self._unit_end + count, end), "left"))
        return units[self._slot + 1 : last].tolist()

    def _take_from_unit(self, count: int) -> Run:
        documents, begins = self._layout
        first = self._begin + self.position - self._unit_begin
        room = min(self._unit_end - self._unit_begin, first + self.length - self.position)
        last = min(first + count, room)  # one past the last token, inside the unit
        low = int(np.searchsorted(begins, first, "right")) - 1
        high = int(np.searchsorted(begins, last, "left"))
        piece_begins = np.maximum(begins[low:high], first)
        lengths = np.minimum(begins[low + 1 : high + 1], last) - piece_begins
        self.position += last - first
        return Run(
            self.epoch, self._unit, documents[low:high], piece_begins - begins[low:high], lengths
        )


def _begins(lengths: np.ndarray) -> np.ndarray:
    begins = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=begins[1:])
    return begins


def _keep(cache: OrderedDict, key, value, limit: int):  # type: ignore[no-untyped-def]
    """Put `value` into a cache that forgets what was used longest ago."""
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > limit:
        cache.popitem(last=False)
    return value
