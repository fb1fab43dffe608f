import errno
import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from foundation.errors import UserError
from launcher import run_state
from launcher.cli import main
from launcher.run_state import RunState, joined, read_states, with_queue
from launcher.run_status import State
from launcher.slurm.client import JobRecord, QueuedJob, Slurm
from launcher.status_tables import console, one_run, runs_table
from pretrain.config.run import RunConfig
from pretrain.reporting.results import RunResults
from pretrain.rundir import heartbeat
from pretrain.rundir.events import TrainingBegan
from pretrain.rundir.run_dir import RunDir
from tests.helpers.jobs import records, scripted
from tests.helpers.owners import give_away


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    RunDir.create(tmp_path / "runs" / "alone", RunConfig(name="alone"))
    RunDir.create(tmp_path / "runs" / "sweep" / "cell", RunConfig(name="cell"))
    return tmp_path / "runs"


def test_all_runs_are_found_those_of_sweeps_too(runs, capsys, monkeypatch):
    assert main(["status", f"--runs-dir={runs}", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(run["name"], run["state"]) for run in found] == [("alone", "new"), ("cell", "new")]
    assert {"train_loss", "goodput", "time_spent"} <= found[0].keys()
    assert "results" not in found[0], "scripts find each result by its name"
    monkeypatch.chdir(runs.parent)
    assert main(["status"]) == 0
    output = capsys.readouterr().out
    assert [line.split()[0] for line in output.splitlines()[1:3]] == ["alone", "sweep/cell"]
    shutil.rmtree(runs / "alone")
    assert main(["status"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "sweep/cell", (
        "as a command takes it"
    )


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
    of = heartbeat.read_regular
    monkeypatch.setattr(heartbeat, "read_regular", lambda *file: read.append(file) or of(*file))
    assert main(["status", str(run_dir.path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "attempts 1, 4,096 ranks on 512 nodes, n000 to n511" in lines
    assert [line for line in lines if line.startswith("step 163 of ")], "the latest"
    assert len(read) == 512


@pytest.mark.parametrize("damage", ["fifo", "device", "metrics", "ledger", "cut", "nested"])
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
        (bad.path / "run.json").write_text("{" if damage == "cut" else "[" * 100_000)
    assert main(["status", f"--runs-dir={runs}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("alone ")
    assert lines[2].split()[:2] == ["sweep/cell", "new"]
    is_lost = damage in ("cut", "nested")
    assert "unreadable" in lines[1] or not is_lost
    assert main(["status", str(bad.path)]) in ([2] if is_lost else [0, 2])
    assert capsys.readouterr().err.count("\n") <= 1


def test_control_characters_do_not_reach_the_terminal(runs, capsys):
    (runs / "sweep").rename(runs / "a\x1b]0;title\x07[red]b")
    assert main(["status", f"--runs-dir={runs}"]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "a\\x1b]0;title\\x07[red]b/cell" in output
    assert main(["status", str(runs / "\x1b[2Jgone")]) == 2
    assert "\\x1b[2Jgone" in capsys.readouterr().err
    (runs / "a\x1b]0;title\x07[red]b" / "cell" / "ledger.jsonl").write_text("damaged\n")
    assert main(["status", f"--runs-dir={runs}"]) == 0
    error = capsys.readouterr().err
    assert "\\x1b]0;title\\x07[red]b/cell/ledger.jsonl" in error
    assert "\x1b" not in error
    state = replace(STATE, reason="\x1b[31mred", last_failure="\x1b[2J", name="\x1b[5m")
    assert "\x1b" not in drawn(state) + drawn(state, state)


def test_in_80_columns_every_value_and_reason_is_readable():
    reason = "its processes ended silently after 2026-01-02 03:04:05: they were killed"
    other = replace(STATE, path="runs/a-sweep-of-many/learning_rate_0.001", reason=reason)
    screen = Console(width=80)
    with screen.capture() as capture:
        screen.print(runs_table([STATE, other]))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["run", "state", "step", "%", "train", "loss", "left", "saved"]
    assert lines[1].split() == ["books", "running", "1,500", "25%", "2.3457", "62", "min", "1,400"]
    text = " ".join(" ".join(lines).split())
    assert f"a-sweep-of-many/learning_rate_0.001: {reason}" in text
    assert len(lines) <= 8


STATE = RunState(
    name="books", path="runs/books", state=State.RUNNING, reason="saving a checkpoint",
    attempts=3, nodes=("n1", "n2"), job="17", step=1500, steps=6000, seconds_left=3723.0,
    results=RunResults(train_loss=2.34567, flops=3.21e15), checkpoint=1400,
    last_failure="rank 1 was killed by SIGKILL",
)  # fmt: skip


def drawn(*states: RunState) -> str:
    screen = console()
    with screen.capture() as capture:
        screen.print(runs_table(states) if states[1:] else one_run(states[0]))
    return capture.get()


def test_one_run_is_told_in_full():
    text = " ".join(drawn(STATE).split())
    parts = "1,500 of 6,000", "25%", "2.3457", "3.21e+15", "62 min", "1,400", "n1 n2", "job 17"
    assert [part for part in (*parts, STATE.reason, STATE.last_failure) if part not in text] == []


RUN = RunState(
    name="books", path="runs/books", state=State.FAILED, reason="its processes ended silently",
    is_lost=True, step=40, job="17", work_dirs=("/runs/books",),
)  # fmt: skip
BEGUN = replace(RUN, attempts=2)


def queued(state: str, reason: str = "None", start: str = "N/A") -> QueuedJob:
    return QueuedJob("17", "17", "N/A", state, reason, "", start, "/runs/books")


def record(state: str) -> JobRecord:
    return JobRecord("17", state, "/runs/books")


def run(state: State, reason: str = "", **more) -> RunState:
    return replace(RUN, state=state, reason=reason, **more)


RELEASE = "'scontrol release 17' lets it start"
FORGOTTEN = replace(RUN, reason="3 in a row", is_lost=False)
RESUMED = run(State.PREEMPTED, "not requeued", attempts=2, needs_resume=True)


@pytest.mark.parametrize(
    ("before", "job", "accounting", "state", "reason"),
    [
        (RUN, ("PENDING", "Resources"), [], "queued", "waiting (Resources)"),
        (RUN, ("PENDING", "launch failed requeued held"), [], "queued", RELEASE),
        (RUN, ("SPECIAL_EXIT",), [], "queued", f"waiting (None); {RELEASE}"),
        (RUN, ("PENDING", "Priority", "2026-01-02T03:04:05"), [], "queued", "2026-01-02 03:04:05"),
        (BEGUN, ("PENDING", "JobHeldUser", "2026-01-02T03:04:05"), [], "requeued", RELEASE),
        (BEGUN, ("PENDING",), ["NODE_FAIL"], "requeued", "a node failed"),
        (BEGUN, ("PENDING",), ["NODE_FAIL", "PREEMPTED"], "preempted", "preempted by another job"),
        (run(State.PREEMPTED, "x", attempts=2), ("PENDING",), [], "preempted", "x; waiting (None)"),
        (RUN, ("RUNNING",), [], "running", "starting"),
        (run(State.RUNNING, "evaluating"), ("RUNNING",), [], "running", "evaluating"),
        (run(State.UNRESPONSIVE, "no heartbeat"), ("RUNNING",), [], "running", "no heartbeat"),
        (RUN, ("COMPLETING",), [], "running", "its job is completing"),
        (RUN, ("CANCELLED",), [], "canceled", "after step 40"),
        (run(State.UNRESPONSIVE), None, ["CANCELLED by 1000"], "canceled", "after step 40"),
        (RUN, ("TIMEOUT",), [], "failed", "reached the time limit"),
        (run(State.RUNNING), None, ["OUT_OF_MEMORY"], "failed", "ran out of host memory"),
        (run(State.QUEUED), None, [], "canceled", "left the queue unstarted"),
        (run(State.QUEUED), ("FAILED",), [], "failed", "RUN/logs is gone; 'launcher resume' "),
        (run(State.REQUEUED, "forgotten"), None, ["FAILED"], "failed", "forgotten; its job has en"),
        (RUN, ("RUNNING", "None", "2026-01-02T03:04:05"), [], "running", "since 2026-01-02 03:04"),
        (RUN, ("FAILED",), [], "failed", "its job has ended (failed)"),
        (FORGOTTEN, ("FAILED",), [], "failed", "3 in a row"),
        (run(State.STOPPED, "on request"), ("COMPLETED",), [], "stopped", "on request"),
        (run(State.STOPPED, is_job_open=True), ("FAILED",), [], "failed", "could not write why"),
        (run(State.DONE), ("COMPLETED",), [], "done", ""),
        (run(State.DONE, is_job_open=True), ("RUNNING",), [], "done", "its job 17 still holds its"),
        (run(State.RUNNING), ("PREEMPTED",), [], "preempted", "'launcher resume' continues the"),
        (RESUMED, None, [], "preempted", "not requeued"),
    ],
)
def test_what_slurm_says_about_a_job_wins_over_heartbeats(before, job, accounting, state, reason):
    found = joined(before, queued(*job) if job else None, [record(each) for each in accounting])
    assert found.state == state
    assert reason in found.reason
    assert found.job == "17"


def test_a_job_that_works_elsewhere_has_only_the_same_number():
    other = replace(queued("RUNNING"), work_dir="/home/me")
    former = [replace(record("NODE_FAIL"), work_dir="/x")]
    assert joined(RUN, other, former).state == "failed"
    stopped = run(State.STOPPED, "on request")
    assert joined(stopped, other, former) == stopped


def test_a_run_that_may_not_be_read_is_told_as_other_files_are(tmp_path, monkeypatch):
    def read_state(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path / "run.json"))

    monkeypatch.setattr(run_state, "read_state", read_state)  # root may read everything
    closed, other = read_states([tmp_path, tmp_path])
    assert closed.reason.startswith(f"{tmp_path}/run.json: ")
    assert closed.state == other.state == State.UNREADABLE
    with pytest.raises(UserError, match=f"{tmp_path}/run.json: "):
        read_states([tmp_path])
    give_away(tmp_path, monkeypatch)
    assert "another user's" in read_states([tmp_path] * 2)[0].reason


def test_without_an_answer_the_states_of_the_directories_stand_with_a_warning(caplog):
    assert with_queue([RUN], scripted("")) == [RUN]
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    "broken", ["18|18|N/A|RUN", "18|18|N/A|run?|None||N/A|/runs/books", "18|18|extra", "18"]
)
def test_a_broken_line_of_the_queue_leaves_the_other_jobs_as_they_are(caplog, broken):
    lines = [f"{job}|{job}|N/A|RUNNING|None||N/A|/runs/books" for job in (17, 19)]
    runs = [replace(RUN, job=job) for job in ("17", "18", "19")]
    found = with_queue(runs, scripted(records(lines[0], broken, lines[1])))
    assert [state.state for state in found] == ["running", RUN.state, "running"]
    assert "job 18: " in "".join(caplog.messages)


def test_a_list_of_nodes_that_cannot_be_read_hides_no_run():
    jobs = (("17", "n[1-"), ("18", "n2"))
    lines = [f"{n}|{n}|N/A|RUNNING|None|{nodes}|N/A|/runs/books" for n, nodes in jobs]
    found = with_queue([replace(RUN, job=job) for job, _ in jobs], scripted(records(*lines)))
    assert [(state.state, state.nodes) for state in found] == [
        ("running", ()),
        ("running", ("n2",)),
    ]


def test_slurm_is_not_asked_about_runs_it_never_had_or_that_are_done():
    never = replace(RUN, job=None)
    done = replace(RUN, state=State.DONE)
    asked = Slurm(lambda *_: pytest.fail("asked"))
    assert with_queue([never, done], asked) == [never, done]


def test_accounting_is_asked_only_about_jobs_that_are_forgotten_or_may_have_run_before():
    asked = []
    lines = [
        f"{n}|{n}|N/A|{s}|None||N/A|/runs/books" for n, s in ((17, "RUNNING"), (18, "PENDING"))
    ]

    def run(command: Sequence[str], _: float) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        answer = records(*lines) if command[0] == "squeue" else "JobID|xl|State|xl|WorkDir|xl|\n"
        return subprocess.CompletedProcess(command, 0, answer, "")

    found = with_queue([replace(RUN, job=job) for job in ("17", "18", "19")], Slurm(run))
    assert [state.state for state in found] == ["running", "queued", "failed"]
    assert [command[command.index("-j") + 1] for command in asked] == ["17,18,19", "18,19"]
