"""Ranks together: what is not finite on one of them, an error of rank 0, a rank that is stopped."""

import errno
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pretrain.engines.deepspeed_engine import DeepSpeedEngine
from pretrain.metrics import recorder
from pretrain.metrics.writers import MetricsFile
from pretrain.rundir.events import Rewind, Slowdown
from pretrain.rundir.history import find_events
from pretrain.rundir.ledger import Ledger
from pretrain.rundir.run_dir import RunDir
from pretrain.train import Parts
from tests.helpers.forked_runs import PLAIN, Runs


@pytest.fixture(scope="module")
def runs(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tiny_corpus, tmp_path_factory.mktemp("endings"))


def around(where: Any, name: str, act: Any) -> None:
    """Let `act(result, *arguments)` follow each call, and return what it returns."""
    real = getattr(where, name)
    setattr(where, name, lambda *given, **more: act(real(*given, **more), *given))


def spoil(rank: int) -> None:
    """NaN in the last value that rank 1 holds, also where rank 0 holds it too, after update 9."""
    done: list[int] = []

    def act(result: Any, engine: DeepSpeedEngine, *_: Any) -> Any:
        if engine.optimizer_step_count() == 9 and not done:
            last = list(engine.fragments())[-1]
            if rank == 1 or last.replicated:
                last.values["weight"].view(-1)[-1] = float("nan")
            engine.after_load(9)  # into the weights that the model computes with
            done.append(rank)
        return result

    around(DeepSpeedEngine, "step", act)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "bf16"), (1, "bf16"), (2, "fp32"), (3, "bf16")]
)
def test_under_each_stage_a_rank_with_nan_is_named_and_nothing_is_saved(runs, stage, precision):
    name = f"stage-{stage}-{precision}"
    more = (f"engine.zero_stage={stage}", f"engine.precision={precision}")
    runs.train(name, *more, first=spoil)
    (rewound,) = find_events(RunDir(runs.output / name).ledger.read(), Rewind)
    assert rewound.to_step == 6
    assert rewound.spike.first_step == 10
    assert "has NaN or inf in " in rewound.spike.problem
    assert "(weight)" in rewound.spike.problem


class Failing:
    """The call of a number on rank 0 fails as it does on a disk of another user."""

    def __init__(self, where: Any, name: str, number: int) -> None:
        self.where, self.name, self.number = where, name, number

    def __call__(self, rank: int) -> None:
        def act(result: Any, *_: Any) -> Any:
            self.number -= 1
            if not self.number and rank == 0:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/disk/of-another")
            return result

        around(self.where or recorder, self.name, act)  # a module cannot be sent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "name", "number"),
    [
        (RunDir, "create_or_resume", 1),
        (Ledger, "read", 1),
        (Ledger, "read", 2),
        (MetricsFile, "__init__", 1),
        (MetricsFile, "append", 1),
        (Ledger, "append", 1),
        (Ledger, "append", 2),
        (None, "has_evaluation", 1),
    ],
)
def test_an_error_of_rank_0_is_one_line_of_all_ranks(runs, where, name, number):
    run = f"{getattr(where, '__name__', 'recorder')}-{name}-{number}"
    more = (*PLAIN, "optim.steps=2", "checkpoint.storage_patience_seconds=0")
    runs.train(run, *more, ends=(2, 2), first=Failing(where, name, number))
    for rank in range(2):
        log = (runs.output / f"{run}-logs" / f"rank-{rank}.log").read_text()
        (error,) = [line for line in log.splitlines() if line.startswith("ERROR")]
        assert "/disk/of-another: Permission denied; give this user" in error
        assert "Traceback" not in log


def stop_for_seconds(rank: int) -> None:
    """Rank 1 is stopped in its second exchange of metrics, and in the last evaluation."""
    sums = 0

    def stop() -> None:
        me = os.getpid()
        subprocess.Popen(["sh", "-c", f"sleep 8; kill -CONT {me}"])
        os.kill(me, signal.SIGSTOP)

    def act(total: Any, *_: Any) -> Any:
        nonlocal sums
        sums += 1
        if sums == 3 and rank == 1:  # the first one is the machine's speed
            stop()
        return total

    def evaluated(values: Any, *_: Any) -> Any:
        if rank == 1:
            stop()
        return values

    around(recorder, "sum_over_ranks", act)
    real = Parts.__init__

    def init(parts: Parts, **more: Any) -> None:
        evaluate = more["evaluate"]
        real(parts, **{**more, "evaluate": lambda: evaluated(evaluate())})

    Parts.__init__ = init  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_stopped_rank_is_named_wherever_it_is(runs):
    more = (*PLAIN, "optim.steps=6", "metrics.interval=2", "checkpoint.interval=9")
    runs.train("stopped", *more, first=stop_for_seconds)
    run_dir = RunDir(runs.output / "stopped")
    named = find_events(run_dir.ledger.read(), Slowdown)
    assert [(event.rank, event.step) for event in named] == [(1, 4), (1, 6)]
    assert all(event.seconds >= 7 for event in named)
    lines = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("stall", 0) >= 7] == [4, 6]
    steps = [line for line in lines if line["kind"] == "train"]
    assert [line["tokens"] for line in steps] == [4 * 8 * line["step"] for line in steps]
