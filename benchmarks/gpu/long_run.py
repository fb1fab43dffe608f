"""A model of about 100M parameters trained as a run, killed midway and resumed."""

from __future__ import annotations

import signal
import statistics
from pathlib import Path

from benchmarks.gpu.context import Context
from benchmarks.gpu.processes import train_ranks
from pretrain.checkpoint.marker import latest_step
from pretrain.rundir.metrics_file import measurements_of
from pretrain.rundir.run_dir import RunDir

MODEL = Path(__file__).parents[2] / "configs" / "models" / "xl_modern_100m.yaml"
STALL_GOAL = 0.01  # of the time: what saves hold the loop up
DRY_SETTINGS = (
    "model.num_layers=2", "model.d_model=32", "model.num_heads=2", "model.num_key_heads=1",
    "model.memory_length=8", "data.segment_length=8", "data.lanes=4", "metrics.interval=1",
)  # fmt: skip


def run(context: Context) -> None:
    """Train to the kill, resume to the end; report losses, speed, stall, and what was lost."""
    steps, interval = context.size((400, 50), (4, 1))
    experiment, run_dir = context.work / "experiment.yaml", RunDir(context.work / "run")
    experiment.write_text(
        f"extends: {MODEL}\n"
        "model: {vocab_size: 0, dropout: 0.1}\n"
        f"data: {{path: {context.corpus}, lanes: 32}}\n"
        f"optim: {{steps: {steps}, schedule: {{warmup_steps: {max(1, steps // 10)}}}}}\n"
        f"checkpoint: {{interval: {interval}}}\n"
        f"evaluation: {{interval: 0, max_tokens: {context.size(20_000, 200)}}}\n"
        "metrics: {tensorboard: false}\n"
    )
    overrides = context.size((), DRY_SETTINGS)
    kill_at = steps // 2 + max(1, interval // 2)
    train_ranks(
        experiment, overrides, run_dir, 1, is_dry=context.is_dry, fault=f"sigkill@{kill_at}"
    )
    kept = latest_step(run_dir.checkpoints)
    lost = {"killed_at": kill_at, "resumed_from": kept, "signal": int(signal.SIGKILL)}
    context.report.check("kill", 0 < kept <= kill_at, **lost)
    train_ranks(experiment, overrides, run_dir, 1, is_dry=context.is_dry)
    _report(context, run_dir, steps)


def _report(context: Context, run_dir: RunDir, steps: int) -> None:
    lines = list(measurements_of(run_dir.metrics))
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    first, last = losses[min(losses)], losses[max(losses)]
    learned = context.is_dry or last < first - 1.0
    every = sorted(losses) == list(range(min(losses), steps + 1, min(losses)))
    words = {"first": first, "last": last, "steps": max(losses), "lines": len(losses)}
    context.report.check("losses", learned and every and max(losses) == steps, **words)
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    context.report.add("speed", tokens_per_second=statistics.median(speeds))
    # Intervals with compilation or a start are not what a long run pays.
    stalls = [line["save_stall"] for line in lines if "save_stall" in line]
    context.report.add("saves", stall_seconds=stalls, goal=STALL_GOAL)
