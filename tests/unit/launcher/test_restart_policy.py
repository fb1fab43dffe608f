from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.restart_policy import (
    RestartPolicy,
    decide,
    delay_after,
    refusal_of_futile_starts,
    unresponsive_rank,
)
from launcher.slurm.job_exit import JobEnding, JobExit
from launcher.supervisor import StopSignals
from pretrain.rundir.events import (
    AttemptReason,
    Event,
    JobEnded,
    JobEndReason,
    JobStarted,
    NextAction,
    Outcome,
    TrainingBegan,
    TrainingEnded,
)
from pretrain.rundir.exit_status import EXIT_OUT_OF_MEMORY, EXIT_STOPPED, NEVER_STARTED
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkpoints import publish_step
from tests.helpers.jobs import THIS_JOB

POLICY = RestartPolicy(attempts_without_progress=3, first_delay=1.0, longest_delay=5.0)


@pytest.mark.parametrize(
    ("statuses", "before", "more", "reason", "action", "count"),
    [
        ((0, 0), 0, {}, "finished", "finished", 1),
        ((0, 0), 0, {"stop_requested": True}, "finished", "finished", 1),
        ((0, 0), 0, {"is_complete": False}, "unsaved", "retry", 1),
        ((EXIT_STOPPED, EXIT_STOPPED), 0, {}, "stop_requested", "stopped", 1),
        ((EXIT_STOPPED, 0), 0, {}, "stop_requested", "stopped", 1),
        ((-15, -15), 0, {"stop_requested": True}, "stop_requested", "stopped", 1),
        ((-15, -15), 0, {}, "rank_failed", "retry", 1),
        ((2, -9), 0, {}, "user_error", "refused", 1),
        ((1, -9), 1, {}, "rank_failed", "retry", 2),
        ((-9, -9), 2, {}, "rank_failed", "give_up", 3),
        ((-14, -9), 2, {}, "hang", "give_up", 3),  # a watchdog's SIGALRM
        ((-9, -9), 2, {"made_progress": True}, "rank_failed", "retry", 0),
        ((EXIT_OUT_OF_MEMORY, -9), 2, {}, "out_of_memory", "retry", 2),  # the next needs less
        ((EXIT_STOPPED, 1), 0, {}, "rank_failed", "retry", 1),
    ],
)
def test_what_follows_from_how_the_ranks_ended(statuses, before, more, reason, action, count):
    found = decide(statuses, more.pop("made_progress", False), before, POLICY, **more)
    assert found == (AttemptReason(reason), NextAction(action), count)


@pytest.mark.parametrize(
    ("statuses", "policy", "delays"),
    [
        ((-9,), POLICY, [2.0, 4.0, 5.0, 5.0]),
        # Slurm has longer to recover where it started no rank.
        ((NEVER_STARTED, NEVER_STARTED), RestartPolicy(), [10.0, 20.0]),
        ((NEVER_STARTED, 1), RestartPolicy(), [2.0]),
    ],
)
def test_the_delay_doubles_up_to_its_limit(statuses, policy, delays):
    counts = range(1, len(delays) + 1)
    assert [delay_after(statuses, count, policy) for count in counts] == delays
    assert delay_after((EXIT_OUT_OF_MEMORY, -9), 2, policy) == 0.0


def cut(number: int, trained: float, starting: float = 50.0, steps: int = 1) -> list[Event]:
    """The events of a start of job 7 that its time limit ended; the `number`-th."""
    begin, step = 1000.0 * number, 10 * number
    began = TrainingBegan(time=begin + starting, step=step, world_size=2)
    end = begin + starting + trained
    return [
        JobStarted(time=begin, job="7", restart=number, nodes=("n1",), step=step),
        began,
        TrainingEnded(outcome=Outcome.STOPPED, time=end, step=step + steps),
        JobEnded(
            time=end + 1,
            job="7",
            restart=number,
            reason=JobEndReason.TIME_LIMIT_NEAR,
            requeued=True,
            step=step + steps,
        ),
    ]


def test_starts_that_lose_more_than_they_gain_end_the_run_and_name_the_limit_to_raise():
    futile = [event for number in range(3) for event in cut(number, trained=10.0)]
    refusal = refusal_of_futile_starts(futile, "7", 3, "00:02:00")
    assert refusal == (
        "3 starts in a row took 50 s to start and trained for 10 s before the time limit of "
        "00:02:00; raise time_limit in the cluster file, then 'launcher submit'"
    )


@pytest.mark.parametrize(
    "ledger",
    [
        cut(1, 10.0) + cut(2, 10.0),  # too few
        cut(0, 10.0) + cut(1, 60.0) + cut(2, 10.0),  # one gained more
        [  # one was preempted
            *cut(0, 10.0),
            *cut(1, 10.0)[:-1],
            replace(cut(1, 10.0)[-1], reason=JobEndReason.PREEMPTED),
            *cut(2, 10.0),
        ],
        [replace(event, job="8") if hasattr(event, "job") else event for event in cut(0, 1.0) * 3],
    ],
)
def test_starts_that_gain_or_were_not_ended_by_a_time_limit_are_made_again(ledger):
    assert refusal_of_futile_starts(ledger, "7", 3, "00:02:00") == ""


def test_training_that_no_checkpoint_holds_and_a_start_that_never_trained_gain_nothing():
    unsaved = cut(0, trained=500.0, steps=0)
    never = [cut(1, trained=0.0)[0], cut(1, trained=0.0)[-1]]
    assert refusal_of_futile_starts([*unsaved, *never], "7", 2, "00:02:00")


def test_a_job_whose_starts_are_futile_is_not_requeued_and_the_ledger_says_why(
    tmp_path, monkeypatch
):
    run_dir, now = RunDir(tmp_path), [0.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    for event in (*cut(0, 10.0), *cut(1, 10.0), *cut(2, 10.0)[:-1]):
        now[0] = event.time
        run_dir.ledger.append(event)
    publish_step(run_dir.checkpoints, 21)
    job_exit = JobExit(replace(THIS_JOB, restart=2), run_dir.path, StopSignals(), most_futile=3)
    # To requeue the job would fail: there is no Slurm here.
    job_exit._end(JobEnding(JobEndReason.TIME_LIMIT_NEAR, requeue=True))
    ended = run_dir.ledger.read()[-1]
    assert isinstance(ended, JobEnded)
    assert (ended.reason, ended.requeued) == (JobEndReason.ERROR, False)
    assert ended.message.startswith("3 starts in a row took 50 s to start and trained for 10 s")


def test_only_the_one_rank_that_had_to_be_killed_made_an_attempt_hang():
    for statuses, rank in (((1, -9, 1), 1), ((1, 1), None), ((-9, -9), None)):
        assert unresponsive_rank(statuses) == rank
