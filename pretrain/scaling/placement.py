"""Where the cells of a plan run: nodes, engine settings, memory, disk and hours. Torch-free.

Every number is one of `describe`'s: what does not fit there does not fit here, and a cell that does
not fit under any engine setting is an error. Nothing here estimates memory or time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from foundation.errors import ConfigError
from pretrain.config.resolve import with_precision
from pretrain.config.run import RunConfig, accumulation_steps
from pretrain.costs.devices import GIB, Hardware, device_named
from pretrain.costs.fitting import advice, cheapest_fit
from pretrain.costs.flops import computed_flops_of_step, cost_of, lanes_of_pass, parameters_of
from pretrain.costs.memory import Footprint, footprint_of
from pretrain.costs.run_time import run_time
from pretrain.rundir.events import TrainingBegan
from pretrain.rundir.ledger import last_of
from pretrain.rundir.run_dir import RunDir
from pretrain.scaling.intervals import amount
from pretrain.scaling.plan import PlannedRun
from pretrain.scaling.recipe import Family, Rule, power_of_two, wanted_lanes, with_budget
from pretrain.scaling.which_runs import runs_of
from pretrain.terminal.text import counted

_WITHOUT_GPU = {"none": "cpu"}  # what such a run noted as its GPU
NEAR = 2.0  # a size within this factor of the measured ones has a measured utilization


@dataclass(frozen=True)
class Utilization:
    """MFU by size: of the nearest measured runs, between them a line over ln N; or one number."""

    assumed: float
    measured: tuple[tuple[float, float], ...] = ()  # (N, MFU), by size

    def of(self, parameters: float) -> float:
        """The MFU of a run of that size."""
        if not self.measured:
            return self.assumed
        sizes, values = zip(*self.measured, strict=True)
        return float(np.interp(math.log(parameters), np.log(sizes), values))

    def is_measured(self, parameters: float) -> bool:
        """Whether runs of about that size were measured."""
        if not self.measured:
            return False
        return self.measured[0][0] / NEAR <= parameters <= self.measured[-1][0] * NEAR

    def describe(self, parameters: Sequence[float]) -> str:
        """Which numbers a plan of these sizes rests on, in one line."""
        if not self.measured:
            words = "assumed at every size; small models use less: --measured RUN ... takes it from"
            return f"MFU: {self.assumed:.0%} {words} runs"
        (low, first), (high, last) = self.measured[0], self.measured[-1]
        text = f"MFU: measured on {counted(len(self.measured), 'size')} from {amount(low)} "
        text += f"({first:.1%}) to {amount(high)} ({last:.1%})"
        if beyond := sum(not self.is_measured(each) for each in parameters):
            text += f"; {counted(beyond, 'cell')} over {NEAR:g}x beyond are assumed to use as much"
            text += " as the nearest"
        return text


def measured_utilization(paths: Sequence[Path], hardware: Hardware, assumed: float) -> Utilization:
    """The MFU of runs on this hardware; ConfigError for one on other devices or without speeds."""
    by_size: dict[int, list[float]] = {}
    for path in runs_of(paths):
        size, value = _measured(RunDir.open(path), path, hardware)
        by_size.setdefault(size, []).append(value)
    found = ((float(size), statistics.median(each)) for size, each in sorted(by_size.items()))
    return Utilization(assumed, tuple(found))


def _measured(run_dir: RunDir, path: Path, hardware: Hardware) -> tuple[int, float]:
    """Parameters and MFU, by the definition of `describe`: all FLOPs, of the data sheet's peak."""
    start = last_of(run_dir.ledger.read(), TrainingBegan)
    if start is None:
        raise ConfigError(f"--measured {path}: has not started, so it measured no speed")
    gpu = start.environment.get("GPU", "")
    found = device_named(gpu) or _WITHOUT_GPU.get(gpu, "")
    if gpu and found != hardware.name:
        raise ConfigError(
            f"--measured {path}: was trained on {found or gpu}, and the plan is for "
            f"{hardware.name}; name runs on such devices, or use --mfu"
        )
    speeds = [
        line["tokens_per_second"]
        for line in run_dir.read_metrics()
        if line.get("kind") == "train" and line.get("tokens_per_second")
    ]
    if not speeds:
        raise ConfigError(f"--measured {path}: has no tokens_per_second in its metrics")
    run = with_precision(run_dir.config, best="bf16" if hardware.on_gpu else "fp32")
    seconds = run.tokens_per_step / statistics.median(speeds)
    flops = computed_flops_of_step(run, start.world_size)
    peak = hardware.device.peak(run.engine) * start.world_size
    return parameters_of(run.model).total, flops / seconds / peak


