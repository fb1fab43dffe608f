"""What a job does when its site, its nodes or its own supervisor fails: only evidence about the run
counts against the run, and every end is recorded."""

import errno

import pytest

from foundation.errors import EXIT_NODE_UNUSABLE
from launcher.run_state import read_state
from pretrain.rundir.events import (
    AttemptEnded,
    JobEnded,
    JobEndReason,
    JobStarted,
    NextAction,
    NodesUnready,
    TrainingBegan,
)
from pretrain.rundir.exit_statuses import EXIT_SITE_FAILED, EXIT_STOPPED, NEVER_STARTED
from pretrain.rundir.history import find_events
from tests.helpers.batch_jobs import BEGAN, PATIENCE, BatchJob
from tests.helpers.checkpoints import publish_step

BEGUN = TrainingBegan(step=0, world_size=2)
BLIND = {"n2": "does not see the run directory"}
UNSTARTED, SITE = (-15, NEVER_STARTED), (EXIT_SITE_FAILED, -9)
STOPPED = (EXIT_STOPPED, EXIT_STOPPED)


@pytest.fixture
def batch(tmp_path, monkeypatch) -> BatchJob:
    return BatchJob(tmp_path, monkeypatch)


def last_end(batch: BatchJob) -> JobEnded:
    end = batch.run_dir.ledger.read()[-1]
    assert isinstance(end, JobEnded)
    return end


@pytest.mark.parametrize("statuses", [UNSTARTED, (NEVER_STARTED, NEVER_STARTED), SITE])
def test_what_is_not_the_runs_fault_is_waited_for_and_never_counted(batch, statuses):
    assert batch.run(statuses=[statuses] * 6 + [STOPPED]) == EXIT_STOPPED
    *failed, stopped = find_events(batch.run_dir.ledger.read(), AttemptEnded)
    assert [(each.next, each.without_progress) for each in failed] == [(NextAction.RETRY, 0)] * 6
    assert stopped.next is NextAction.STOPPED
    assert 150 < batch.clock.time < PATIENCE, "with growing pauses"


@pytest.mark.parametrize(
    ("statuses", "excluded", "words"),
    [
        (UNSTARTED, ["n2"], "rank 1 never started, for 1"),
        (SITE, [], "storage or host memory failed, for 1"),
    ],
)
def test_after_the_patience_the_job_starts_again_without_the_node(batch, statuses, excluded, words):
    batch.write(BEGUN)
    assert batch.run(statuses=[statuses]) == EXIT_STOPPED
    assert PATIENCE < batch.clock.time < 2 * PATIENCE
    end = last_end(batch)
    assert end.requeued
    assert end.cause.startswith(words)
    assert [end.node] == (excluded or [None])
    assert ("scontrol update JobId=7" in batch.commands) is bool(excluded)
    assert read_state(batch.run_dir.path).state == "requeued"


@pytest.mark.parametrize(
    ("statuses", "requeued"),
    [
        (SITE, [True, True, False]),
        (UNSTARTED, [True, True, True, False]),  # one of two nodes is left, then there are no more
    ],
)
def test_starts_that_the_site_keeps_from_training_end_the_run_with_the_last_evidence(
    batch, statuses, requeued
):
    batch.write(BEGUN)
    for restart, is_requeued in enumerate(requeued):
        batch.restart = restart
        batch.fields = {"Partition": "main"} if restart == 0 else {"ReqNodeList": "n[1-2]"}
        assert batch.run(statuses=[statuses]) == (EXIT_STOPPED if is_requeued else 2)
        assert last_end(batch).requeued is is_requeued
    reason = read_state(batch.run_dir.path).reason
    assert reason.startswith("storage or host" if statuses is SITE else "rank 1 never started")
    assert reason.endswith("; 3 times in a row without progress")


