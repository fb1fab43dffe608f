from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.restart_policy import (
    AttemptResult,
    RestartPolicy,
    attempts_without_progress,
    decide,
    refusal_of_futile_starts,
    unresponsive_rank,
)
from launcher.slurm.job_exit import JobEnding, JobExit, ThisJob
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
from pretrain.rundir.exit_status import EXIT_STOPPED, NEVER_STARTED
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkpoints import publish_step

POLICY = RestartPolicy(attempts_without_progress=3, first_delay=1.0, longest_delay=5.0)


def attempt(
    *statuses: int, before: int = 0, after: int = 0, first: int | None = None
) -> AttemptResult:
    return AttemptResult(
        statuses=statuses, step_before=before, step_after=after, first_failure=first
    )


@pytest.mark.parametrize(
    ("statuses", "stop_requested", "action"),
    [
        ((0, 0), False, NextAction.FINISHED),
        ((0, 0), True, NextAction.FINISHED),
        ((EXIT_STOPPED, EXIT_STOPPED), False, NextAction.STOPPED),
        ((EXIT_STOPPED, 0), False, NextAction.STOPPED),
        ((-15, -15), True, NextAction.STOPPED),
        ((-15, -15), False, NextAction.RETRY),
        ((2, 2), False, NextAction.REFUSED),
        ((2, -9), False, NextAction.REFUSED),
        ((1, -9), False, NextAction.RETRY),
        ((-9, -9), False, NextAction.RETRY),
        ((EXIT_STOPPED, 1), False, NextAction.RETRY),
    ],
)
def test_what_follows_from_how_the_ranks_ended(statuses, stop_requested, action):
    assert decide([attempt(*statuses)], POLICY, stop_requested).action is action


def test_it_gives_up_after_attempts_in_a_row_without_a_newer_checkpoint():
    crash = attempt(-9, 1, before=40, after=40, first=1)
    history = [attempt(-9, -9, before=0, after=40), crash, crash]
    assert decide(history, POLICY).action is NextAction.RETRY
    decision = decide([*history, crash], POLICY)
    assert decision.action is NextAction.GIVE_UP
    assert decision.reason is AttemptReason.RANK_FAILED


def test_progress_forgives_all_attempts_before_it():
    crash = attempt(-9, before=40, after=40)
    history = [crash, crash, attempt(-9, before=40, after=50)]
    assert attempts_without_progress(history) == 0
    assert decide(history, POLICY).delay == POLICY.first_delay


def test_the_delay_doubles_up_to_its_limit():
    patient = RestartPolicy(attempts_without_progress=100, first_delay=1.0, longest_delay=5.0)
    crash = attempt(-9)
    assert [decide([crash] * count, patient).delay for count in (1, 2, 3, 4)] == [
        2.0,
        4.0,
        5.0,
        5.0,
    ]


def test_slurm_has_longer_to_recover_where_it_started_no_rank():
    policy, refused = RestartPolicy(), attempt(NEVER_STARTED, NEVER_STARTED)
    assert [decide([refused] * count, policy).delay for count in (1, 2)] == [10.0, 20.0]
    assert decide([attempt(NEVER_STARTED, 1)], policy).delay == 2.0


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
    job = ThisJob(id="7", number=7, restart=2, nodes=("n1",))
    job_exit = JobExit(job, run_dir.path, StopSignals(), most_futile=3)
    # To requeue the job would fail: there is no Slurm here.
    job_exit._end(JobEnding(JobEndReason.TIME_LIMIT_NEAR, requeue=True))
    ended = run_dir.ledger.read()[-1]
    assert isinstance(ended, JobEnded)
    assert (ended.reason, ended.requeued) == (JobEndReason.ERROR, False)
    assert ended.message.startswith("3 starts in a row took 50 s to start and trained for 10 s")


def test_only_the_one_rank_that_had_to_be_killed_made_an_attempt_hang():
    assert decide([attempt(-14, -9)], POLICY).reason is AttemptReason.HANG, "a watchdog's SIGALRM"
    assert [unresponsive_rank(statuses) for statuses in ((1, -9, 1), (1, 1), (-9, -9))] == [
        1,
        None,
        None,
    ]
