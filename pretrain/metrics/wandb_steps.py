"""Which lines of metrics.jsonl a Weights & Biases run still lacks, and where they go. Torch-free.

W&B's own axis `_step` can only grow, and a row whose number it has passed is dropped. The steps of
a run do not only grow: after a crash steps are repeated, with the same results, and after a rewind
they are made again with other data. So a line that was sent is not sent again after a crash, but is
after a rewind, and `_step` is the step plus a shift that makes it grow. Charts are drawn over the
metric `step`, on which a rewind goes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SentSteps:
    """What was sent. Kept in RUN/wandb/sent.json from one session to the next."""

    last: int = -1  # of W&B's axis
    shift: int = 0
    rewinds: int = 0
    steps: dict[str, int] = field(default_factory=dict)  # kind of line -> its latest step
    closed: int = -1  # on W&B's axis: no row up to it can get more

    def start_session(self) -> None:
        """A session does not add to the rows of the one before."""
        self.closed = self.last

    def note_rewinds(self, to_steps: Sequence[int]) -> None:
        """Take the steps that all rewinds of the run went back to, in their order."""
        for to_step in to_steps[self.rewinds :]:
            self.steps = {kind: min(step, to_step) for kind, step in self.steps.items()}
            self.closed = self.last
        self.rewinds = len(to_steps)

    def place_of(self, line: Mapping[str, Any]) -> int | None:
        """Return the `_step` of a line that is sent now; None if it was sent before."""
        step, kind = line["step"], line["kind"]
        if step <= self.steps.get(kind, -1):
            return None
        self.steps[kind] = step
        least = max(self.last, self.closed + 1)
        self.shift += max(0, least - (step + self.shift))
        self.last = step + self.shift
        return self.last
