"""The machine that a plan's cells run on: the cheapest engine settings that fit, nodes and hours.

Every number of memory and time is one of `describe`'s: nothing here estimates any.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foundation.errors import ConfigError
from pretrain.config.resolve import with_precision
from pretrain.config.run import RunConfig, accumulation_steps
from pretrain.costs.device_memory import largest_footprint
from pretrain.costs.fitting import advice, cheapest_fit
from pretrain.costs.flops import pass_lanes
from pretrain.costs.hardware import GIB, Hardware
from pretrain.costs.run_time import run_time
from pretrain.scaling.plan import PlannedRun
from pretrain.scaling.recipe import Rule, power_of_two, wanted_lanes, with_budget
from pretrain.terminal.text import counted

MICRO_BATCHES = 8  # a rank's lanes are 8 to 16 times a power of two, or fewer than 16
ROUNDED = 1 / 8  # of the rule's batch: what whole lanes on every rank may change


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The nodes that cells may use, and how fast they are."""

    hardware: Hardware
    mfu: float
    rule: Rule

    def make(self, shaped: RunConfig, budget: float) -> tuple[RunConfig, dict[str, float]]:
        """Return the run of a shape and a budget with engine settings that make it fit, and facts.

        ConfigError if none does; it names the ranks that would.
        """
        hardware = self.hardware
        on_gpu, capacity = hardware.on_gpu, hardware.usable_memory
        run, ranks = self._on_ranks(shaped, budget)
        accumulation_steps(run, ranks)  # raises where the experiment's lanes do not divide
        known = with_precision(run, best="bf16" if on_gpu else "fp32")
        fitting = cheapest_fit(known, ranks, capacity, on_gpu)
        if fitting is None:
            remedy = advice(known, ranks, capacity, on_gpu)
            raise ConfigError(
                f"at {budget:.3g} FLOPs {run.model.num_layers}x{run.model.d_model} do not fit into "
                f"{capacity / GIB:,.1f} GiB on each of {counted(ranks, 'rank')} "
                f"({hardware.name}): {remedy}; use more --nodes, a smaller --spread, fewer "
                "--sizes or smaller budgets"
            )
        known = replace(known, engine=fitting.engine)
        run = replace(run, engine=replace(fitting.engine, precision=run.engine.precision))
        memory = largest_footprint(known, ranks, on_gpu)
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
        """Return the run on the most nodes that its batch divides over, and its ranks."""
        on_node, wanted = self.hardware.ranks_per_node, wanted_lanes(shaped, budget, self.rule)
        counts = [nodes * on_node for nodes in range(self.hardware.nodes, 0, -1)]
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


def placement(item: PlannedRun) -> dict[str, str]:
    """Where a cell runs, what it occupies and how long it takes, by the heads of a table."""
    facts, ranks, engine = item.facts, int(item.facts["ranks"]), item.run.engine
    offloaded = "memories" * engine.offload_memories, "optimizer" * engine.offload_optimizer
    return {
        "nodes": f"{facts['nodes']:.0f}",
        "micro-batch": f"{pass_lanes(item.run, ranks)}x{accumulation_steps(item.run, ranks)}",
        "ZeRO": str(engine.zero_stage),
        "recomputed": engine.activation_checkpointing,
        "offloaded": ", ".join(filter(None, offloaded)) or "-",
        "GiB a rank": f"{facts['device_gib']:,.1f}",
        "checkpoint GiB": f"{facts['checkpoint_gib']:,.1f}",
        "hours": f"{facts['hours']:,.2f}",
    }


def placement_totals(runs: Sequence[PlannedRun], hardware: Hardware, mfu: float) -> list[str]:
    """Hours of all cells one after another, and what they occupy, in a line each."""
    hours = sum(item.facts["hours"] for item in runs)
    of_ranks = sum(item.facts["hours"] * item.facts["ranks"] for item in runs)
    unit = "GPU-hours" if hardware.on_gpu else "core-hours"
    device, host = (max(i.facts[f"{name}_gib"] for i in runs) for name in ("device", "host"))
    return [
        f"every cell fits: {hours:,.1f} hours one after another ({of_ranks:,.0f} {unit} at "
        f"{mfu:.0%} MFU, of which small models use less: --mfu), at most {device:,.1f} GiB a rank "
        f"and {host:,.1f} GiB of host memory a node",
        hardware.describe(),
    ]
