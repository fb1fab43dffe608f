from __future__ import annotations

import datetime
import json
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from pretrain.cli import main
from pretrain.config.run import DataConfig, OptimConfig, RunConfig
from pretrain.reporting.charts import PRINT
from pretrain.reporting.events import describe
from pretrain.reporting.run_charts import run_panels
from pretrain.reporting.run_history import read_history
from pretrain.rundir.run_dir import RunDir

START = datetime.datetime(2026, 11, 18, 6, 40, tzinfo=datetime.timezone.utc)
STEPS = 40


def event(second: float, kind: str, **more: object) -> dict:
    return {"time": (START + datetime.timedelta(seconds=second)).isoformat(), "event": kind, **more}


REWIND = {
    "segments": [12, 25],
    "to_step": 10,
    "loss": 9.0,
    "usual_loss": 3.0,
    "reason": "steps 13 to 15 were bad",
}


def make_run(directory: Path, name: str = "small", learning_rate: float = 1e-3) -> Path:
    """40 steps of 1 s in intervals of 5; step 20 skipped; a rewind, a crash of 20 s, and an evaluation every 10."""
    config = RunConfig(
        name=name,
        data=DataConfig(lanes=2, segment_length=4),
        optim=OptimConfig(steps=80, learning_rate=learning_rate),
    )
    run_dir = RunDir.create(directory, config)
    lines: list[dict] = []
    for step in range(1, STEPS + 1):
        skipped = step == 20
        line = {"kind": "train", "step": step, "tokens": 8 * step, "loss": None if skipped else 4.0 - step / 40,
                "learning_rate": 1e-3, "grad_norm": None if skipped else 1.0, "skipped": skipped}  # fmt: skip
        if step % 5 == 0:
            line |= {
                "seconds": 5.0,
                "tokens_per_second": 8.0,
                "time": START.timestamp() + step + (40 if step > 10 else 0),
            }
        if step % 10 == 0:
            layers = ("embedding", "layer.0", "layer.1", "output")
            line |= {
                f"{kind}/{layer}": 0.1 for kind in ("grad_norm", "update_ratio") for layer in layers
            }
        lines.append(line)
        if step % 10 == 0:
            lines.append(
                {"kind": "evaluation", "step": step, "loss": 3.0, "loss_without_memory": 3.2}
            )
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ledger = [
        event(0, "start", step=0, world_size=2),
        event(15, "rewind", step=15, **REWIND),
        event(16, "resume", step=10, world_size=2),
        event(
            36,
            "attempt_ended",
            attempt=0,
            statuses=[1, -9],
            reason="rank 1 was ended by SIGKILL",
            next="retry",
        ),
        event(56, "resume", step=15, world_size=1),
        event(91, "finish", step=40),
    ]
    run_dir.ledger.write_text("".join(json.dumps(line) + "\n" for line in ledger))
    return directory


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "small")


def test_goodput_is_the_share_of_the_time_under_way_that_went_into_steps_that_count(run):
    history = read_history(run)
    assert history.seconds_under_way == pytest.approx(
        91
    )  # what was waited after the crash included
    assert history.seconds_that_count == 40
    assert history.goodput == pytest.approx(40 / 91)
    assert (len(history.failures), history.num_skipped, history.tokens) == (1, 1, 320)


def test_smoothing_keeps_a_straight_line_straight_and_passes_over_skipped_steps(run):
    steps_X, smooth_X = read_history(run).smooth_loss
    assert 20 not in steps_X
    assert smooth_X[5:15] == pytest.approx(4.0 - steps_X[5:15] / 40)


def test_progress_falls_where_the_run_went_back(run):
    seconds_X, steps_X = read_history(run).progress
    assert (np.diff(seconds_X) >= 0).all()
    assert steps_X[np.flatnonzero(np.diff(steps_X) < 0)].tolist() == [15]
    assert steps_X[-1] == 40


def test_setbacks_are_what_failed_and_what_went_back(run):
    seconds_X, _ = read_history(run).setbacks
    assert seconds_X.tolist() == [15, 36]


def test_the_report_is_one_page_without_the_network_and_a_picture(run, capsys):
    assert main(["report", str(run)]) == 0
    assert "step 40 of 80" in capsys.readouterr().out
    html = (run / "report.html").read_text()
    assert not re.search(r'(src|href)="(?!#)|url\((?!#)|<script|@import', html)
    for words in (
        "Value of the memory",
        "back to step 10, passing over segments 12 to 24",
        "44%",
        "ended by SIGKILL",
    ):
        assert words in html
    assert html.count("<svg") == 7
    assert not re.search("#0[1-7]0[1-7]0[1-7]", html), (
        "every stand-in has become a name of the style sheet"
    )
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_comparison_names_the_settings_that_differ(run, tmp_path, capsys):
    other = make_run(tmp_path / "other", learning_rate=2e-3)
    assert main(["compare", str(run), str(other), "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"optim\.learning_rate +0\.001 +0\.002", printed)
    assert "optim.steps" not in printed
    assert printed.count("44%") == 2
    html = (tmp_path / "out" / "compare.html").read_text()
    assert "optim.learning_rate" in html
    assert (tmp_path / "out" / "compare.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["report", "nowhere"], "holds no run"),
        (["compare", "{run}"], "needs two runs or more"),
        (["report", "{empty}"], "has no measured step yet"),
    ],
)
def test_what_cannot_be_shown_is_said_in_one_line(run, tmp_path, capsys, arguments, error):
    empty = RunDir.create(tmp_path / "empty", RunConfig()).path
    assert main([argument.format(run=run, empty=empty) for argument in arguments]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("happened", "words"),
    [
        ({"event": "start", "world_size": 1}, "began on 1 rank"),
        (
            {"event": "settings_changed", "changes": {"optim.steps": [10, 20]}},
            "optim.steps from 10 to 20",
        ),
        (
            {"event": "out_of_memory", "rank": 3, "micro_batch_lanes": 8},
            "rank 3 was out of memory with 8 lanes",
        ),
        (
            {"event": "suspects", "documents": [{"document": "d", "lane": 1, "loss": 8.0}]},
            "d (lane 1, loss 8.00)",
        ),
        ({"event": "straggler", "rank": 2, "ratio": 2.25}, "rank 2 took 2.2 times as long"),
        ({"event": "gave_up", "reason": "too often"}, "gave up: too often"),
        ({"event": "something_new"}, "something new"),
    ],
)
def test_events_are_told_as_sentences(happened, words):
    assert words in describe(happened)


def test_the_loss_chart_hides_the_first_losses_and_shows_the_peak_of_a_later_spike(run):
    steps = [{"kind": "train", "step": step, "loss": 9.0 - step, "skipped": False, "tokens": step}
             for step in range(1, 5)]  # fmt: skip
    steps += [{**steps[-1], "step": step, "loss": 4.0} for step in range(5, 400)]
    steps[200] = {**steps[200], "loss": 7.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    axes = Figure().add_subplot()
    run_panels(read_history(run))[0].draw(axes, PRINT)
    assert 7.0 < axes.get_ylim()[1] < 8.0
    assert axes.get_ylim()[0] < 4.0
