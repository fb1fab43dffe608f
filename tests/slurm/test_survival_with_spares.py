"""A run with a spare host on a real Slurm; it has to end as the undisturbed one did.

Named to come after test_survival.py, which looks at the undisturbed run while it runs.
"""

from __future__ import annotations

import signal

from pretrain.rundir.exit_status import NEVER_STARTED
from pretrain.rundir.launch_events import (
    AttemptEnded,
    JobStarted,
    NextAction,
    NodeReplaced,
    ReplacedBecause,
)
from tests.slurm.lab import SlurmLab
from tests.slurm.runs import INTERVAL, Runs, SlurmRun, assert_status


def lose_a_host_before_the_next_launch(run: SlurmRun, lab: SlurmLab, node: str) -> None:
    attempts, retries = len(run.begun_at()), run.log().count("next attempt in")
    run.signal_rank(0, signal.SIGKILL)
    run.until(lambda: run.log().count("next attempt in") > retries)
    lab.power_off(node)
    run.until(lambda: len(run.begun_at()) > attempts, seconds=200)


def test_a_spare_host_replaces_one_in_the_same_job_and_the_first_host_lost_requeues_it(
    runs: Runs, lab: SlurmLab, reference: SlurmRun
):
    run = runs.submit("spare", nodes="2+1")
    run.wait_for_step(INTERVAL + 20)
    assert run.nodes() == ("n1", "n2", "n3")
    lab.power_off("n2")
    run.until(lambda: len(run.begun_at()) == 2)
    replaced = "node n2 failed; spare node n3 used"
    assert_status(run, "running", last_failure=replaced, replaced_nodes=[replaced])
    lab.boot("n2")
    run.wait_for_step(2 * INTERVAL + 20)
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
    assert [(event.node, event.reason) for event in run.events(NodeReplaced)] == [
        *zip(("n2", "n3"), reasons, strict=True)
    ]
    *failed, last = run.events(AttemptEnded)
    assert {event.next for event in failed} == {NextAction.RETRY}
    assert last.next is NextAction.FINISHED
    unlaunched = [event for event in failed if NEVER_STARTED in event.statuses]
    assert len(unlaunched) <= 1, "none if Slurm noticed before the launch"
    assert [event.first_failure for event in unlaunched] == [2] * len(unlaunched), "on the dead one"
    assert run.ends() == ["its first node was lost", "finished"]