MICRO_BATCHES = 8  # a rank's lanes are 8 to 16 times a power of two, or fewer than 16
ROUNDED = 1 / 8  # most by which whole lanes on every rank may change the rule's batch
STEP_DOWN, STEPS_DOWN = 1.25, 25  # sizes that are tried where one does not fit


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The nodes that cells may use, and how fast they are."""

    hardware: Hardware
    utilization: Utilization
    family: Family
    rule: Rule
    lanes_multiple: int = 1
    host_memory: float = math.inf  # bytes of a GPU node's host

    def make(self, shaped: RunConfig, budget: float) -> tuple[RunConfig, dict[str, float]]:
        """The run of a shape and a budget with the engine settings that make it fit, and facts.

        ConfigError if none does; it names the largest size that fits.
        """
        run, ranks = self._on_ranks(shaped, budget)
        fitting = self._fitted(run, ranks)
        if fitting is None:
            raise ConfigError(self._too_large(shaped, run, ranks, budget))
        return fitting, self._facts(fitting, ranks)

    def _on_ranks(self, shaped: RunConfig, budget: float) -> tuple[RunConfig, int]:
        """The run on as many nodes as its batch divides over, and its ranks."""
        on_node, wanted = self.hardware.ranks_per_node, wanted_lanes(shaped, budget, self.rule)
        counts = [each * on_node for each in range(self.hardware.nodes, 0, -1)]
        if not wanted:  # the experiment's own lanes
            dividing = [ranks for ranks in counts if shaped.data.lanes % ranks == 0]
            return with_budget(shaped, budget, self.rule), (dividing or counts[-1:])[0]
        for ranks in counts:
            multiple = math.lcm(ranks, self.lanes_multiple)
            # A round number of lanes on each rank: of 97 the only micro-batch that divides is 1.
            multiple *= max(1, power_of_two(wanted / multiple) // MICRO_BATCHES)
            lanes = multiple * max(1, round(wanted / multiple))
            if abs(lanes / wanted - 1) <= ROUNDED or ranks == counts[-1]:
                return with_budget(shaped, budget, self.rule, multiple), ranks
        raise AssertionError("the fewest nodes always end the loop")

    def _fitted(self, run: RunConfig, ranks: int) -> RunConfig | None:
        accumulation_steps(run, ranks)  # raises where the experiment's lanes do not divide
        known = self._with_precision(run)
        capacity, on_gpu = self.hardware.usable_memory, self.hardware.on_gpu
        host = self.host_memory / self.hardware.ranks_per_node
        found = cheapest_fit(known, ranks, capacity, on_gpu, host)
        if found is None:
            return None
        return replace(run, engine=replace(found.engine, precision=run.engine.precision))

    def _with_precision(self, run: RunConfig) -> RunConfig:
        return with_precision(run, best="bf16" if self.hardware.on_gpu else "fp32")

    def _facts(self, run: RunConfig, ranks: int) -> dict[str, float]:
        known = self._with_precision(run)
        found = footprint_of(known, ranks, self.hardware.on_gpu)
        mfu = self.utilization.of(cost_of(run).parameters)
        peak = self.hardware.device.peak(known.engine)
        once = replace(known, evaluation=replace(known.evaluation, interval=0))
        time = run_time(once, ranks, peak * mfu)
        return {
            "nodes": ranks // self.hardware.ranks_per_node,
            "ranks": ranks,
            "mfu": mfu,
            "hours": (time.training + (time.evaluation or 0.0)) / 3600,
            **_gib_of(found, self.hardware),
        }

    def _too_large(self, shaped: RunConfig, run: RunConfig, ranks: int, budget: float) -> str:
        cost, model = cost_of(run), run.model
        capacity, on_gpu = self.hardware.usable_memory, self.hardware.on_gpu
        known = self._with_precision(run)
        if cheapest_fit(known, ranks, capacity, on_gpu):
            words = "what is offloaded, drawn or copied while saving exceeds --host-memory, "
            words += f"{self.host_memory / GIB:,.0f} GiB"
        else:
            words = advice(known, ranks, capacity, on_gpu)
        largest = self._largest_that_fits(shaped, budget)
        nearest = "no smaller size fits either"
        if largest is not None:
            found = largest.model
            nearest = f"the nearest size that fits is {amount(cost_of(largest).parameters)} "
            nearest += f"({found.num_layers}x{found.d_model})"
        return (
            f"at {budget:.3g} FLOPs {amount(cost.parameters)} parameters "
            f"({model.num_layers}x{model.d_model}) do not fit into "
            f"{capacity / GIB:,.1f} GiB on each of {counted(ranks, 'rank')} "
            f"({self.hardware.name}): {words}; {nearest}: use more --nodes, a smaller --spread, "
            "fewer --sizes or smaller budgets"
        )

    def _largest_that_fits(self, shaped: RunConfig, budget: float) -> RunConfig | None:
        """The first shape that fits on the way down: smaller ones have more lanes, so that what
        they need does not shrink everywhere, and a bisection may miss it.
        """
        size = float(cost_of(shaped).parameters)
        before = shaped
        for _ in range(STEPS_DOWN):
            size /= STEP_DOWN
            tried = self.family.nearest(size)
            if tried == before:
                continue
            before = tried
            run, ranks = self._on_ranks(tried, budget)
            if self._fitted(run, ranks) is not None:
                return tried
        return None


def _gib_of(found: Footprint, hardware: Hardware) -> dict[str, float]:
    """Host memory is that of a node; on a CPU a rank's device is its part of it."""
    on_node = hardware.ranks_per_node
    host = found.host if hardware.on_gpu else found.device + found.copy
    return {
        "device_gib": found.device / GIB,
        "host_gib": on_node * host / GIB,
        "checkpoint_gib": found.checkpoint / GIB,
        "disk_gib": found.disk / GIB,
    }


