"""Random histories of a machine: how they are told, repeated, shrunk and run for an hour.

A machine is a class of rules (hypothesis' `RuleBasedStateMachine`). What it finds is a history: the
calls of its rules in order, which `replay` repeats and `shrunk` cuts to those that it takes. As
lines of Python they are a test.

    python -m tests.histories --minutes 60 [--machine checkpoints] [--seed 17]
"""

from __future__ import annotations

import functools
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

RULES = 30  # of a history
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where files are in memory, if anywhere
History = list[tuple[str, dict[str, Any]]]
F = TypeVar("F", bound=Callable[..., None])


def kept_folder() -> Path:
    """Make a folder for all histories of this process."""
    _folders.append(tempfile.TemporaryDirectory(prefix="histories-", dir=MEMORY))
    return Path(_folders[-1].name)


class Problem(AssertionError):
    """What the code did wrong, of a kind that does not depend on numbers and paths."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class HistoryMachine(RuleBasedStateMachine):
    """A machine that notes its history, and checks its model after each rule."""

    def __init__(self) -> None:
        super().__init__()
        self.history: History = []
        _latest[type(self)] = self.history

    def check(self) -> None:
        """Raise Problem if something is wrong now."""

    def check_invariants(self, *arguments: Any, **options: Any) -> None:
        super().check_invariants(*arguments, **options)
        self.check()


_folders: list[tempfile.TemporaryDirectory[str]] = []
_latest: dict[type[HistoryMachine], History] = {}  # the history that is being made


def told_rule(**choices: Any) -> Callable[[F], F]:
    """As hypothesis' `rule`, which the history tells."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def told(self: HistoryMachine, **chosen: Any) -> None:
            self.history.append((function.__name__, chosen))
            function(self, **chosen)

        return rule(**choices)(told)  # type: ignore[return-value]

    return decorate


def run_histories(
    machine: type[HistoryMachine], number: int, seed: int, rules: int = RULES
) -> None:
    """Run so many random histories, the same ones for a seed; raise what the first one finds."""
    machine._hypothesis_internal_use_seed = seed  # pyright: ignore[reportAttributeAccessIssue]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=number,
            stateful_step_count=rules,
            phases=[Phase.generate],  # `shrunk` takes fewer tries
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def replay(machine: type[HistoryMachine], history: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Call these rules in order on a new machine, which checks its model after each."""
    state = machine()
    try:
        for name, chosen in history:
            getattr(state, name)(**chosen)
            state.check()
    finally:
        state.teardown()


def found_by(machine: type[HistoryMachine], history: History) -> str:
    """The kind of the problem that a history finds; '' if it finds none."""
    try:
        replay(machine, history)
    except Problem as problem:
        return problem.kind
    except Exception as error:
        return type(error).__name__
    return ""


def shrunk(machine: type[HistoryMachine], history: History) -> History:
    """Leave out rules, in halves, quarters and so on, as long as the same kind is found."""
    kind, size = found_by(machine, history), len(history)
    while size := size // 2:
        end = len(history)
        while end > 0:
            shorter = history[: max(0, end - size)] + history[end:]
            if shorter and found_by(machine, shorter) == kind:
                history = shorter
            end -= size
        end = len(history)
    return history


def as_python(history: History) -> str:
    """The history as the body of a test, to follow `state = MACHINE()`."""
    calls = (
        f"state.{name}({', '.join(f'{key}={value!r}' for key, value in chosen.items())})"
        for name, chosen in history
    )
    return "\n".join(calls)


def run_for(machine: type[HistoryMachine], minutes: float, seed: int | None) -> int:
    """Run seeded histories for so long; print and return how many kinds of problems they found."""
    seed = random.randrange(1 << 32) if seed is None else seed
    end, kinds, number, rules = time.monotonic() + 60 * minutes, set[str](), 0, 0

    class Counted(machine):
        def teardown(self) -> None:
            nonlocal number, rules
            number, rules = number + 1, rules + len(self.history)
            super().teardown()

    while time.monotonic() < end:
        try:
            run_histories(Counted, 20, seed)
        except Exception as error:
            kind = error.kind if isinstance(error, Problem) else type(error).__name__
            if kind not in kinds:
                kinds.add(kind)
                print(
                    f"\nseed {seed}: {error}\n{as_python(shrunk(machine, list(_latest[Counted])))}",
                    flush=True,
                )
        seed += 1
    print(f"{number:,} histories of {rules:,} rules, {len(kinds)} findings")
    return len(kinds)
