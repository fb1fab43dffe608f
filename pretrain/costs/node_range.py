"""What `--nodes` of a command says. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass

from data_pipeline.errors import ConfigError
from pretrain.costs.devices import MOST_NODES

_NODES = re.compile(r"([0-9]{1,20})(?:([:+])([0-9]{1,20}))?")


@dataclass(frozen=True)
class NodeRange:
    """How many nodes a run uses: as many as are free, from `least` to `most`; and how many more its
    job has, to replace those that fail."""

    least: int
    most: int
    spare: int = 0

    @property
    def least_of_job(self) -> int:
        """The fewest nodes that the job needs."""
        return self.least + self.spare

    def __str__(self) -> str:
        """What Slurm is asked for."""
        least, most = self.least_of_job, self.most + self.spare
        return str(least) if least == most else f"{least}-{most}"


def parse_nodes(text: str) -> NodeRange:
    """`4`, `4:16` or `4+1`."""
    found = _NODES.fullmatch(text)
    if not found:
        raise ConfigError(
            f"--nodes={text[:40]} is neither a number nor a range; write 4, 4:16 for 4 to 16, or "
            "4+1 for 4 and a spare one"
        )
    first, sign, second = int(found[1]), found[2], int(found[3] or found[1])
    if sign == "+":
        if not (first and second and first + second <= MOST_NODES):
            raise ConfigError(
                f"--nodes={text}: expected 1 or more nodes to train and 1 or more spare ones, at "
                f"most {MOST_NODES:,} in all; write 4+1 for 4 and a spare one"
            )
        return NodeRange(first, first, spare=second)
    if not sign and not 1 <= first <= MOST_NODES:
        raise ConfigError(f"--nodes={text} must be from 1 to {MOST_NODES:,}")
    nodes = NodeRange(first, second)
    if not 1 <= nodes.least <= nodes.most <= MOST_NODES:
        raise ConfigError(f"--nodes={text}: expected 1 to {MOST_NODES:,}, the smaller number first")
    return nodes


def fixed_nodes(text: str) -> NodeRange:
    """`4` or `4+1`; ConfigError for a range, whose number Slurm chooses."""
    nodes = parse_nodes(text)
    if nodes.least != nodes.most:
        raise ConfigError(
            f"--nodes={text}: found a range, expected one number of nodes, or 4+1 with a spare "
            f"one; write {nodes.least} or {nodes.most}"
        )
    return nodes