def placement_table(runs: Sequence[PlannedRun]) -> list[list[str]]:
    """Heads and rows: where each cell runs, what it occupies and how long it takes."""
    heads = ["cell", "nodes", "ranks", "micro-batch", "ZeRO", "recomputed", "offloaded"]
    heads += ["GiB a rank", "host GiB a node", "checkpoint GiB", "disk GiB", "MFU", "hours"]
    rows = [heads]
    for item in runs:
        facts, engine = item.facts, item.run.engine
        offloaded = ("memories" * engine.offload_memories, "optimizer" * engine.offload_optimizer)
        ranks = int(facts["ranks"])
        rows.append(
            [
                item.name,
                *(f"{facts[name]:.0f}" for name in ("nodes", "ranks")),
                f"{lanes_of_pass(item.run, ranks)}x{accumulation_steps(item.run, ranks)}",
                str(engine.zero_stage),
                engine.activation_checkpointing,
                ", ".join(filter(None, offloaded)) or "-",
                *(
                    f"{facts[f'{name}_gib']:,.1f}"
                    for name in ("device", "host", "checkpoint", "disk")
                ),
                f"{facts['mfu']:.0%}",
                f"{facts['hours']:,.2f}",
            ]
        )
    return rows


def placement_totals(runs: Sequence[PlannedRun], hardware: Hardware) -> str:
    """Hours of all cells one after another, and what they occupy, in one line."""
    hours = sum(item.facts["hours"] for item in runs)
    of_ranks = sum(item.facts["hours"] * item.facts["ranks"] for item in runs)
    disk = sum(item.facts["disk_gib"] for item in runs)
    unit = "GPU-hours" if hardware.on_gpu else "core-hours"
    most = {
        name: max(item.facts[f"{name}_gib"] for item in runs)
        for name in ("device", "host", "checkpoint")
    }
    return (
        f"every cell fits {hardware.nodes} x {hardware.ranks_per_node} {hardware.name}: "
        f"{hours:,.1f} hours one after another ({of_ranks:,.0f} {unit}), at most "
        f"{most['device']:,.1f} GiB a rank, {most['host']:,.1f} GiB of host memory a node, "
        f"checkpoints of {most['checkpoint']:,.1f} GiB; {disk:,.0f} GiB of disk in all"
    )
