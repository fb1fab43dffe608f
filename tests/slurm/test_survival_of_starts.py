"""Starts that Slurm takes back: nothing of them may count against the run, or end it.

The three runs are disturbed at the same time, each on hosts of its own in a second cluster.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretrain.rundir.launch_events import AttemptEnded, JobEndReason, JobStarted, NextAction
from pretrain.rundir.ledger import events_of
from tests.helpers.corpora import make_tiny_corpus
from tests.slurm.lab import SlurmLab
from tests.slurm.runs import INTERVAL, Runs, SlurmRun, assert_status, in_background

# Ranks import until the file is gone.
SLOW_START = """import os, sys, time
while sys.orig_argv[2:4] == ["pretrain", "train"] and os.path.exists({file!r}):
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def others() -> Iterator[Runs]:
    """Runs in a cluster of six hosts."""
    with SlurmLab(num_nodes=6) as lab:
        yield Runs(lab, make_tiny_corpus(lab.path / "corpus"))


@pytest.fixture(scope="module")
def forgotten(others: Runs) -> SlurmRun:
    """A run whose job has just started when the controller is killed, which knows of no start."""
    lab = others.lab
    run = others.submit("forgotten", options={"nodelist": "n5,n6", "hold": None})
    with lab.forgotten_by_the_controller(run.job):
        lab.run("scontrol", "release", run.job)
        run.until(lambda: list(run.dir.logs.glob("slurm-*.log")))
        lab.run_on("n5", "pkill", "-STOP", "-x", "slurmd")  # the node registers late
    run.until(lambda: run.state() == "PENDING")
    run.until(lambda: run.ends())
    lab.run_on("n5", "pkill", "-CONT", "-x", "slurmd")
    run.until(lambda: lab.run("pgrep", "-f", rf"slurmstepd: .{run.job}\.batch").returncode)
    lab.run("scontrol", "release", run.job)
    return run


@pytest.fixture(scope="module")
def preempted(others: Runs, forgotten: SlurmRun) -> SlurmRun:
    """A run that is preempted three times while its ranks start, with grace time."""
    slow, starting = others.path / "slow", others.path / "starting"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(SLOW_START.format(file=str(starting)))
    starting.touch()
    run = others.submit(
        "preempted", environment={"PYTHONPATH": str(slow)}, options={"nodelist": "n1,n2"}
    )

    def disturb() -> None:
        urgent = ["sbatch", "-p", "urgent", "-N2", "-w", "n1,n2", "--exclusive", "-o", "/dev/null"]
        for number in (1, 2, 3):
            run.until(lambda number=number: len(list(run.dir.logs.glob("*/rank-3.log"))) >= number)
            others.lab.run(*urgent, "--wrap", "sleep 1")
            run.wait_for_end(JobEndReason.PREEMPTED, count=number)
        starting.unlink()

    in_background(disturb)
    return run


@pytest.fixture(scope="module")
def unauthenticated(others: Runs, forgotten: SlurmRun) -> SlurmRun:
    """A run that loses a rank while munge is away on its first host, for longer than Slurm waits
    for a host.
    """
    lab = others.lab
    run = others.submit("unauthenticated", options={"nodelist": "n3,n4"})

    def disturb() -> None:
        run.wait_for_step(INTERVAL + 20)
        lab.run_on("n3", "mount", "-t", "tmpfs", "none", str(lab.path / "munge"))
        run.signal_rank(3, signal.SIGKILL)
        time.sleep(30)
        lab.run_on("n3", "umount", str(lab.path / "munge"))
        run.until(lambda: run.ends())
        lab.run_on("n3", "pkill", "-HUP", "-x", "slurmd")  # which Slurm asks about once a minute

    in_background(disturb)
    return run


def counted(run: SlurmRun) -> list[AttemptEnded]:
    """The attempts that ended and count."""
    ended = events_of(run.dir.ledger.read(), AttemptEnded)
    return [each for each in ended if each.next is not NextAction.STOPPED]


def test_a_start_that_the_controller_has_forgotten_counts_nothing_and_its_number_trains(
    forgotten: SlurmRun, preempted: SlurmRun, unauthenticated: SlurmRun, reference: SlurmRun
):
    forgotten.wait_until_finished()
    forgotten.assert_same_as(reference)
    assert [event.restart for event in forgotten.events(JobStarted)][-1] == 0
    assert [each.next for each in counted(forgotten)] == [NextAction.FINISHED]
    assert forgotten.ends() == ["the Slurm controller forgot its start", "finished"]
    assert_status(forgotten, "done")


def test_three_preemptions_while_the_ranks_start_count_nothing(
    preempted: SlurmRun, reference: SlurmRun
):
    preempted.wait_until_finished()
    preempted.assert_same_as(reference)
    assert preempted.ends() == [*["preempted"] * 3, "finished"]
    assert [each.next for each in counted(preempted)] == [NextAction.FINISHED]
    assert len(list(Path(preempted.dir.logs).glob("attempt-*"))) == 4, "none in the grace times"
    assert_status(preempted, "done", last_failure="preempted")


def test_a_rank_that_dies_while_munge_is_away_costs_no_attempt_of_the_next_start(
    unauthenticated: SlurmRun, reference: SlurmRun
):
    unauthenticated.wait_until_finished()
    unauthenticated.assert_same_as(reference)
    assert unauthenticated.begun_at() == [0, INTERVAL]
    assert [each.next for each in counted(unauthenticated)] == [NextAction.FINISHED]
    assert len(unauthenticated.ends()) == 2
    assert_status(unauthenticated, "done")


def test_a_prolog_that_fails_is_named_with_its_host(others: Runs, forgotten: SlurmRun):
    forgotten.wait_until_finished()  # on the same hosts
    (others.lab.path / "no-prolog-on-n6").touch()
    run = others.submit("held", options={"nodelist": "n5,n6"})
    run.until(lambda: run.state() == "PENDING" and run.ends())
    reason = (
        "the prolog failed on node n6; held after a failed start (launch failed requeued held); "
        f"'scontrol release {run.job}' lets it start"
    )
    assert_status(run, "requeued", reason=reason)
    resumed = others.lab.run(sys.executable, "-m", "launcher", "resume", str(run.dir.path))
    assert resumed.stderr == f"error: nothing to resume: {run.dir.path} is requeued: {reason}\n"
    others.lab.run("scancel", run.job)
