from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from launcher.cli import main
from launcher.commands.tables import age, console, render
from launcher.status.infer_status import State
from launcher.status.run_state import RunState
from pretrain.config.run import RunConfig
from pretrain.reporting.results import RunResults
from pretrain.rundir import heartbeat
from pretrain.rundir.events import TrainingBegan
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.time_spent import TimeSpent


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    RunDir.create(tmp_path / "runs" / "alone", RunConfig(name="alone"))
    RunDir.create(tmp_path / "runs" / "sweep" / "cell", RunConfig(name="cell"))
    return tmp_path / "runs"


def test_all_runs_are_found_those_of_sweeps_too(runs, capsys):
    assert main(["status", "--all", f"--runs-dir={runs}", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(state["name"], state["state"]) for state in found] == [
        ("alone", "new"),
        ("cell", "new"),
    ]
    assert {"train_loss", "goodput", "time_spent"} <= found[0].keys()
    assert "results" not in found[0], "scripts find each result by its name"


def test_without_a_name_it_tells_of_all_runs(runs, capsys, monkeypatch):
    monkeypatch.chdir(runs.parent)
    assert main(["status"]) == 0
    output = capsys.readouterr().out
    assert [line.split()[0] for line in output.splitlines()[1:3]] == ["alone", "sweep/cell"]


def test_a_damaged_run_takes_a_row_of_a_table_but_is_an_error_alone(runs, capsys):
    (runs / "alone" / "run.json").write_text("{")
    assert main(["status", f"--runs-dir={runs}"]) == 0
    output = " ".join(capsys.readouterr().out.split())  # the reason may take several lines
    assert "damaged" in output
    assert "run.json is damaged" in output
    assert main(["status", str(runs / "alone")]) == 2
    assert "run.json is damaged" in capsys.readouterr().err


def test_the_status_of_512_nodes_takes_a_file_of_each(runs, capsys, monkeypatch):
    run_dir = RunDir(runs / "alone")
    run_dir.ledger.append(TrainingBegan(step=0, world_size=4096))
    run_dir.heartbeats.mkdir()
    for node in range(512):
        of_node = [
            {"rank": rank, "time": time.time() - 20, "written": time.time(), "phase": "save",
             "step": 100 + node // 8, "hostname": f"n{node:03}", "pid": 1}
            for rank in range(8 * node, 8 * node + 8)
        ]  # fmt: skip
        text = "".join(f"{json.dumps(record)}\n" for record in of_node)
        (run_dir.heartbeats / f"ranks-from-{8 * node:05}.jsonl").write_text(text)
    read = []
    monkeypatch.setattr(
        heartbeat,
        "read_regular",
        lambda path, limit: read.append(path) or path.read_bytes()[:limit],
    )
    assert main(["status", str(run_dir.path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "state running saving a checkpoint" in lines
    assert "attempts 1, 4,096 ranks on 512 nodes, n000 to n511" in lines
    assert [line for line in lines if line.startswith("step 163 of ")], "the latest"
    assert len(read) == 512


@pytest.mark.parametrize("damage", ["fifo", "device", "metrics", "ledger", "nested"])
def test_one_bad_directory_does_not_hide_the_other_runs(runs, capsys, damage):
    bad = RunDir(runs / "alone")
    if damage == "fifo":
        os.mkfifo(bad.metrics)
    elif damage == "device":
        bad.heartbeats.mkdir()
        (bad.heartbeats / "ranks-from-00000.jsonl").symlink_to("/dev/zero")
    elif damage == "metrics":
        bad.metrics.write_text('{"kind": "train", "tokens_per_second": []}\n')
    elif damage == "ledger":
        bad.ledger.path.write_bytes(b"\xff\xfe")
    else:
        (bad.path / "run.json").write_text("[" * 100_000)
    assert main(["status", f"--runs-dir={runs}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("alone ")
    assert lines[2].split()[:2] == ["sweep/cell", "new"]
    assert main(["status", str(bad.path)]) in (0, 2)
    assert capsys.readouterr().err.count("\n") <= 1


def test_control_characters_do_not_reach_the_terminal(runs, capsys):
    (runs / "sweep").rename(runs / "a\x1b]0;title\x07[red]b")
    assert main(["status", f"--runs-dir={runs}"]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "a\\x1b]0;title\\x07[red]b/cell" in output
    assert main(["status", str(runs / "\x1b[2Jgone")]) == 2
    assert "\\x1b[2Jgone holds no run" in capsys.readouterr().err
    with open(runs / "a\x1b]0;title\x07[red]b" / "cell" / "ledger.jsonl", "w") as ledger:
        ledger.write("damaged\n")
    assert main(["status", f"--runs-dir={runs}"]) == 0
    assert "\\x1b]0;title\\x07[red]b/cell/ledger.jsonl: skipped" in (
        error := capsys.readouterr().err
    )
    assert "\x1b" not in error
    state = replace(STATE, reason="\x1b[31mred", last_failure="\x1b[2J", name="\x1b[5m")
    assert "\x1b" not in drawn(state) + drawn(state, state)


def test_the_step_that_is_saved_is_shown_where_it_is_far_behind():
    behind = replace(STATE, checkpoint=200, interval=200)
    assert "saving a checkpoint; only step 200 of 1,500 is saved" in drawn(behind)
    assert "only step 200 of 1,500 is saved" in drawn(behind, STATE)
    assert "is saved" not in drawn(replace(STATE, interval=200))
    lost = replace(STATE, state=State.DONE, reason="", step=6000, checkpoint=5900, interval=200)
    assert "only step 5,900 of 6,000 is saved" in drawn(lost)


def test_in_80_columns_every_value_and_reason_is_readable():
    reason = "its processes ended silently after 2026-01-02 03:04:05: they were killed"
    other = replace(STATE, path="runs/a-sweep-of-many/learning_rate_0.001", reason=reason)
    screen = Console(width=80)
    with screen.capture() as capture:
        screen.print(render([STATE, other], in_full=False))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["run", "state", "step", "%", "train", "loss", "left", "saved"]
    assert " ".join(lines[1].split()) == "books running 1,500 25% 2.3457 62 min 1,400"
    text = " ".join(" ".join(lines).split())
    assert f"a-sweep-of-many/learning_rate_0.001: {reason}" in text
    assert len(lines) <= 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{runs}/nowhere"], "holds no run"),
        (["--runs-dir={runs}/nowhere"], "contains no runs; name one"),
        (["{runs}/alone", "--all"], "contradict each other"),
    ],
)
def test_bad_input_gets_one_line(runs, capsys, arguments, message):
    assert main(["status", *(text.format(runs=runs) for text in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


STATE = RunState(
    name="books",
    path="runs/books",
    state=State.RUNNING,
    reason="saving a checkpoint",
    attempts=3,
    ranks=4,
    nodes=("n1", "n2"),
    job="17",
    step=1500,
    steps=6000,
    results=RunResults(
        train_loss=2.34567,
        validation_loss=2.51234,
        bits_per_byte=1.125,
        memory_gain=0.25,
        parameters=1_500_000,
        flops=3.21e15,
        run_tokens_per_second=9876.5,
        goodput=0.876,
        skipped_windows=2,
    ),
    time_spent=TimeSpent(
        training=876.0,
        waiting_for_data=10.0,
        evaluation=50.0,
        saving=14.0,
        stalls=0.0,
        restarts=50.0,
    ),
    recent_tokens_per_second=12345.6,
    seconds_left=3723.0,
    checkpoint=1400,
    checkpoint_age=130.0,
    last_failure="rank 1 was killed by SIGKILL",
    last_failure_age=7300.0,
)


def drawn(*states: RunState) -> str:
    screen = console()
    with screen.capture() as capture:
        screen.print(render(states, in_full=True))
    return capture.get()


def test_one_run_is_told_in_full():
    text = " ".join(drawn(STATE).split())
    for part in (
        "running saving a checkpoint",
        "1,500 of 6,000 (25%)",
        "train loss 2.3457 validation loss 2.5123 bits/byte 1.1250 memory gain +0.2500",
        "parameters 1.5 M FLOPs 3.21e+15 run tokens/s 9,876 skipped windows 2",
        "recent tokens/s 12,346",
        "left 62 min",
        "goodput 88% of 17 min: training 87.6%, evaluation 5.0%, restarts 5.0%, saving 1.4%",
        "step 1,400, 2.2 min ago",
        "3, 4 ranks on n1 n2",
        "job 17",
        "rank 1 was killed by SIGKILL, 2.0 h ago",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "?"),
        (3, "3 s ago"),
        (86400, "24 h ago"),
    ],
)
def test_an_age_is_told_in_the_largest_unit_that_says_enough(seconds, text):
    assert age(seconds) == text
