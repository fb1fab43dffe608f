"""What status says where a directory contradicts itself."""

from __future__ import annotations

import datetime
import json
import shutil
import time
from pathlib import Path

import pytest

from launcher.status.run_state import read_state
from pretrain.checkpoint.directory import step_directory
from pretrain.config.run import RunConfig
from pretrain.rundir.events import (
    AttemptEnded,
    AttemptReason,
    Event,
    GaveUp,
    NextAction,
    Spike,
    TrainingBegan,
)
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkpoints import publish_step
from tests.helpers.metrics import train_line


def attempt_ended(then: NextAction) -> AttemptEnded:
    return AttemptEnded(
        attempt_number=0,
        statuses=(1, -9),
        step_before=0,
        step=4,
        reason=AttemptReason.RANK_FAILED,
        next=then,
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", RunConfig(name="books"))


def write_ledger(run_dir: RunDir, *events: tuple[Event, float]) -> None:
    """Write the events, each so many seconds ago."""
    now, lines = time.time(), []
    for event, seconds_ago in events:
        run_dir.ledger.append(event)
        when = datetime.datetime.fromtimestamp(now - seconds_ago, datetime.timezone.utc)
        tree = {**json.loads(run_dir.ledger.path.read_text()), "time": when.isoformat()}
        lines.append(json.dumps(tree) + "\n")
        run_dir.ledger.path.unlink()
    run_dir.ledger.path.write_text("".join(lines))


def test_what_is_saved_is_what_checkpoints_say_not_measurements(run_dir):
    interval = run_dir.config.checkpoint.interval
    run_dir.ledger.append(TrainingBegan(step=0, world_size=2))
    last = 2 * interval + 3
    run_dir.metrics.write_text(json.dumps(train_line(last)) + "\n")
    assert read_state(run_dir.path).unsaved == f"no step of {last} is saved"
    for step in (interval, 2 * interval):
        publish_step(run_dir.checkpoints, step)
    assert not read_state(run_dir.path).unsaved
    shutil.rmtree(step_directory(run_dir.checkpoints, 2 * interval))
    assert read_state(run_dir.path).unsaved == f"only step {interval} of {last} is saved"


def test_times_of_clocks_that_differ_make_no_negative_or_absurd_durations(run_dir, caplog):
    line = train_line(5, tokens_per_second=1.0, seconds=40.0)
    run_dir.metrics.write_text(json.dumps(line) + "\n")
    write_ledger(
        run_dir,
        (GaveUp(spike=Spike(8, 9, 9.0, 3.0)), 110),
        (TrainingBegan(step=0, world_size=2), 100),
        (attempt_ended(NextAction.RETRY), 5000),  # a clock behind
        (TrainingBegan(step=4, world_size=2), 60),
        (attempt_ended(NextAction.GIVE_UP), -86400),  # a clock ahead
    )
    state = read_state(run_dir.path)
    assert state.results.goodput == pytest.approx(0.4, abs=0.02)
    assert state.last_failure_age == pytest.approx(0, abs=30)
    (note,) = caplog.messages
    assert note.endswith(
        "2 events have times in the future or out of order; clocks differ, durations are estimates"
    )
