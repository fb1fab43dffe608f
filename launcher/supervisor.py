"""Keeps a run going: starts an attempt, watches it, decides what follows, until the run is finished or hopeless.

How ranks are started is the caller's: on this machine, or as steps of a Slurm job.
"""

from __future__ import annotations

import itertools
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType, TracebackType
from typing import Any, Protocol

from launcher.restart_policy import (
    Attempt,
    Decision,
    NextAction,
    Policy,
    attempts_without_progress,
    decide,
    unresponsive_rank,
)
from pretrain.checkpoint.directory import steps_on_disk
from pretrain.processes.local_ranks import EXIT_STOPPED
from pretrain.rundir.run_dir import RunDir

_WATCHDOG = re.compile(r"^Timeout \(\d+:\d\d:\d\d", re.MULTILINE)
EXIT_STATUS = {
    NextAction.FINISHED: 0,
    NextAction.STOPPED: EXIT_STOPPED,
    NextAction.REFUSED: 2,
    NextAction.GIVE_UP: 2,
}


class Ranks(Protocol):
    """The ranks of one attempt, already started."""

    logs: list[Path]  # in rank order
    first_failure: int | None  # the rank that ended badly first, known after `wait`

    def wait(self, *, meanwhile: Callable[[], None]) -> Sequence[int]:
        """Exit statuses in rank order when all have ended; calls `meanwhile` many times a second until then."""
        ...

    def terminate(self) -> None:
        """Ask every rank to stop at its next step boundary."""
        ...

    def kill(self) -> None:
        """End every rank at once."""
        ...

    def describe_failure(self, statuses: Sequence[int]) -> str:
        """Which rank failed first-hand, and the last lines it wrote."""
        ...


class StopSignals:
    """Counts SIGINT and SIGTERM instead of dying of them: the first asks the ranks to stop, a second SIGINT kills.

    SIGUSR1, Slurm's notice ahead of a time limit, asks too. `received` has them all in order.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.received: list[int] = []
        self._previous = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._previous[number] = signal.signal(number, self._count)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        self.requests += 1 if number == signal.SIGINT or not self.requests else 0


def supervise(
    run_dir: RunDir,
    start: Callable[[int], Ranks],
    policy: Policy,
    stop: StopSignals,
    say: Callable[[str], None] = print,
    past: Sequence[Attempt] = (),
    meanwhile: Callable[[], None] = lambda: None,
    tags: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Attempt after attempt until the run is finished, stopped, refused or hopeless; returns the exit status.

    `start(number)` begins attempt `number` and returns its ranks; `past` are attempts before this call that count;
    `meanwhile` is called many times a second while ranks run; `tags` go into every event of the journal.
    """
    attempts = list(past)
    for number in itertools.count(next_attempt_number(run_dir)):
        before = newest_step(run_dir)
        ranks = start(number)
        statuses = tuple(ranks.wait(meanwhile=_stopper(ranks, stop, meanwhile, say)))
        hung = any(map(_shows_a_hang, ranks.logs))
        attempts.append(
            Attempt(
                statuses=statuses,
                step_before=before,
                step_after=newest_step(run_dir),
                first_failure=unresponsive_rank(statuses) if hung else ranks.first_failure,
                hung=hung,
            )
        )
        decision = decide(attempts, policy, stop_requested=stop.requests > 0)
        _record(run_dir, number, attempts[-1], decision, tags)
        if decision.action in (NextAction.RETRY, NextAction.GIVE_UP):
            say(ranks.describe_failure(statuses))
        if decision.action is not NextAction.RETRY:
            say(_last_words(decision, run_dir))
            return EXIT_STATUS[decision.action]
        fruitless = attempts_without_progress(attempts)
        patience = (
            f", attempt {fruitless} of {policy.attempts_without_progress} without progress"
            if fruitless
            else ""
        )
        say(
            f"{decision.reason}{patience}; next attempt in {decision.delay:g} s from the checkpoint of step "
            f"{attempts[-1].step_after}"
        )
        if not _pause(decision.delay, stop):
            say(f"stopped on request; the same command goes on from step {newest_step(run_dir)}")
            return EXIT_STOPPED
    raise AssertionError("attempts are counted without end")


def newest_step(run_dir: RunDir) -> int:
    """The step of the newest published checkpoint; 0 without one."""
    return max(steps_on_disk(run_dir.checkpoints), default=0)


def next_attempt_number(run_dir: RunDir) -> int:
    """One more than the highest attempt that left logs, so that no log is written twice."""
    numbers = [log.name.split("-")[1] for log in run_dir.logs.glob("attempt-*-rank-*.log")]
    return max((int(number) for number in numbers if number.isdigit()), default=-1) + 1


def _stopper(
    ranks: Ranks, stop: StopSignals, meanwhile: Callable[[], None], say: Callable[[str], None]
) -> Callable[[], None]:
    """Passes a request to stop on to the ranks, once; the second one kills them."""
    passed_on = 0

    def look() -> None:
        nonlocal passed_on
        meanwhile()
        if stop.requests == passed_on:
            return
        if passed_on == 0:
            say("asking the ranks to save and stop; Ctrl-C again kills them")
            ranks.terminate()
        else:
            ranks.kill()
        passed_on = stop.requests

    return look


def _pause(seconds: float, stop: StopSignals) -> bool:
    """Wait; False as soon as a stop is asked for."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if stop.requests:
            return False
        time.sleep(0.05)
    return not stop.requests


def _shows_a_hang(log: Path) -> bool:
    """Whether the rank's watchdog ended it: the stacks it wrote are headed by how long it had waited."""
    return log.exists() and _WATCHDOG.search(log.read_text(errors="replace")) is not None


def _record(
    run_dir: RunDir, number: int, attempt: Attempt, decision: Decision, tags: Mapping[str, Any]
) -> None:
    if (
        not run_dir.exists() and not run_dir.ledger.exists()
    ):  # refused before there was a run, and never submitted
        return
    run_dir.append_ledger(
        {
            "event": "attempt_ended",
            "attempt_number": number,
            "statuses": list(attempt.statuses),
            "first_failure": attempt.first_failure,
            "step_before": attempt.step_before,
            "step": attempt.step_after,
            "next": decision.action.value,
            "reason": decision.reason,
            **tags,
        }
    )


def _last_words(decision: Decision, run_dir: RunDir) -> str:
    if decision.action is NextAction.FINISHED:
        return f"finished: {run_dir.path}"
    if decision.action is NextAction.STOPPED:
        return f"stopped on request; the same command goes on from step {newest_step(run_dir)}"
    if decision.action is NextAction.REFUSED:
        return "not tried again: what the line above says has to change first"
    return f"gave up: {decision.reason}; the logs are in {run_dir.logs}"
