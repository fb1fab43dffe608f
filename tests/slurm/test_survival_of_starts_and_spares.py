"""Starts that Slurm takes back, of which nothing may count against the run, and lost hosts.

The three runs with such starts are disturbed at the same time, each on hosts of its own in a second
cluster, and a run that loses hosts in a third one. They are begun first and looked at last. All
comes after test_survival.py, which looks at the undisturbed run while it runs.
"""

import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pretrain.rundir.events import (
    AttemptEnded,
    JobEndReason,
    JobStarted,
    NextAction,
    NodeReplaced,
    ReplacedBecause,
)
from pretrain.rundir.exit_statuses import NEVER_STARTED
from pretrain.rundir.history import find_events
from tests.helpers.corpora import make_tiny_corpus
from tests.slurm.lab import SlurmLab
from tests.slurm.runs import INTERVAL, NEAR, Runs, SlurmRun, assert_status, in_background, status

# Ranks import until the file is gone.
SLOW_START = """import os, sys, time
while sys.orig_argv[2:4] == ["pretrain", "train"] and os.path.exists({file!r}):
    time.sleep(0.1)
"""


def wait_for_end_of_batch_script(run: SlurmRun) -> None:
    script = ["pgrep", "-f", rf"slurmstepd: .{run.job}\.batch"]
    run.until(lambda: run.lab.run(*script).returncode)


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
    wait_for_end_of_batch_script(run)
    lab.run("scontrol", "release", run.job)
    return run


@pytest.fixture(scope="module")
def preempted(others: Runs, forgotten: SlurmRun) -> SlurmRun:
    """A run that is preempted three times while its ranks start, with grace time."""
    slow, starting = others.path / "slow", others.path / "starting"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(SLOW_START.format(file=str(starting)))
    starting.touch()
    run = others.submit("preempted", environment={"PYTHONPATH": str(slow)}, **NEAR)

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
    """A run that loses a rank while munge is away on its first host."""
    lab = others.lab
    run = others.submit("unauthenticated", options={"nodelist": "n3,n4"})

    def disturb() -> None:
        run.wait_for_step(INTERVAL + 20)
        with lab.slow_to_give_nodes_up():  # as usual: else Slurm would take the host away
            lab.run_on("n3", "mount", "-t", "tmpfs", "none", str(lab.path / "munge"))
            run.signal_rank(3, signal.SIGKILL)
            time.sleep(30)
            lab.run_on("n3", "umount", str(lab.path / "munge"))
            run.until(lambda: len(run.begun_at()) == 2)

    in_background(disturb)
    return run


@pytest.fixture(scope="module")
def moved() -> Iterator[tuple[SlurmRun, list[dict[str, Any]]]]:
    """A run that loses its second host, then the first one; its status after that of the second."""
    with SlurmLab(num_nodes=3) as lab:
        runs = Runs(lab, make_tiny_corpus(lab.path / "corpus"))
        run, seen = runs.submit("hosts"), list[dict[str, Any]]()

        def disturb() -> None:
            run.wait_for_checkpoint(INTERVAL)
            lab.power_off("n2")
            run.until(lambda: len(run.begun_at()) == 2)
            seen.append(status(run))
            lab.boot("n2")
            run.wait_for_checkpoint(2 * INTERVAL)
            lab.cut("n1")  # where the supervisor and rank 0 are
            run.until(lambda: len(run.begun_at()) == 3)
            lab.heal("n1")

        in_background(disturb)
        yield run, seen


def counted(run: SlurmRun) -> list[AttemptEnded]:
    """The attempts that ended and count."""
    ended = find_events(run.dir.ledger.read(), AttemptEnded)
    return [each for each in ended if each.next is not NextAction.STOPPED]


def lose_a_host_before_the_next_launch(run: SlurmRun, lab: SlurmLab, node: str) -> None:
    attempts, retries = len(run.begun_at()), run.log().count("next attempt in")
    run.signal_rank(0, signal.SIGKILL)
    run.until(lambda: run.log().count("next attempt in") > retries)
    lab.power_off(node)
    run.until(lambda: len(run.begun_at()) > attempts, seconds=200)


