"""A run with a spare host on a real Slurm; it has to end as the undisturbed one did.

Named to come after test_survival.py, which looks at the undisturbed run while it runs.
"""

from __future__ import annotations

from pretrain.rundir.launch_events import JobStarted, NextAction
from tests.slurm.lab import SlurmLab
from tests.slurm.runs import INTERVAL, Runs, SlurmRun, assert_status


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
    lab.heal("n1")
    run.wait_until_finished()
    lab.wait_until_idle("n1")
    run.assert_same_as(reference)
    assert run.begun_at() == [0, INTERVAL, 2 * INTERVAL]
    assert run.attempts() == [NextAction.RETRY, NextAction.FINISHED]
    assert run.ends() == ["its first node was lost", "finished"]
