"""The state of a run besides the engine's: step, tokens, each slot's memory, each lane's cursor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from data_pipeline.lanes.segment_batch import LaneCursor, SegmentBatch
from pretrain.model.memory import Memory, MemoryLayout


@dataclass
class TrainState:
    """The state after `step` updates; `cursor` belongs to the last batch used, not prefetched."""

    step: int = 0
    tokens_seen: int = 0
    # One per accumulation slot. A slot is a fixed group of the rank's lanes, so its memory carries
    # over from step to step. None: nothing is remembered yet.
    memories: list[Memory | None] = field(default_factory=list)
    cursor: LaneCursor | None = None

    @classmethod
    def fresh(cls, num_slots: int) -> TrainState:
        return cls(memories=[None] * num_slots)

    def advance(self, batch: SegmentBatch, tokens: int) -> None:
        """Count one update, which read `tokens` tokens on all ranks: `batch` on this one."""
        self.step += 1
        self.tokens_seen += tokens
        self.cursor = batch.cursor


def memories_without(
    memory_layout: MemoryLayout, batch: SegmentBatch, before: Sequence[Memory | None]
) -> list[Memory | None]:
    """Return the memories `before` the batch; of the batch they keep only where documents start."""
    return [
        memory_layout.after_forgotten_segment(memory, torch.from_numpy(slot.starts_BL))
        for memory, slot in zip(before, batch.split(len(before)), strict=True)
    ]
