from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.cli import main
from pretrain.config.data import DataConfig, PhaseConfig
from pretrain.config.model import ModelConfig
from pretrain.config.optim import OptimConfig, ScheduleConfig
from pretrain.config.run import RunConfig
from pretrain.reporting.run_history import read_history
from pretrain.reporting.run_warnings import warnings_of
from pretrain.rundir.events import TrainingBegan
from pretrain.rundir.run_dir import RunDir
from tests.helpers.metrics import train_line

WARMUP, STEPS, RATE = 20, 320, 1e-3
RUN = RunConfig(
    model=ModelConfig(vocab_size=320),
    optim=OptimConfig(
        steps=STEPS,
        learning_rate=RATE,
        clip_norm=0.25,
        schedule=ScheduleConfig(warmup_steps=WARMUP),
    ),
)
FALLING = [5.0 - 0.005 * step for step in range(STEPS)]


def warned(
    directory: Path,
    run: RunConfig = RUN,
    losses: Sequence[float | None] = FALLING,
    updates: float = 3e-3,
    validated: Sequence[float] = (),
) -> list[str]:
    """What the report of a run with these measurements warns of."""
    run_dir = RunDir.create(directory / "run", run)
    lines = []
    for step, loss in enumerate(losses, 1):
        line = train_line(step, loss, skipped=loss is None)
        line["learning_rate"] = RATE
        if step % 10 == 0:
            line |= {"tokens_per_second": 1.0, "seconds": 1.0, "update_ratio/layer.0": updates}
            line |= {"update_ratio/output": 1e-6}
        lines.append(line)
    lines += [
        {"kind": "evaluation", "step": 100 * number, "loss": loss}
        for number, loss in enumerate(validated, 1)
    ]
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_dir.ledger.append(TrainingBegan(step=0, world_size=1))
    return warnings_of(read_history(run_dir.path))


def test_nothing_is_warned_of_where_all_is_as_usual(tmp_path):
    assert warned(tmp_path) == []


def test_tiny_updates_are_a_rate_that_is_too_low_except_of_trained_weights(tmp_path, capsys):
    (found,) = warned(tmp_path / "new", updates=5e-5)
    assert found.startswith("optim.learning_rate=0.001 looks too low: the median update of a layer")
    assert main(["report", str(tmp_path / "new" / "run")]) == 0
    assert f"warning: {found}" in capsys.readouterr().out
    assert "learning_rate=0.001 looks too low" in (tmp_path / "new/run/report.html").read_text()
    tuned = replace(RUN, initial_weights=tmp_path)
    assert warned(tmp_path / "tuned", tuned, updates=5e-5) == []


RISING = [*FALLING[:160], *(4.2 + 0.01 * step for step in range(160))]


def test_losses_that_end_above_their_lowest_are_a_rate_that_is_too_high(tmp_path):
    (found,) = warned(tmp_path / "rises", losses=RISING)
    assert "looks too high: the last fifth of the step losses is 26% above the lowest" in found
    assert warned(tmp_path / "also", losses=RISING, validated=[4.5, 5.0])
    assert warned(tmp_path / "harder", losses=RISING, validated=[5.0, 4.5]) == [], (
        "the training data got harder, the model did not get worse"
    )
    phase = PhaseConfig(from_step=160, segment_length=32)
    later = replace(RUN, data=DataConfig(phases=(phase,)))
    flat = [*FALLING[:160], *[6.0] * 160]
    assert warned(tmp_path / "flat", losses=flat)
    assert warned(tmp_path / "phase", later, losses=flat) == [], "a phase has other data"


RECORDED = json.loads((Path(__file__).parents[2] / "data/recovery/losses.json").read_text())


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_runs_of_excessive_rates_are_warned_of_and_those_of_good_ones_are_not(
    tmp_path, name
):
    """Rates 4 to 25 times a good one, and the 200 steps before runs of good rates were damaged."""
    schedule = ScheduleConfig(warmup_steps=RECORDED[name]["warmup_steps"])
    run = replace(RUN, optim=replace(RUN.optim, schedule=schedule))
    found = warned(tmp_path, run, losses=RECORDED[name]["losses"][:200])
    expected = ["too high, or its warm-up too short"] if ": rate" in name else []
    assert len(found) == len(expected)
    assert all(words in warning for words, warning in zip(expected, found, strict=True))
