"""What to change in a run that does not fit: the cheapest change that fits by the estimate."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from foundation.cli import as_overrides
from foundation.errors import ConfigError
from pretrain.config.engine import EngineConfig
from pretrain.config.phases import runs_of_phases
from pretrain.config.run import RunConfig, lanes_of_rank
from pretrain.costs.device_memory import largest_footprint
from pretrain.costs.hardware import GIB

# What a change costs, as a part of the time of a step: assumed, and only their order matters.
# Checkpointing repeats the scores, or all of the forward pass: a third of a step's FLOPs.
_COST_OF_CHECKPOINTING = {"none": 0.0, "selective": 0.08, "full": 0.33, "segments": 0.34}
# By stage. Stage 3 gathers the weights for each forward and backward pass: 50 % more traffic.
_COST_OF_STAGE = (0.0, 0.005, 0.01, 0.1)
# By stage, for twice the passes: smaller ones are slower; from stage 2 on each sums gradients.
_COST_OF_PASSES = (0.01, 0.01, 0.02, 0.05)
_COST_OF_OFFLOADED_MEMORIES = 0.02  # copied while other slots compute
_COST_OF_OFFLOADED_OPTIMIZER = 0.5  # the CPU updates the weights
_LARGEST_MULTIPLE = 64  # where no setting helps, up to 64 times the ranks are tried


@dataclass(frozen=True)
class Fitting:
    """Settings that make a run fit."""

    engine: EngineConfig
    changes: dict[str, Any]
    bytes: float  # of a rank's device
    cost: float  # the part of a step's time that the changes are estimated to add
    host_bytes: float  # of a rank's host memory, for what is offloaded

    @property
    def description(self) -> str:
        """The changes as they would stand on the command line, and what they bring."""
        words = as_overrides(self.changes)
        host = f" and {self.host_bytes / GIB:,.1f} GiB of host memory" if self.host_bytes else ""
        return f"{words} ({self.bytes / GIB:,.2f} GiB{host})"


def advice(run: RunConfig, world_size: int, capacity: float, on_gpu: bool) -> str:
    """Return in one line what lets a run fit into `capacity` bytes per rank."""
    if fit := cheapest_fit(run, world_size, capacity, on_gpu):
        return f"set {fit.description}"
    ranks = 2 * world_size
    while ranks <= _LARGEST_MULTIPLE * world_size:
        if fit := cheapest_fit(run, ranks, capacity, on_gpu):
            settings = f" with {fit.description}" if fit.changes else ""
            return f"no engine setting makes it fit here; use {ranks} ranks{settings}"
        ranks *= 2
    return "nothing makes it fit; use a smaller model, shorter segments or a shorter memory"


def cheapest_fit(run: RunConfig, world_size: int, capacity: float, on_gpu: bool) -> Fitting | None:
    """Return the change of lowest cost that lets every phase fit, or None; no change if it fits."""
    for cost, engine in sorted(_candidates(run, world_size, on_gpu), key=lambda each: each[0]):
        try:
            footprint = largest_footprint(replace(run, engine=engine), world_size, on_gpu)
            needed = footprint.device
        except ConfigError:  # the lanes of a phase do not divide over ranks and passes
            continue
        if needed <= capacity:
            changes = {
                f"engine.{name}": value
                for name, value in vars(engine).items()
                if value != getattr(run.engine, name)
            }
            return Fitting(engine, changes, needed, cost, footprint.offloaded if changes else 0.0)
    return None


def _candidates(
    run: RunConfig, world_size: int, on_gpu: bool
) -> Iterator[tuple[float, EngineConfig]]:
    """Yield each combination of changes with its cost; none undoes what the run asks for."""
    engine = run.engine
    kinds = tuple(_COST_OF_CHECKPOINTING)
    may_offload = (False, True) if on_gpu else (False,)
    try:
        own = min(len(lanes_of_rank(phase, 0, world_size)) for phase in runs_of_phases(run))
    except ConfigError:  # the lanes do not divide over the ranks
        return
    most = min(engine.micro_batch_lanes or own, own)  # lanes of a pass
    for stage, kind, lanes, memories, optimizer in itertools.product(
        range(engine.zero_stage, 4) if engine.kind == "deepspeed" else (engine.zero_stage,),
        kinds[kinds.index(engine.activation_checkpointing) :],
        [lanes for lanes in range(most, 0, -1) if own % lanes == 0],
        sorted({engine.offload_memories, *may_offload}),
        sorted({engine.offload_optimizer, *may_offload}),
    ):
        changes: dict[str, Any] = {
            "zero_stage": stage,
            "activation_checkpointing": kind,
            "micro_batch_lanes": engine.micro_batch_lanes if lanes == most else lanes,
            "offload_memories": memories,
            "offload_optimizer": optimizer,
        }
        cost = _COST_OF_CHECKPOINTING[kind] + _COST_OF_STAGE[stage]
        cost += _COST_OF_PASSES[stage] * math.log2(most / lanes)
        cost += _COST_OF_OFFLOADED_MEMORIES * memories + _COST_OF_OFFLOADED_OPTIMIZER * optimizer
        with contextlib.suppress(ConfigError):  # the changes contradict each other, or the model
            yield cost, replace(run, engine=replace(engine, **changes)).engine
