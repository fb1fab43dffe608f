"""Where the cells of a plan run: nodes, engine settings, memory, disk and hours. Torch-free.

Every number is one of `describe`'s: what does not fit there does not fit here, and a cell that does
not fit under any engine setting is an error. Nothing here estimates memory or time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from foundation.errors import ConfigError
from pretrain.config.resolve import with_precision
from pretrain.config.run import RunConfig, accumulation_steps
from pretrain.costs.devices import GIB, Hardware
from pretrain.costs.fitting import advice, cheapest_fit
from pretrain.costs.flops import lanes_of_pass
from pretrain.costs.memory import footprint_of
from pretrain.costs.run_time import run_time
from pretrain.scaling.plan import PlannedRun
from pretrain.scaling.recipe import Rule, power_of_two, wanted_lanes, with_budget
from pretrain.terminal.text import counted

MICRO_BATCHES = 8  # a rank's lanes are 8 to 16 times a power of two, or fewer than 16
ROUNDED = 1 / 8  # most by which whole lanes on every rank may change the rule's batch


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The nodes that cells may use, and how fast they are."""

    hardware: Hardware
    mfu: float
    rule: Rule
    host_memory: float = math.inf  # bytes of a GPU node's host

    def make(self, shaped: RunConfig, budget: float) -> tuple[RunConfig, dict[str, float]]:
        """The run of a shape and a budget with the engine settings that make it fit, and facts.

        ConfigError if none does; it says on how many ranks it would.
        """
        hardware = self.hardware
        run, ranks = self._on_ranks(shaped, budget)
        accumulation_steps(run, ranks)  # raises where the experiment's lanes do not divide
        known = with_precision(run, best="bf16" if hardware.on_gpu else "fp32")
        capacity, on_gpu = hardware.usable_memory, hardware.on_gpu
        host = self.host_memory / hardware.ranks_per_node
        found = cheapest_fit(known, ranks, capacity, on_gpu, host)
        if found is None:
            remedy = advice(known, ranks, capacity, on_gpu)
            if cheapest_fit(known, ranks, capacity, on_gpu):
                remedy = "what is offloaded or copied while saving exceeds --host-memory"
            raise ConfigError(
                f"at {budget:.3g} FLOPs {run.model.num_layers}x{run.model.d_model} do not fit into "
                f"{capacity / GIB:,.1f} GiB on each of {counted(ranks, 'rank')} "
                f"({hardware.name}): {remedy}; use more --nodes, a smaller --spread, fewer "
                "--sizes or smaller budgets"
            )
        known = replace(known, engine=found.engine)
        run = replace(run, engine=replace(found.engine, precision=run.engine.precision))
        memory = footprint_of(known, ranks, on_gpu)
        once = replace(known, evaluation=replace(known.evaluation, interval=0))
        time = run_time(once, ranks, hardware.device.peak(known.engine) * self.mfu)
        host_bytes = memory.host if on_gpu else memory.device + memory.copy  # a CPU's is its device
        return run, {
            "nodes": ranks // hardware.ranks_per_node,
            "ranks": ranks,
            "hours": (time.training + (time.evaluation or 0.0)) / 3600,
            "device_gib": memory.device / GIB,
            "host_gib": hardware.ranks_per_node * host_bytes / GIB,
            "checkpoint_gib": memory.checkpoint / GIB,
        }

    def _on_ranks(self, shaped: RunConfig, budget: float) -> tuple[RunConfig, int]:
        """The run on as many nodes as its batch divides over, and its ranks."""
        on_node, wanted = self.hardware.ranks_per_node, wanted_lanes(shaped, budget, self.rule)
        counts = [each * on_node for each in range(self.hardware.nodes, 0, -1)]
        if not wanted:  # the experiment's own lanes
            dividing = [ranks for ranks in counts if shaped.data.lanes % ranks == 0]
            return with_budget(shaped, budget, self.rule), (dividing or counts[-1:])[0]
        for ranks in counts:
            # A round number of lanes on each rank: of 97 the only micro-batch that divides is 1.
            multiple = ranks * max(1, power_of_two(wanted / ranks) // MICRO_BATCHES)
            lanes = multiple * max(1, round(wanted / multiple))
            if abs(lanes / wanted - 1) <= ROUNDED or ranks == counts[-1]:
                return with_budget(shaped, budget, self.rule, multiple), ranks
        raise AssertionError("the fewest nodes always end the loop")


def placement_table(runs: Sequence[PlannedRun]) -> list[list[str]]:
    """Heads and rows: where each cell runs, what it occupies and how long it takes."""
    heads = ["cell", "nodes", "ranks", "micro-batch", "ZeRO", "recomputed", "offloaded"]
    rows = [[*heads, "GiB a rank", "host GiB a node", "checkpoint GiB", "hours"]]
    for item in runs:
        facts, engine = item.facts, item.run.engine
        offloaded = ("memories" * engine.offload_memories, "optimizer" * engine.offload_optimizer)
        ranks = int(facts["ranks"])
        rows.append(
            [
                item.name,
                f"{facts['nodes']:.0f}",
                str(ranks),
                f"{lanes_of_pass(item.run, ranks)}x{accumulation_steps(item.run, ranks)}",
                str(engine.zero_stage),
                engine.activation_checkpointing,
                ", ".join(filter(None, offloaded)) or "-",
                *(f"{facts[f'{name}_gib']:,.1f}" for name in ("device", "host", "checkpoint")),
                f"{facts['hours']:,.2f}",
            ]
        )
    return rows


def placement_totals(runs: Sequence[PlannedRun], hardware: Hardware, mfu: float) -> list[str]:
    """Hours of all cells one after another, and what they occupy, in a line each."""
    hours = sum(item.facts["hours"] for item in runs)
    of_ranks = sum(item.facts["hours"] * item.facts["ranks"] for item in runs)
    unit = "GPU-hours" if hardware.on_gpu else "core-hours"
    most = {
        name: max(item.facts[f"{name}_gib"] for item in runs)
        for name in ("device", "host", "checkpoint")
    }
    return [
        f"every cell fits: {hours:,.1f} hours one after another ({of_ranks:,.0f} {unit} at "
        f"{mfu:.0%} MFU, of which small models use less: --mfu), at most {most['device']:,.1f} GiB "
        f"a rank and {most['host']:,.1f} GiB of host memory a node",
        hardware.describe(),
    ]
