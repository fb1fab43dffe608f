from __future__ import annotations

import pytest

from launcher.restart_policy import (
    AttemptResult,
    RestartPolicy,
    attempts_without_progress,
    decide,
    unresponsive_rank,
)
from pretrain.rundir.exit_status import EXIT_STOPPED
from pretrain.rundir.launch_events import AttemptReason, NextAction

POLICY = RestartPolicy(attempts_without_progress=3, first_delay=1.0, longest_delay=5.0)


def attempt(
    *statuses: int, before: int = 0, after: int = 0, first: int | None = None, hung: bool = False
) -> AttemptResult:
    return AttemptResult(
        statuses=statuses, step_before=before, step_after=after, first_failure=first, hung=hung
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


def test_only_the_one_rank_that_had_to_be_killed_made_an_attempt_hang():
    assert decide([attempt(-9, -9, hung=True)], POLICY).reason is AttemptReason.HANG
    assert [unresponsive_rank(statuses) for statuses in ((1, -9, 1), (1, 1), (-9, -9))] == [
        1,
        None,
        None,
    ]
