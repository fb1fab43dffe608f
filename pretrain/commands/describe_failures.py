"""What `pretrain describe` says of failures, for a cluster file with `mtbf_hours`. Torch-free."""

from __future__ import annotations

from data_pipeline.progress import duration
from pretrain.config.run import RunConfig
from pretrain.costs.devices import Hardware
from pretrain.costs.failures import SLOWER_WHILE_WRITING, failure_costs
from pretrain.costs.footprint import footprint_of
from pretrain.costs.saves import Saves, saves_of
from pretrain.terminal.text import counted

FORMULAS = (
    "M = 3600 mtbf_hours / nodes",
    "w = checkpoint (mean of the saves) / nodes / disk_mib_per_second; p = its part that training "
    "loses",
    "(1 - t/M) e^((t+p)/M) = 1, at least w; about sqrt(2 p M)",
    "t e^(-(w+s)/M) / ((e^((t+p)/M) - 1) (M + d)), d = restart_seconds, "
    "s = w, and the part of rebuilding memories",
)
REBUILD = "steps x forward FLOPs / FLOPs of a step x its time"


def failure_rows(
    run: RunConfig, hardware: Hardware, step_seconds: float, explain: bool = False
) -> list[tuple[str, str, str]]:
    """Return rows of name, value and note; none if it is not known how often nodes fail."""
    node = hardware.node
    costs = failure_costs(run, hardware, step_seconds)
    if node is None or costs is None:
        return []
    best = max(1, round(costs.best_interval / step_seconds))
    given = run.checkpoint.interval
    at_best, at_given = (costs.goodput(steps * step_seconds) for steps in (best, given))
    saving = f"of {counted(hardware.nodes, 'node')} at {node.disk_mib_per_second:g} MiB/s each"
    if run.checkpoint.asynchronous:
        saving += f", training {SLOWER_WHILE_WRITING:.0%} slower meanwhile (assumed)"
    saves = saves_of(footprint_of(run, hardware.world_size, hardware.on_gpu).run)
    if saves.leaves_out_memories:
        saving += f", on average: {saves.part_without:.0%} without memories"
    notes = (
        f"on average, one of {counted(hardware.nodes, 'node')}",
        saving,
        f"({duration(best * step_seconds)}, for checkpoint.interval)",
        f"at best; {at_given:.1%} with checkpoint.interval={given} "
        f"({duration(given * step_seconds)})",
    )
    names = "a failure every", "  a save takes", "  best interval", "  goodput"
    values = (
        duration(costs.between_failures),
        duration(costs.write or costs.pause),
        counted(best, "step"),
        f"{at_best:.1%}",
    )
    if explain:
        notes = tuple(f"{note}; {text}" for note, text in zip(notes, FORMULAS, strict=True))
    rows: list[tuple[str, str, str]] = list(zip(names, values, notes, strict=True))
    if saves.leaves_out_memories:
        rows.insert(2, _rebuild_row(saves, run, hardware, step_seconds, explain))
    return rows


def _rebuild_row(
    saves: Saves, run: RunConfig, hardware: Hardware, step_seconds: float, explain: bool
) -> tuple[str, str, str]:
    seconds = saves.rebuild_seconds(run, hardware.world_size, step_seconds)
    note = f"forward passes of {counted(saves.rebuilt_steps, 'step')} in a resume without memories"
    return "  memories rebuilt", duration(seconds), f"{note}; {REBUILD}" if explain else note