def test_a_spare_host_replaces_one_and_the_first_host_lost_requeues(
    runs: Runs, lab: SlurmLab, reference: SlurmRun, moved, preempted, unauthenticated
):
    run = runs.submit("spare", nodes="2+1")
    run.wait_for_checkpoint(INTERVAL)
    assert run.nodes() == ("n1", "n2", "n3")
    lab.power_off("n2")
    run.until(lambda: len(run.begun_at()) == 2)
    replaced = "node n2 failed; spare node n3 used"
    assert_status(run, "running", last_failure=replaced, replaced_nodes=[replaced])
    lab.boot("n2")
    run.wait_for_checkpoint(2 * INTERVAL)
    assert [event.restart for event in run.events(JobStarted)] == [0]
    lab.cut("n1")  # where the supervisor is: Slurm would let such a job hold its other nodes
    run.until(lambda: len(run.begun_at()) == 3)
    assert run.nodes() == ("n2", "n3", "n4")
    with run.paused():  # its last step would be made before Slurm has read its new patience
        lab.heal("n1")
        with lab.slow_to_give_nodes_up():  # as usual: srun knows of a dead node minutes earlier
            lose_a_host_before_the_next_launch(run, lab, "n3")
    run.wait_until_finished()
    lab.boot("n3")
    lab.wait_until_idle("n1")
    run.assert_same_as(reference)
    assert run.begun_at() == [0, INTERVAL, 2 * INTERVAL, 2 * INTERVAL]
    reasons = [ReplacedBecause.NODE_FAILED, ReplacedBecause.NOT_RESPONDING]
    replaced = [(event.node, event.reason) for event in run.events(NodeReplaced)]
    assert replaced == list(zip(("n2", "n3"), reasons, strict=True))
    *failed, last = run.events(AttemptEnded)
    assert {event.next for event in failed} == {NextAction.RETRY}
    assert last.next is NextAction.FINISHED
    unlaunched = [event for event in failed if NEVER_STARTED in event.statuses]
    assert len(unlaunched) <= 1, "none if Slurm noticed before the launch"
    assert [event.first_failure for event in unlaunched] == [2] * len(unlaunched), "on the dead one"
    assert run.ends() == ["its first node or its storage was lost", "finished"]


def test_a_run_goes_on_elsewhere_when_a_host_goes_down_or_is_cut_off(moved, reference):
    run, seen = moved
    run.wait_until_finished()
    run.lab.wait_until_idle("n1")
    run.assert_same_as(reference)
    nodes = [start.nodes for start in run.events(JobStarted)]
    assert nodes == [("n1", "n2"), ("n1", "n3"), ("n2", "n3")]
    (second,) = seen
    known = (second["state"], second["attempts"], second["last_failure"])
    assert known == ("running", 2, "node n2 failed")
    assert_status(run, "done", attempts=3, last_failure="its first node or its storage was lost")
    assert run.begun_at() == [0, INTERVAL, 2 * INTERVAL]
    assert run.ends() == ["node n2 failed", "its first node or its storage was lost", "finished"]


def test_a_start_that_is_forgotten_counts_zero(forgotten, preempted, unauthenticated, reference):
    forgotten.wait_until_finished()
    forgotten.assert_same_as(reference)
    assert [event.restart for event in forgotten.events(JobStarted)][-1] == 0
    assert [each.next for each in counted(forgotten)] == [NextAction.FINISHED]
    assert forgotten.ends() == ["the Slurm controller forgot its start", "finished"]
    assert_status(forgotten, "done")


def test_three_preemptions_of_starting_ranks_count_nothing(preempted, reference):
    preempted.wait_until_finished()
    preempted.assert_same_as(reference)
    assert preempted.ends() == [*["preempted"] * 3, "finished"]
    assert [each.next for each in counted(preempted)] == [NextAction.FINISHED]
    assert len(list(Path(preempted.dir.logs).glob("attempt-*"))) == 4, "none in the grace times"
    assert_status(preempted, "done", last_failure="")


def test_a_rank_that_dies_while_munge_is_away_costs_one_attempt(unauthenticated, reference):
    unauthenticated.wait_until_finished()
    unauthenticated.assert_same_as(reference)
    assert unauthenticated.begun_at() == [0, INTERVAL]
    assert unauthenticated.attempts() == [NextAction.RETRY, NextAction.FINISHED]
    assert unauthenticated.ends() == ["finished"]
    assert_status(unauthenticated, "done", last_failure="rank 3 was killed by SIGKILL")


def test_a_prolog_that_fails_is_named_with_its_host(others: Runs, forgotten: SlurmRun):
    forgotten.wait_until_finished()  # on the same hosts
    (others.lab.path / "no-prolog-on-n6").touch()
    run = others.submit("held", options={"nodelist": "n5,n6"})
    run.until(lambda: run.state() == "PENDING" and run.ends())
    held = status(run)
    assert held["state"] == "requeued"
    assert re.search(f"prolog .* n6; .*'scontrol release {run.job}'", held["reason"])
    resumed = others.lab.run(sys.executable, "-m", "launcher", "resume", str(run.dir.path))
    assert resumed.stderr.endswith(f"{run.dir.path} is requeued: {held['reason']}\n")
    others.lab.run("scancel", run.job)
