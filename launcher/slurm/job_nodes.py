"""Which of a job's nodes train, and which are spare. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JobNodes:
    """Nodes that train, in rank order, and spare ones to replace them."""

    training: tuple[str, ...]
    spare: tuple[str, ...] = ()

    def without(self, node: str) -> JobNodes | None:
        """The nodes without this one: the first spare node takes its place, all others keep theirs.

        None if no spare node is left for it.
        """
        if node not in self.training:
            return JobNodes(self.training, tuple(each for each in self.spare if each != node))
        if not self.spare:
            return None
        first, *others = self.spare
        training = tuple(first if each == node else each for each in self.training)
        return JobNodes(training, tuple(others))
