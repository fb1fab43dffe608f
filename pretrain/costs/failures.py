"""Goodput where nodes fail, and the checkpoint interval that is best for it. Torch-free.

Failures of all nodes together come at a constant rate, M seconds apart on average. A run trains for
an interval t, stands still for the pause p of a save, and trains on while the checkpoint is being
written, w. After a failure nothing runs for the seconds d (detection, requeueing), then ranks start
and restore for the seconds s; a failure in s begins with d again. What was trained after the latest
published checkpoint is trained again. On average this gives

    goodput = t e^(-w/M) / ((e^((t+p)/M) - 1) e^(s/M) (M + d)),

which for w = d = 0 is Daly's equation 13 ("A higher order estimate of the optimum checkpoint
interval for restart dumps", Future Generation Computer Systems 22, 2006). Its maximum is where
(1 - t/M) e^((t+p)/M) = 1, whatever w, d and s are. For p much shorter than M that is Young's
sqrt(2 p M) ("A first order approximation to the optimum checkpoint interval", CACM 17, 1974).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pretrain.config.run import RunConfig
from pretrain.costs.device_memory import checkpoint_bytes, footprint_of
from pretrain.costs.devices import Hardware, NodeConfig

# Part of the speed that training loses while a checkpoint is being written. Assumed: copies,
# hashing and writing take host memory's bandwidth, cores and the network.
SLOWER_WHILE_WRITING = 0.05
RESTART_SECONDS = 600.0  # from a failure to training again, without reading the checkpoint
_LONGEST_PERIOD = 700.0  # mean times between failures: exp of more overflows
_BELOW_ONE = 1.0 - 2.0**-53
_HALVINGS = 60  # of an interval between 0 and 1: to the precision of a float


@dataclass(frozen=True, kw_only=True)
class FailureCosts:
    """How often a run fails and what saves and restarts cost it, in seconds."""

    between_failures: float  # on average, of all nodes together
    pause: float  # in which a save keeps the loop from training
    write: float = 0.0  # from there until the checkpoint is published; training continues
    down: float = 0.0  # detection and requeueing: nothing runs that could fail
    start: float = 0.0  # start of the ranks, reading the checkpoint

    def goodput(self, interval: float) -> float:
        """Return the part of the time that goes into training that is not done again.

        A save waits for the one before, so a shorter interval than `write` has pauses as long.
        """
        mean = self.between_failures
        period = (max(interval, self.write) + self.pause) / mean
        if period > _LONGEST_PERIOD:
            return 0.0
        kept = interval / mean * math.exp(-self.write / mean) / math.expm1(period)
        return kept * math.exp(-self.start / mean) / (1 + self.down / mean)

    @property
    def best_interval(self) -> float:
        """The seconds of training between two saves with the highest goodput."""
        low, high, pause = 0.0, _BELOW_ONE, self.pause / self.between_failures
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if math.log1p(-middle) + middle + pause > 0:
                low = middle
            else:
                high = middle
        return max(low * self.between_failures, self.write)


def failure_costs(run: RunConfig, hardware: Hardware, step_seconds: float) -> FailureCosts | None:
    """Return what failures cost the run there; None if it is not known how often nodes fail.

    Every node reads and writes its part of a checkpoint at `disk_mib_per_second`.
    """
    node = hardware.node
    if node is None or not node.mtbf_hours:
        return None
    largest = footprint_of(run, hardware.world_size, hardware.on_gpu).run
    in_background = run.checkpoint.asynchronous
    return costs_on(node, hardware.nodes, checkpoint_bytes(largest), in_background)


def costs_on(
    node: NodeConfig, nodes: int, checkpoint_bytes: float, in_background: bool = True
) -> FailureCosts:
    """Return what failures cost a run with checkpoints of that size on such nodes."""
    transfer = checkpoint_bytes / nodes / (node.disk_mib_per_second * (1 << 20))
    return FailureCosts(
        between_failures=3600 * node.mtbf_hours / nodes,
        pause=SLOWER_WHILE_WRITING * transfer if in_background else transfer,
        write=transfer if in_background else 0.0,
        down=RESTART_SECONDS,
        start=transfer,
    )
