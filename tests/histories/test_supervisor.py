"""Random histories of supervised runs, the same ones every time, and those that failed once."""

from typing import Any

import pytest

from tests.histories.runner import replay, run_histories
from tests.histories.supervisor_machine import SupervisorHistory

BATCHES, HISTORIES, RULES = 10, 100, 10

FAILED_ONCE: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "a job that was renamed was called unknown while it trained": [
        ("update", {"after": 25.0, "how": "name"}),
        ("look", {"after": 70.0}),
        ("resume", {"after": 70.0}),
    ],
    "a comment that is not UTF-8 ended the supervisor with the next failed rank": [
        ("update", {"after": 25.0, "how": "comment"}),
        ("plan_attempts", {"kinds": ["crash"]}),
    ],
    "a banner on stdout ended status and resume with tracebacks": [
        ("change_mood", {"after": 25.0, "seconds": 200.0, "mood": "banner"}),
        ("look", {"after": 70.0}),
        ("resume", {"after": 70.0}),
    ],
    "logs that somebody removed ended the run at its next stop": [
        ("remove_logs", {"after": 70.0}),
        ("send_signal", {"after": 140.0, "number": 10, "to_ranks": False}),
    ],
    "storage that failed three times was evidence against the run": [
        ("plan_attempts", {"kinds": ["storage"] * 4})
    ],
    "ranks that never started three times were a run without progress": [
        ("plan_attempts", {"kinds": ["unstarted", "unlaunched", "unstarted", "unlaunched"]})
    ],
    "a job that launches no more steps burnt its attempts": [
        ("plan_attempts", {"kinds": ["step limit"] * 2})
    ],
    "a job that gave up in place of a requeue exited as if it had been requeued": [
        ("plan_attempts", {"kinds": ["step limit"] * 4})
    ],
    "a supervisor that was killed while storage was away failed at its next start": [
        ("kill_supervisor", {"after": 2.0}),
        ("take_storage_away", {"after": 0.0, "seconds": 3.0}),
    ],
    "a job that its limit, cut below its age, ended while it waited for storage": [
        ("take_storage_away", {"after": 2.0, "seconds": 900.0}),
        ("change_limit", {"after": 1000.0, "minutes": 1}),
    ],
    "ranks whose srun somebody ended three times were a run without progress": [
        ("end_srun", {"after": after}) for after in (25.0, 50.0, 75.0)
    ],
    "nodes were waited for after Slurm had taken the start": [
        ("break_node", {"after": 0.0, "seconds": 900.0, "node": 1, "how_far": 0}),
        ("requeue", {"after": 70.0, "held": False}),
    ],
    "a job that starts again after all steps were made hid that they were": [
        ("break_node", {"after": 400.0, "how_far": 2, "node": 1, "seconds": 900.0}),
        ("kill_supervisor", {"after": 400.0}),
        ("lose_node", {"after": 0.0, "node": 0, "seconds": 40.0}),
        ("stop_slowly", {"seconds": 100.0}),
        ("change_limit", {"after": 140.0, "minutes": 10}),
    ],
    "a run whose last steps were made after it was preempted was called failed": [
        ("preempt", {"after": 400.0, "grace": 60.0}),
        ("lose_node", {"after": 0.0, "node": 1, "seconds": 40.0}),
        ("stop_slowly", {"seconds": 100.0}),
        ("change_mood", {"after": 140.0, "seconds": 900.0, "mood": "banner"}),
    ],
    "a supervisor took a run whose storage was away for one without ranks that still trained": [
        ("kill_supervisor", {"after": 2.0}),
        ("stop_slowly", {"seconds": 20.0}),
        ("take_storage_away", {"after": 2.0, "seconds": 3.0}),
    ],
    "steps that were saved before storage went away were no progress": [
        ("plan_attempts", {"kinds": ["killed"] * 4}),
        *(("take_storage_away", {"after": a, "seconds": 30.0}) for a in (85.0, 210.0, 330.0)),
    ],
    "a second job was to train on nodes that the first one had found broken": [
        *(
            ("break_node", {"after": 0.0, "how_far": 2, "node": node, "seconds": 200.0})
            for node in (0, 1)
        ),
        ("resume", {"after": 2.0}),
    ],
    "a supervisor that failed in a job that may not be requeued was to give up": [
        ("update", {"after": 25.0, "how": "Requeue=0"}),
        ("plan_attempts", {"kinds": ["killed"]}),
        ("take_storage_away", {"after": 70.0, "seconds": 900.0}),
        ("change_mood", {"after": 400.0, "mood": "lost", "seconds": 900.0}),
    ],
    "a start that was forgotten while it asked for its requeue ended the job": [
        ("change_mood", {"after": 0.0, "mood": "slow", "seconds": 900.0}),
        ("preempt", {"after": 0.0, "grace": 60.0}),
        ("forget_start", {"after": 25.0, "seconds": 900.0}),
    ],
    "ranks whose srun somebody ended were crashes once their logs were removed": [
        ("end_srun", {"after": 25.0}),
        ("remove_logs", {"after": 25.0}),
        ("end_srun", {"after": 70.0}),
        ("end_srun", {"after": 2.0}),
        ("remove_logs", {"after": 2.0}),
        ("remove_logs", {"after": 70.0}),
    ],
    "a person's command was to die with the supervisor that was killed meanwhile": [
        ("cancel", {"after": 140.0}),
        ("resume", {"after": 140.0}),
        ("kill_supervisor", {"after": 140.0}),
    ],
    "status was to know of a job whose submission was not over": [
        ("forget_start", {"after": 0.0, "seconds": 900.0}),
        ("wait", {"minutes": 10}),
        ("look", {"after": 140.0}),
        ("cancel", {"after": 25.0}),
        ("change_mood", {"after": 25.0, "mood": "slow", "seconds": 200.0}),
        ("resume", {"after": 70.0}),
    ],
    "a run that was done when its killed supervisor started again got no end": [
        ("change_mood", {"after": 400.0, "mood": "late", "seconds": 3.0}),
        ("remove_logs", {"after": 140.0}),
        ("kill_supervisor", {"after": 400.0}),
        ("lose_node", {"after": 0.0, "node": 0, "seconds": 900.0}),
        ("kill_supervisor", {"after": 1000.0}),
        ("change_mood", {"after": 400.0, "mood": "down", "seconds": 900.0}),
    ],
    "an end that storage did not take was to differ from a lost first node": [
        ("kill_supervisor", {"after": 70.0}),
        ("kill_supervisor", {"after": 2.0}),
        ("requeue", {"after": 1000.0, "held": True}),
        ("take_storage_away", {"after": 25.0, "seconds": 900.0}),
        ("take_storage_away", {"after": 1000.0, "seconds": 200.0}),
    ],
    "four answers of 10 s were to fit into KillWait after a limit without warning": [
        ("change_limit", {"after": 1000.0, "minutes": 1}),
        ("plan_attempts", {"kinds": ["unlaunched", "hang", "hang", "storage"]}),
        ("send_signal", {"after": 25.0, "number": 15, "to_ranks": False}),
        ("change_mood", {"after": 140.0, "mood": "slow", "seconds": 900.0}),
        ("resume", {"after": 400.0}),
    ],
    "a controller that did not answer was to requeue a job whose storage was away": [
        ("take_storage_away", {"after": 140.0, "seconds": 40.0}),
        ("change_limit", {"after": 140.0, "minutes": 1}),
        ("change_mood", {"after": 70.0, "mood": "lost", "seconds": 900.0}),
        ("take_storage_away", {"after": 25.0, "seconds": 40.0}),
    ],
    "a job that found its run done made status call the run failed": [
        ("forget_start", {"after": 0.0, "seconds": 3.0}),
        ("resume", {"after": 25.0}),
    ],
    "a supervisor that started again did not know that Slurm was ending its job": [
        ("plan_attempts", {"kinds": ["late crash", "late crash", "hang", "unstarted"]}),
        ("break_node", {"after": 400.0, "how_far": 1, "node": 0, "seconds": 200.0}),
        ("forget_start", {"after": 0.0, "seconds": 200.0}),
        ("take_storage_away", {"after": 1000.0, "seconds": 900.0}),
        ("change_limit", {"after": 1000.0, "minutes": 1}),
        ("kill_supervisor", {"after": 1000.0}),
    ],
    "a forgotten start was to record its end in the run of the next job": [
        ("forget_start", {"after": 2.0, "seconds": 3.0}),
        ("preempt", {"after": 25.0, "grace": 60.0}),
        ("end_srun", {"after": 2.0}),
        ("resume", {"after": 2.0}),
        ("cancel", {"after": 2.0}),
    ],
}


@pytest.mark.parametrize("seed", range(BATCHES))
def test_a_run_trains_or_says_why_it_cannot_whatever_happens_at_night(seed: int) -> None:
    run_histories(SupervisorHistory, HISTORIES, seed, RULES)


@pytest.mark.parametrize("name", FAILED_ONCE)
def test_histories_that_failed_once_are_mended(name: str) -> None:
    replay(SupervisorHistory, FAILED_ONCE[name])
