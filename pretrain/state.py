"""What a run is besides the engine's own state."""

from __future__ import annotations

from dataclasses import dataclass, field

from data_pipeline.lanes.lane_stream import LaneCursor
from pretrain.engines.engine import Memory


@dataclass
class TrainState:
    """Where a run stands after `step` updates. `cursor` belongs to the last batch handed out, not to one read ahead."""

    step: int = 0
    tokens_seen: int = 0
    memories: list[Memory | None] = field(default_factory=list)  # one per accumulation slot
    cursor: LaneCursor | None = None

    @classmethod
    def fresh(cls, num_slots: int) -> TrainState:
        return cls(memories=[None] * num_slots)
