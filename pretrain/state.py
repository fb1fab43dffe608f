"""The state of a run besides the engine's: step, tokens, each slot's memory, each lane's cursor."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from data_pipeline.lanes.lane_stream import LaneCursor, SegmentBatch
from pretrain.model.lane_state import LaneState, Memory


@dataclass(frozen=True)
class PastStep:
    """What the lanes have read in a step. They may read it again, to rebuild their memories."""

    before: LaneCursor | None  # the lanes' before they read it; None: they had not started
    is_forgotten: bool  # it was skipped, and left the memories as they were


@dataclass
class Past:
    """The latest steps, oldest first: as many as memories depend on, or fewer after a start.

    They depend on `reach` steps that they have not forgotten; 0: nothing is noted.
    """

    reach: int = 0
    steps: deque[PastStep] = field(default_factory=deque)

    @property
    def is_complete(self) -> bool:
        """Whether memories can be rebuilt from them."""
        return self.reach > 0 and self._remembered() >= self.reach

    def add(self, step: PastStep) -> None:
        """Note a step, and drop those that no memory depends on any more."""
        self.steps.append(step)
        surplus = self._remembered() - self.reach
        while self.steps and (surplus > 0 or (self.steps[0].is_forgotten and not surplus)):
            surplus -= not self.steps.popleft().is_forgotten

    def _remembered(self) -> int:
        return sum(not each.is_forgotten for each in self.steps)

    def to_tree(self) -> dict[str, Any]:
        """Return what the index of a checkpoint has of them."""
        forgotten = [n for n, each in enumerate(self.steps) if each.is_forgotten]
        return {"steps": len(self.steps), "forgotten": forgotten}


@dataclass
class TrainState:
    """After `step` updates. `cursor` belongs to the last batch used, not to one prefetched."""

    step: int = 0
    tokens_seen: int = 0
    # One per accumulation slot. A slot is a fixed group of the rank's lanes, so its memory carries
    # over from step to step. None: nothing is remembered yet.
    memories: list[Memory | None] = field(default_factory=list)
    cursor: LaneCursor | None = None
    past: Past = field(default_factory=Past)

    @classmethod
    def fresh(cls, num_slots: int) -> TrainState:
        return cls(memories=[None] * num_slots)

    def advance(self, batch: SegmentBatch, tokens: int, is_forgotten: bool = False) -> None:
        """Count one update, which read `tokens` tokens on all ranks: `batch` on this one."""
        self.step += 1
        self.tokens_seen += tokens
        self.past.add(PastStep(self.cursor, is_forgotten))
        self.cursor = batch.cursor


def memories_without(
    lane_state: LaneState, batch: SegmentBatch, before: Sequence[Memory | None]
) -> list[Memory | None]:
    """The slots' memories `before` the batch, knowing which documents started in it."""
    return [
        lane_state.after_forgotten_segment(memory, torch.from_numpy(slot.starts_BL))
        for memory, slot in zip(before, batch.split(len(before)), strict=True)
    ]
