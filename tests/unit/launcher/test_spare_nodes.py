from __future__ import annotations

import os
from dataclasses import replace

import pytest

from foundation.errors import ConfigError
from launcher.slurm.lost_nodes import (
    FirstNodeGuard,
    JobNodes,
    first_nodes,
    is_taken_out,
    num_old_steps,
    replaced_nodes,
    use_up_old_numbers,
)
from pretrain.config.data import DataConfig
from pretrain.config.run import RunConfig
from pretrain.rundir.events import (
    JobEnded,
    JobEndReason,
    JobStarted,
    NodeReplaced,
    ReplacedBecause,
    SupervisorKilled,
)
from pretrain.rundir.lock import StaleAttempt
from tests.helpers.jobs import THIS_JOB, attempt_ended, fake_commands, until

THREE = JobNodes(("n1", "n2"), ("n3",))


@pytest.mark.parametrize(
    ("lost", "left"),
    [
        ("n1", JobNodes(("n3", "n2"))),
        ("n2", JobNodes(("n1", "n3"))),
        ("n3", JobNodes(("n1", "n2"))),
    ],
)
def test_the_first_spare_node_takes_the_place_of_the_lost_one_and_the_others_keep_theirs(
    lost, left
):
    assert THREE.without(lost) == left


def test_without_a_spare_node_there_is_no_choice_left():
    left = THREE.without("n3")
    assert left is not None
    assert left.without("n1") is None
    assert left.without("n3") == left  # it did not train


@pytest.mark.parametrize(
    ("state", "taken_out"),
    [
        ("idle", False), ("mixed", False), ("idle~", False), ("allocated*", False),
        ("down", True), ("down*", True), ("draining", True), ("drained@", True), ("failing", True),
    ],
)  # fmt: skip
def test_nodes_in_these_states_are_replaced(state, taken_out):
    assert is_taken_out(state) is taken_out


def test_a_supervisor_after_one_that_was_killed_leaves_out_the_nodes_replaced_in_this_start():
    def started(restart: int) -> JobStarted:
        return JobStarted(job="7", restart=restart, nodes=("n1", "n2", "n3"), step=0)

    def replaced(node: str, job: str = "7") -> NodeReplaced:
        reason = ReplacedBecause.RANKS_FAILED
        return NodeReplaced(job=job, node=node, spare="n3", reason=reason)

    job = replace(THIS_JOB, restart=1)
    killed = SupervisorKilled(job="7", restart=1, step_before=0, step=0)
    former = [started(0), replaced("n1")]
    assert replaced_nodes([*former, started(1)], job) == []
    ledger = [*former, started(1), replaced("n2"), replaced("n1", job="8"), killed, started(1)]
    assert replaced_nodes(ledger, job) == ["n2"]


def test_a_start_after_a_lost_node_uses_no_number_of_an_old_step():
    def started(restart: int, job: str = "7") -> JobStarted:
        return JobStarted(job=job, restart=restart, nodes=("n1", "n2"), step=0)

    def ended(reason: JobEndReason, restart: int = 0) -> JobEnded:
        return JobEnded(job="7", restart=restart, reason=reason, requeued=True)

    failed = attempt_ended(job="7")
    replaced = NodeReplaced(job="7", node="n2", spare="n3", reason=ReplacedBecause.NODE_FAILED)
    job = replace(THIS_JOB, restart=1)
    lost, limit = ended(JobEndReason.FIRST_NODE_LOST), ended(JobEndReason.TIME_LIMIT)
    assert num_old_steps([started(0)], replace(job, restart=0)) == 0
    assert num_old_steps([started(0), failed, limit, started(1)], job) == 0
    # The steps of one recorded attempt, of one that ended with its node, and of the start itself.
    assert num_old_steps([started(0), failed, lost, started(1)], job) == 18
    assert num_old_steps([started(0), failed, replaced, limit, started(1)], job) == 18
    assert num_old_steps([started(0), lost, started(1), replaced], job) == 12
    assert num_old_steps([started(0), limit, started(1), replaced], job) == 0
    assert num_old_steps([started(0), *[failed] * 50, lost, started(1)], job) == 40
    # The second start has used up 18 numbers itself, before the steps of its attempt.
    again = [started(1), ended(JobEndReason.NODE_FAILED, restart=1), started(2)]
    assert num_old_steps([started(0), failed, lost, *again], replace(job, restart=2)) == 30


SRUN = 'echo "$@" >> "$0.started"; exec sleep 60'


def test_the_guard_of_the_first_node_starts_again_on_another_node_when_it_ends(
    tmp_path, monkeypatch
):
    fake_commands(tmp_path, monkeypatch, srun=SRUN)
    monkeypatch.setattr("launcher.slurm.lost_nodes._RESTART_SECONDS", 0.0)
    started = tmp_path / "srun.started"
    started.touch()
    job = replace(THIS_JOB, nodes=("n1", "n2", "n3"))
    with FirstNodeGuard(job, is_needed=True) as guard:
        for count, node in enumerate(("n3", "n2", "n3"), start=1):
            until(lambda count=count: len(started.read_text().splitlines()) == count)
            assert f"--nodelist={node} " in started.read_text().splitlines()[-1]
            assert guard._srun is not None
            guard._srun.kill()
            guard._srun.wait()
            guard.watch()


def test_empty_steps_are_awaited_while_slurm_is_listened_to_and_end_with_what_that_raises(
    tmp_path, monkeypatch
):
    fake_commands(tmp_path, monkeypatch, srun=SRUN.replace("$@", "$$ $@"))
    started = tmp_path / "srun.started"
    started.touch()

    def stale() -> None:
        if len(started.read_text().splitlines()) == 12:
            raise StaleAttempt("a newer attempt")

    job = replace(THIS_JOB, restart=1)
    lost = JobEnded(job="7", restart=0, reason=JobEndReason.FIRST_NODE_LOST, requeued=True)
    ledger = [JobStarted(job="7", restart=n, nodes=job.nodes, step=0) for n in range(2)]
    with pytest.raises(StaleAttempt):
        use_up_old_numbers([ledger[0], lost, ledger[1]], job, stale)
    options = "--nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist=n1 --overlap --export=ALL"
    for line in started.read_text().splitlines():
        pid, _, rest = line.partition(" ")
        assert rest == f"{options} --chdir=/ --quiet true"
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_nodes_of_which_no_number_divides_the_lanes_are_refused_with_what_does_not():
    config = RunConfig(data=DataConfig(lanes=5, segment_length=64))
    text = "data.lanes=5 does not divide over 6 ranks; use a multiple of 6 lanes"
    with pytest.raises(ConfigError, match=text):
        first_nodes(config, 6, ("n1", "n2"), num_spare=1)
