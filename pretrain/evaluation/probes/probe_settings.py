"""The probes by name, and what they are taken with. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ProbeName = Literal["needle", "copy", "position", "attention"]
ATTENTION: ProbeName = "attention"


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """What decides the results, besides model and corpus."""

    names: tuple[ProbeName, ...]
    memory_length: int
    segment_length: int
    lanes: int  # of the probe `position`
    max_tokens: int  # of the probe `position`; 0: the whole split
    trials: int  # at each distance
    longest_distance: int  # 0: twice what a token sees directly

    def needs_text(self) -> bool:
        """Whether a probe reads a split; the others only take tokens from it, if there is one."""
        return not {"position", ATTENTION}.isdisjoint(self.names)
