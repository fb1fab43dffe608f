"""Segments that change their length on the way: which tokens of a lane a step reads. Arithmetic, no data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data_pipeline.errors import ConfigError


@dataclass(frozen=True)
class SegmentLengths:
    """The tokens that each lane reads in every step since it began: `first`, and from `changes`' steps on others.

    Without phases all steps have one length. ConfigError unless the changes come in order and lengths are positive.
    """

    first: int
    changes: Sequence[tuple[int, int]] = ()  # (step, length)

    def __post_init__(self) -> None:
        steps = [0, *(step for step, _ in self.changes)]
        if (
            sorted(set(steps)) != steps
            or min(self.first, *(length for _, length in self.changes), 1) < 1
        ):
            changes = ", ".join(f"{step}={length}" for step, length in self.changes)
            raise ConfigError(
                f"segments of {self.first} tokens, then from step=length {changes}: expected positive lengths, and "
                "each change at a later step than the one before"
            )

    def at(self, step: int) -> int:
        """The length of the step's segments."""
        return next(
            (length for begin, length in reversed(self.changes) if begin <= step), self.first
        )

    def tokens_before(self, step: int) -> int:
        """How many tokens of a lane the steps before `step` read."""
        ends = [*(begin for begin, _ in self.changes), step]
        return sum(
            self.at(begin) * max(0, min(end, step) - begin)
            for begin, end in zip([0, *ends], ends, strict=False)
        )

    def step_of(self, token: int) -> int:
        """The step that reads the lane's token number `token`."""
        begin = next(
            (begin for begin, _ in reversed(self.changes) if self.tokens_before(begin) <= token), 0
        )
        return begin + (token - self.tokens_before(begin)) // self.at(begin)
