"""The demo's training: ranks started as processes, watched through what they write, killed without warning."""

from __future__ import annotations

import math
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from data_pipeline.errors import UserError
from pretrain.checkpoint import directory as checkpoint_files
from pretrain.demo.screen import Screen
from pretrain.demo.settings import CONFIG, RANKS, Settings
from pretrain.processes.local_ranks import RankGroup, describe_failure
from pretrain.recovery.faults import VARIABLE as FAULT_VARIABLE
from pretrain.rundir.run_dir import RunDir

POLL_SECONDS = 0.25


@dataclass(frozen=True)
class Start:
    """How one start of all ranks went."""

    seconds: float
    seconds_to_first_step: float
    last_step: int  # measured
    was_killed: bool


def train(
    screen: Screen, settings: Settings, run_dir: RunDir, attempt: int, kill_after: int | None = None
) -> Start:
    """Train to the end, or until SIGKILL hits every rank right after the step `kill_after`.

    Raises UserError with the failing rank's last lines if the ranks end in any other way.
    """
    begin = time.monotonic()
    resumed_from, has_cut = newest_step(run_dir), False
    first_step_after: float | None = None
    what = f"{RANKS} ranks"
    environment = {"OMP_NUM_THREADS": "1"}
    if (
        kill_after is not None
    ):  # from within: seen from here, a quick run would be steps further already
        environment[FAULT_VARIABLE] = f"sigkill@{kill_after}"
    with (
        RankGroup(_command(settings, run_dir), RANKS, run_dir.logs, attempt, environment) as group,
        screen.progress(what, settings.steps) as meter,
    ):
        while any(status is None for status in group.poll()):
            last = _last_train(run_dir)
            step = last.get("step", 0)
            has_cut = (
                has_cut or step <= resumed_from
            )  # until then the measurements are those of an earlier start
            if first_step_after is None and has_cut and step > resumed_from:
                first_step_after = time.monotonic() - begin
            meter.at(
                step, _note(last) if first_step_after else "starting: importing torch and DeepSpeed"
            )
            if any(group.poll()):
                break
            time.sleep(POLL_SECONDS)
        statuses = group.wait()
    if kill_after is not None and -signal.SIGKILL in statuses and newest_step(run_dir) < kill_after:
        return Start(
            time.monotonic() - begin, first_step_after or 0.0, losses(run_dir)[-1][0], True
        )
    if any(statuses):
        raise UserError(describe_failure(statuses, group.logs))
    if kill_after is not None:
        raise UserError(
            f"the run came to its end before it could be killed after step {kill_after}; use more --steps"
        )
    return Start(time.monotonic() - begin, first_step_after or 0.0, settings.steps, False)


def losses(run_dir: RunDir) -> list[tuple[int, float]]:
    """Step and loss of every training step on record."""
    return [(line["step"], line["loss"]) for line in _train_lines(run_dir)]


def speed(run_dir: RunDir) -> dict[str, float]:
    """Medians over the run of what each interval measured."""
    lines = [line for line in _train_lines(run_dir) if "tokens_per_second" in line]
    names = ("tokens_per_second", "mfu", "data_wait", "used_memory_gib")
    return {name: statistics.median(line[name] for line in lines) for name in names}


def newest_step(run_dir: RunDir) -> int:
    """The step of the newest checkpoint, 0 if there is none."""
    steps = checkpoint_files.steps_on_disk(run_dir.checkpoints)
    return steps[-1] if steps else 0


def _command(settings: Settings, run_dir: RunDir) -> list[str]:
    train = [sys.executable, "-m", "pretrain", "train", str(CONFIG), *settings.overrides]
    return [*train, "--run-dir", str(run_dir.path)]


def _train_lines(run_dir: RunDir) -> list[dict[str, Any]]:
    return [line for line in run_dir.read_metrics() if line["kind"] == "train"]


def _last_train(run_dir: RunDir) -> dict[str, Any]:
    lines = [line for line in _train_lines(run_dir) if "tokens_per_second" in line]
    return lines[-1] if lines else {}


def _note(line: dict[str, Any]) -> str:
    return f"step {line['step']}  loss {line['loss'] or math.nan:.3f}  {line['tokens_per_second']:,.0f} tokens/s"