def test_a_new_checkpoint_and_left_nodes_start_the_count_of_the_sites_failures_again(batch):
    for restart in range(6):
        batch.restart, batch.fields = restart, {"ReqNodeList": "n[1-2]"}
        publish_step(batch.run_dir.checkpoints, restart // 2 + 1)
        batch.run(statuses=[SITE])
        assert last_end(batch).requeued


REQUEUE, UPDATE = "scontrol requeue", "scontrol update"
AGAIN = {"JobState": "RUNNING", "Restarts": "1"}


@pytest.mark.parametrize(
    ("lost", "commands"),
    [
        ([(REQUEUE, True, {})], [REQUEUE, UPDATE]),
        ([(REQUEUE, False, {})], [REQUEUE, UPDATE]),
        ([(UPDATE, False, {})], [REQUEUE, UPDATE]),
        ([(REQUEUE, True, {}), ("scontrol show", False, {}), (UPDATE, True, {})],
         [REQUEUE, UPDATE]),
        ([(REQUEUE, True, AGAIN)], [REQUEUE]),  # its next start has begun
        ([(UPDATE, False, AGAIN)], [REQUEUE]),
    ],
)  # fmt: skip
def test_a_requeue_without_an_answer_is_made_once(batch, lost, commands):
    batch.write(BEGUN)
    batch.lost = lost
    problems = {"n2": "does not start the ranks' program"}
    assert batch.run(probe=lambda _: problems) == EXIT_STOPPED
    done = [command.rpartition(" ")[0] for command in batch.commands]
    assert [command for command in done if command == REQUEUE] == [REQUEUE]
    assert list(dict.fromkeys(c for c in done if c in (REQUEUE, UPDATE))) == commands
    assert (batch.new_events()[-1:], last_end(batch).requeued) == (["not_started"], True)


CANCELED = {"JobState": "COMPLETING"}


@pytest.mark.parametrize("moment", ["before its requeue", "before a requeue that was recorded"])
def test_a_job_that_its_user_cancels_is_never_requeued(batch, moment):
    if moment == "before its requeue":  # while Slurm does not respond
        batch.lost = [(REQUEUE, False, CANCELED)]
    else:
        began = JobStarted(job="7", restart=0, nodes=("n1", "n2"), step=0)
        end = JobEnded(job="7", restart=0, reason=JobEndReason.STOP_REQUESTED, requeued=True)
        batch.write(began, end)
        batch.fields = CANCELED
    assert batch.run(statuses=[STOPPED]) == EXIT_STOPPED
    assert "scontrol requeue 7" not in batch.commands
    assert (last_end(batch).reason, last_end(batch).requeued) == (JobEndReason.CANCELED, False)
    assert read_state(batch.run_dir.path).state == "canceled"


def test_ranks_that_somebody_stopped_are_no_evidence_against_the_run(batch):
    """Such as by SIGTERM to their srun, which kills them at once."""
    for restart in range(4):
        batch.restart, batch.fields = restart, {}
        assert batch.run(statuses=[(-9, -9)], was_stopped=True) == EXIT_STOPPED
    assert batch.new_events() == ["JobStarted", "AttemptEnded", "stop_requested"] * 4
    assert all(
        not each.without_progress for each in find_events(batch.run_dir.ledger.read(), AttemptEnded)
    )


@pytest.mark.parametrize("has_trained", [False, True])
def test_a_run_that_finds_only_unusable_nodes_is_refused_unless_it_has_trained(batch, has_trained):
    """Such as a driver that is too old everywhere, on nodes that the user named."""
    batch.fields = {"ReqNodeList": "n[1-2]"}
    if has_trained:
        batch.write(BEGUN)
    assert batch.run(statuses=[(EXIT_NODE_UNUSABLE, -9)]) == (EXIT_STOPPED if has_trained else 2)
    attempts = find_events(batch.run_dir.ledger.read(), AttemptEnded)
    assert (len(attempts) == 3) is (not has_trained)
    assert (batch.clock.time < 60) is (not has_trained)


def test_nodes_are_probed_before_each_attempt_and_one_that_comes_back_is_used(batch):
    def probe(now: float) -> dict[str, str]:
        return BLIND if now < 90 else {}

    assert batch.run(statuses=[STOPPED], probe=probe) == EXIT_STOPPED
    assert batch.nodes_of_steps == [("n1", "n2")]
    assert batch.new_events() == ["JobStarted", "NodesUnready", "AttemptEnded", "stop_requested"]
    assert find_events(batch.run_dir.ledger.read(), NodesUnready)[0].problems == BLIND


@pytest.mark.parametrize(
    ("fields", "problems", "before", "seconds", "end"),
    [
        ({}, BLIND, [BEGUN], PATIENCE, ("not_started", True, "n2")),
        ({}, BLIND, [], 300, ("not_started", True, "n2")),
        ({"ReqNodeList": "n[1-2]"}, BLIND, [BEGUN], PATIENCE, ("not_started", True, None)),
        ({"ReqNodeList": "n[1-2]"}, BLIND, [], 300, ("error", False, None)),
        ({}, {"n2": "does not start the ranks' program"}, [], 0, ("not_started", True, "n2")),
        ({}, dict.fromkeys(("n1", "n2"), "does not start the ranks' program"), [], 0,
         ("error", False, None)),
        ({}, dict.fromkeys(("n1", "n2"), "does not start the ranks' program"), [BEGUN], PATIENCE,
         ("not_started", True, "n1,n2")),
        ({"NodeList": "n1"}, {}, [BEGUN], 0, ("not_started", True, None)),
    ],
)  # fmt: skip
def test_nodes_that_stay_unready_are_left_and_named(batch, fields, problems, before, seconds, end):
    batch.write(*before)
    batch.fields = fields
    batch.run(statuses=[STOPPED], probe=lambda _: problems)
    assert seconds <= batch.clock.time <= seconds + 120
    ended = last_end(batch)
    assert (ended.reason.value, ended.requeued, ended.node) == end
    assert "n2" in ended.cause
    assert not batch.nodes_of_steps


def test_a_start_whose_nodes_are_gone_waits_for_none_of_them(batch):
    def probe(_: float) -> dict[str, str]:
        batch.fields = {"JobState": "PENDING"}  # the controller has forgotten the start
        return BLIND

    batch.clock.sleep(1.0)
    assert batch.run(probe=probe) == EXIT_STOPPED
    assert batch.new_events() == ["JobStarted", "forgotten"]


def test_a_job_in_which_slurm_starts_no_step_is_requeued_three_times_at_most(batch):
    batch.write(BEGUN)
    requeued = []
    for restart in range(3):
        batch.restart, batch.fields = restart, {}
        batch.run(statuses=[UNSTARTED], needs_new_start=True)
        requeued.append(last_end(batch).requeued)
        assert len(batch.nodes_of_steps) == restart + 1, "it is left at once"
    assert requeued == [True, True, False]
    assert "starts no more steps in it; 3 times in a row" in read_state(batch.run_dir.path).reason


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"JobState": "COMPLETING"}, "canceled"),
        ({"JobState": "PENDING"}, "forgotten"),
        ({"JobState": "COMPLETING", "PreemptTime": BEGAN, "Requeue": "0"}, "preempted"),
    ],
)
def test_an_error_of_the_supervisor_requeues_no_job_that_has_ended(batch, fields, end):
    def probe(_: float) -> dict[str, str]:
        batch.fields = fields
        raise KeyError("lost")

    assert batch.run(probe=probe) == EXIT_STOPPED
    assert batch.new_events() == ["JobStarted", end]
    assert "scontrol requeue 7" not in batch.commands


ERRORS = [
    KeyError("lost"),
    OSError(errno.EIO, "lost"),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "lost"),
]


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_of_the_supervisor_is_recorded_and_requeues_three_times_at_most(batch, error):
    def probe(_: float) -> dict[str, str]:
        raise error

    ends = []
    for restart in range(3):
        batch.restart, batch.fields = restart, {}
        status = batch.run(statuses=[STOPPED], probe=probe)
        ends.append((status, last_end(batch).requeued))
    assert ends == [(EXIT_STOPPED, True), (EXIT_STOPPED, True), (2, False)]
    assert "lost" in last_end(batch).cause
    assert "3 times in a row" in read_state(batch.run_dir.path).reason


def test_logs_that_somebody_tidied_are_made_again_before_a_requeue(batch):
    batch.run_dir.logs.rmdir()
    assert batch.run(statuses=[STOPPED]) == EXIT_STOPPED
    assert batch.run_dir.logs.is_dir()


def test_many_nodes_that_are_not_ready_fit_a_line():
    problems = {f"n{number}": "does not respond" for number in range(64)}
    event = NodesUnready(job="7", problems=problems)
    assert event.description == "waiting: 64 nodes, such as n0 does not respond"
