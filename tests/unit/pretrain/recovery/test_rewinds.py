"""Whole runs in this process that rewind, stop or resume; every update of a harmful one is skipped.

With `skip_grad_norm` below any norm the steps from 11 on are a spike: a run cannot rewind before
its history of 10 steps is complete.
"""

import itertools
import json
import logging
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data_pipeline.corpora.corpus_identity import corpus_hash
from foundation.errors import ConfigError, DataError
from pretrain.checkpoint import checkpointer
from pretrain.checkpoint.directory import rank_file, step_directory, steps_on_disk
from pretrain.config.resolve import resolve
from pretrain.config.run import (
    CheckpointConfig,
    EvaluationConfig,
    MetricsConfig,
    OptimConfig,
    RecoveryConfig,
    RunConfig,
    ScheduleConfig,
)
from pretrain.distributed.world import World
from pretrain.engines.torch_engine import TorchEngine
from pretrain.errors import CheckpointError, TrainingError
from pretrain.recovery import rewind
from pretrain.recovery.rewind import SpikeFound, SpikeMonitor
from pretrain.run import run_training
from pretrain.rundir.events import (
    GaveUp,
    Outcome,
    Rewind,
    TrainingBegan,
    TrainingEnded,
    UnresolvedSpike,
)
from pretrain.rundir.history import find_events, skipped_windows
from pretrain.rundir.run_dir import RunDir
from pretrain.state import TrainState
from tests.helpers.corpora import make_tiny_corpus
from tests.helpers.metrics import train_line
from tests.helpers.tiny_runs import tiny_run

HARMFUL = RecoveryConfig(skip_grad_norm=1e-9, max_rewinds=1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spike of three steps after ten losses."""
    monkeypatch.setattr(rewind, "SPIKE_STEPS", 3)
    monkeypatch.setattr(rewind, "WINDOW", 10)
    monkeypatch.setattr(rewind, "MOST_SKIPPED", 1.0)
    monkeypatch.setattr(rewind, "SKIP_MARGIN_SEGMENTS", 2)


def steady(steps: int) -> OptimConfig:
    """Steps at one rate, so that more of them raise none."""
    return OptimConfig(steps=steps, schedule=ScheduleConfig(shape="constant"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return resolve(
        replace(
            tiny_run(tmp_path_factory.mktemp("rewinds"), steady(30)),
            checkpoint=CheckpointConfig(interval=5),
            evaluation=EvaluationConfig(interval=0, max_tokens=100),
            metrics=MetricsConfig(interval=1, tensorboard=False),
            recovery=HARMFUL,
        )
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def error_of(run: RunConfig, run_dir: RunDir, world: World) -> str:
    with pytest.raises(TrainingError) as raised:
        run_training(run, run_dir.path, world)
    assert "\n" not in str(raised.value)
    ends = find_events(run_dir.ledger.read(), TrainingEnded)
    assert Outcome.FINISHED not in [end.outcome for end in ends]
    return str(raised.value)


def trained_steps(run_dir: RunDir) -> list[int]:
    return [line["step"] for line in run_dir.read_metrics() if line["kind"] == "train"]


def test_the_only_checkpoint_before_a_spike_outlives_saves_within_it(run, run_dir, world):
    """With keep_last=1, a save in the first spiked steps used to leave nothing to rewind to."""
    run = replace(run, recovery=replace(HARMFUL, max_rewinds=2))
    run = replace(run, checkpoint=CheckpointConfig(interval=1, keep_last=1))
    error = error_of(run, run_dir, world)
    rewinds = find_events(run_dir.ledger.read(), Rewind)
    assert [(event.spike.first_step, event.to_step) for event in rewinds] == [(11, 10)] * 2
    assert steps_on_disk(run_dir.checkpoints) == [10, 12]
    assert len(skipped_windows(rewinds)) == 1, "they touch, and are counted one by one all the same"
    assert "recovery.max_rewinds=2" in error


def test_a_run_without_a_checkpoint_before_the_spike_stops_and_says_so(run, run_dir, world):
    run = replace(run, checkpoint=CheckpointConfig(interval=12))
    error = error_of(run, run_dir, world)
    assert "steps 11 to 13" in error
    assert "checkpoint.interval" in error
    assert "recovery.spike_threshold=0" in error
    assert steps_on_disk(run_dir.checkpoints) == [12], "what was saved is not thrown away"
    ledger = run_dir.ledger.read()
    assert find_events(ledger, GaveUp)
    assert not find_events(ledger, Rewind)


def spoil(monkeypatch: pytest.MonkeyPatch, kind: str, at: int, count: int) -> None:
    """Leave NaN, or inf in a weight, in values of this kind after the update of step `at`; of the
    first `count` such steps."""
    numbers, name = itertools.count(), "forward_backward" if kind == "memory" else "step"
    real = getattr(TorchEngine, name)

    def spoiling(engine: TorchEngine, *arguments: Any, **options: Any) -> Any:
        result = real(engine, *arguments, **options)
        done = engine.optimizer_step_count() + (kind == "memory")
        if done == at and next(numbers) < count:
            values = list(engine.fragments())[3].values
            spoiled = (
                result[1][0] if kind == "memory" else values["weight" if kind == "inf" else kind]
            )
            spoiled.view(-1)[-1] = float("-inf" if kind == "inf" else "nan")
        return result

    monkeypatch.setattr(TorchEngine, name, spoiling)


@pytest.mark.parametrize(
    ("kind", "at"),
    [
        ("weight", 8),
        ("weight", 10),  # in the update before a save
        ("weight", 30),  # in the last one
        ("inf", 29),
        ("exp_avg", 30),
        ("exp_avg_sq", 8),
        ("memory", 29),
    ],
)
def test_what_is_not_finite_is_not_saved(run, run_dir, world, monkeypatch, kind, at):
    spoil(monkeypatch, kind, at, count=1)
    run = replace(
        run, recovery=RecoveryConfig(), checkpoint=CheckpointConfig(interval=5, keep_last=9)
    )
    assert run_training(run, run_dir.path, world) == 0
    (rewound,) = find_events(run_dir.ledger.read(), Rewind)
    assert rewound.to_step == (at - 1) // 5 * 5
    for step in steps_on_disk(run_dir.checkpoints):
        saved = load_file(step_directory(run_dir.checkpoints, step) / rank_file(0))
        assert all(value.isfinite().all() for value in saved.values()), step


@pytest.mark.parametrize(
    ("recovery", "interval"),
    [
        (RecoveryConfig(max_rewinds=1), 5),
        (RecoveryConfig(), 30),
        (RecoveryConfig(spike_threshold=0), 5),
    ],
)
def test_a_run_that_cannot_rewind_from_what_is_not_finite_ends(
    run, run_dir, world, monkeypatch, recovery, interval
):
    spoil(monkeypatch, "weight", 29, count=99)
    run = replace(run, recovery=recovery, checkpoint=CheckpointConfig(interval=interval))
    error = error_of(run, run_dir, world)
    assert re.search(r"rank 0 has NaN or inf in layers\.0\.\S+ \(weight\)", error)
    assert find_events(run_dir.ledger.read(), GaveUp)
    assert all(step < 29 for step in steps_on_disk(run_dir.checkpoints))


def test_a_checkpoint_that_is_not_finite_is_not_resumed_from(run, run_dir, world, monkeypatch):
    """As an older version saved them."""
    run = replace(run, recovery=RecoveryConfig())
    spoil(monkeypatch, "weight", 30, count=1)
    monkeypatch.setattr(checkpointer, "require_finite", lambda *_: None)
    assert "validation loss" in error_of(run, run_dir, world)
    with pytest.raises(CheckpointError, match=r"000030: has NaN or inf in .*--from-step 25$"):
        run_training(run, run_dir.path, world)
    assert run_training(run, run_dir.path, world, from_step=25) == 0
    assert [event.step for event in find_events(run_dir.ledger.read(), TrainingBegan)] == [0, 25]


def overflow(monkeypatch: pytest.MonkeyPatch, steps: range, count: int) -> None:
    """Let the gradients of these steps be inf; the first `count` times."""
    numbers, real = itertools.count(), TorchEngine.forward_backward

    def forward_backward(engine: TorchEngine, slot: Any, memory: Any, step: int) -> Any:
        result = real(engine, slot, memory, step)
        if step + 1 in steps and next(numbers) < count:
            parameter = next(engine.module.parameters())
            parameter.grad = torch.full_like(parameter, math.inf)
        return result

    monkeypatch.setattr(TorchEngine, "forward_backward", forward_backward)


def test_a_run_does_not_end_with_skipped_updates(run, run_dir, world, monkeypatch):
    run = replace(run, recovery=RecoveryConfig(max_rewinds=1))
    overflow(monkeypatch, range(29, 31), count=4)
    assert "steps 29 to 30 were all skipped" in error_of(run, run_dir, world)
    assert "raise" in error_of(run, run_dir, world)  # the same command
    assert run_training(replace(run, recovery=RecoveryConfig()), run_dir.path, world) == 0
    rewinds = find_events(run_dir.ledger.read(), Rewind)
    assert [event.to_step for event in rewinds] == [25, 25]
    assert trained_steps(run_dir) == [*range(1, 31)]


def test_without_rewinds_more_steps_go_past_skipped_updates(
    run, run_dir, world, monkeypatch, caplog
):
    run = replace(run, recovery=RecoveryConfig(spike_threshold=0))
    overflow(monkeypatch, range(30, 31), count=9)
    for _ in range(2):
        assert "raise optim.steps" in error_of(run, run_dir, world)
    assert "learning rate" not in caplog.text
    rate = run.optim.learning_rate / 2
    longer = replace(run, optim=replace(run.optim, steps=32, learning_rate=rate))
    assert run_training(longer, run_dir.path, world) == 0
    (said,) = [line for line in caplog.messages if line.startswith("learning rate")]
    rates = {
        line["step"]: line["learning_rate"] for line in run_dir.read_metrics() if "skipped" in line
    }
    expected = f"learning rate of step 31: {rates[31]:.3g}, 0.5 times the last one, {rates[30]:.3g}"
    assert said == expected


def test_a_spike_that_is_not_over_at_the_end_is_told(run, run_dir, world, monkeypatch, caplog):
    run, real = replace(run, recovery=RecoveryConfig()), TorchEngine.forward_backward

    def forward_backward(engine: TorchEngine, slot: Any, memory: Any, step: int) -> Any:
        loss, memory = real(engine, slot, memory, step)
        return loss + (9 if step >= 28 else 0), memory

    monkeypatch.setattr(TorchEngine, "forward_backward", forward_backward)
    assert run_training(run, run_dir.path, world) == 0
    (event,) = find_events(run_dir.ledger.read(), UnresolvedSpike)
    assert (event.spike.first_step, event.spike.last_step, event.before) == (29, 30, 25)
    assert sum(event.description in line for line in caplog.messages) == 1


def test_a_final_loss_that_is_not_finite_is_no_end(run, run_dir, world, monkeypatch):
    run = replace(run, recovery=RecoveryConfig())
    with monkeypatch.context() as patch:
        real = TorchEngine.evaluate

        def evaluate(*given: Any) -> Any:
            nll_BL, memory = real(*given)
            return math.nan * nll_BL, memory

        patch.setattr(TorchEngine, "evaluate", evaluate)
        for _ in range(2):
            assert "validation loss" in error_of(run, run_dir, world)
    assert steps_on_disk(run_dir.checkpoints)[-1] == 30, "its weights are finite"
    for line in run_dir.metrics.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert [line["loss"] for line in run_dir.read_metrics() if line["kind"] == "evaluation"][
        :1
    ] == [None]
    assert run_training(run, run_dir.path, world) == 0


def test_inherited_windows_are_skipped_also_when_recovery_is_off(run, run_dir, world, caplog):
    caplog.set_level(logging.INFO)
    assert "recovery.spike_threshold=0" in error_of(run, run_dir, world)
    windows = skipped_windows(run_dir.ledger.read())
    assert windows == [range(10, 15)]
    caplog.clear()
    harmless = replace(run, recovery=RecoveryConfig(spike_threshold=0.0))
    assert run_training(harmless, run_dir.path, world) == 0
    assert "segments 10 to 14" in caplog.text
    assert skipped_windows(run_dir.ledger.read()) == windows
    assert trained_steps(run_dir) == [*range(1, 31)]


@pytest.mark.parametrize(("window", "last"), [(50, 30), (10, 10)])
def test_a_run_that_skips_nearly_all_updates_ends(run, run_dir, world, monkeypatch, window, last):
    monkeypatch.setattr(rewind, "MOST_SKIPPED", 0.5)
    monkeypatch.setattr(rewind, "WINDOW", window)
    error = error_of(run, run_dir, world)
    assert f"{last} of the {last} " in error
    assert "recovery.skip_grad_norm=1e-09" in error
    assert [event.step for event in find_events(run_dir.ledger.read(), GaveUp)] == [last]


def lines(first: int, last: int, **more: bool) -> list[dict]:
    return [train_line(step, **more) for step in range(first, last + 1)]


def test_half_of_the_updates_may_be_skipped_beside_overflows(run, run_dir, world, monkeypatch):
    monkeypatch.setattr(rewind, "MOST_SKIPPED", 0.5)
    monkeypatch.setattr(rewind, "SPIKE_STEPS", 20)
    run_dir.path.mkdir()
    monitor = SpikeMonitor(run, run_dir, world, TrainState.fresh(1))
    monitor.check(lines(1, 40, skipped=True, overflowed=True), ends_run=True)
    monitor.check([*lines(41, 45), *lines(46, 50, skipped=True)])
    monitor.check([], ends_run=True)
    with pytest.raises(TrainingError, match=r"\b6\b.* 10 .* 42 .* 51\b"):
        monitor.check(lines(51, 51, skipped=True))


def test_overflows_are_no_steps_of_a_spike_and_do_not_end_one(run, run_dir, world):
    monitor = SpikeMonitor(run, run_dir, world, TrainState.fresh(1))
    monitor.check(lines(1, 40, skipped=True, overflowed=True))
    assert monitor.suspected_since is None
    monitor.check([*lines(41, 42, skipped=True), *lines(43, 50, skipped=True, overflowed=True)])
    assert monitor.suspected_since == 41
    with pytest.raises(SpikeFound, match="41 to 51"):
        monitor.check(lines(51, 51, skipped=True))


def test_a_long_run_resumes_with_the_suspicion_that_all_its_losses_raise(run, run_dir, world):
    count, noise = 45_000, random.Random(1)
    losses = [3.0 + noise.gauss(0, 0.05) for _ in range(count)] + [9.0, 9.0]
    measured = [train_line(step, loss) for step, loss in enumerate(losses, start=1)]
    run_dir.path.mkdir()
    run_dir.metrics.write_text("".join(json.dumps(each) + "\n" for each in measured))
    run = replace(run, optim=steady(90_000))
    assert run_dir.metrics.stat().st_size > 1 << 22, "more than what is read from the end"
    state = TrainState(step=count + 1)
    assert SpikeMonitor(run, run_dir, world, state).suspected_since == count + 1


def test_a_flipped_bit_in_the_metrics_blocks_no_start(run, run_dir, world, caplog):
    run = replace(run, optim=steady(6), recovery=RecoveryConfig())
    assert run_training(run, run_dir.path, world) == 0
    text = run_dir.metrics.read_text().replace('"step": 3,', '"stdp": 3,')
    text = text.replace('"kind": "train", "step": 5,', '"kinl": "train", "step": 5,')
    run_dir.metrics.write_text(text)
    longer = replace(run, optim=steady(8))
    assert run_training(longer, run_dir.path, world) == 0
    (damaged,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert str(run_dir.metrics) in damaged.getMessage()
    assert damaged.getMessage().endswith("in line 3, 5")
    assert trained_steps(run_dir) == [1, 2, 4, 6, 7, 8]


@pytest.mark.parametrize(("part", "vocabulary"), [("validation", "bytes"), ("", "unigram")])
def test_no_run_is_resumed_on_another_corpus(run, tmp_path, world, monkeypatch, part, vocabulary):
    """Another validation split, or a whole corpus whose lanes no cursor tells apart."""
    ours, other = (
        make_tiny_corpus(tmp_path / name, documents=30, seed=seed, vocabulary=vocabulary)
        for seed, name in enumerate(("data", "other"))
    )
    model = replace(run.model, vocab_size=0)
    short = replace(run, optim=steady(2), model=model, recovery=RecoveryConfig())
    short = resolve(replace(short, data=replace(run.data, path=ours)))
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert run_training(short, tmp_path / "run", world) == 0
    (started,) = find_events(RunDir(tmp_path / "run").ledger.read(), TrainingBegan)
    assert started.corpora == {str(ours): corpus_hash(ours)}
    pinned = replace(short.data, manifest_hashes=(started.corpora[str(ours)],))
    longer = replace(short, optim=steady(4))
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert run_training(replace(longer, data=pinned), tmp_path / "run", world) == 0
    resumed = find_events(RunDir(tmp_path / "run").ledger.read(), TrainingBegan)[-1]
    before, after = (each.environment["threads wait"] for each in (started, resumed))
    assert (before.split(",")[0], after.split(",")[0]) == ("passive", "active")
    assert not resumed.changes, "which changes no bit"
    (ours / part).rename(tmp_path / "before")
    (other / part).rename(ours / part)
    longest, what = replace(longer, optim=steady(6)), part or "tokenizer"
    for config, said in (
        (longest, rf"^.*{what} .*\w{{16}}.*\w{{16}}.*$"),
        (replace(longest, data=pinned), r"^.*data\.manifest_hashes.*$"),
    ):
        with pytest.raises(DataError, match=said):
            run_training(config, tmp_path / "run", world)


class Lose(logging.Handler):
    """Removes files of the checkpoint of step 5 at the moment after it was verified."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("resuming from") and "00000010" in record.getMessage():
            for path in Path(record.args[0]).glob("rank-*"):  # type: ignore[index,arg-type]
                path.unlink()


def test_a_checkpoint_lost_before_its_reading_is_given_up_only_when_asked(run, run_dir, world):
    harmless = replace(run, recovery=RecoveryConfig(), optim=steady(10))
    assert run_training(harmless, run_dir.path, world) == 0
    losing, log = Lose(), logging.getLogger("pretrain.checkpoint.resume_point")
    log.addHandler(losing)
    log.setLevel(logging.INFO)
    longer = replace(harmless, optim=steady(12))
    try:
        with pytest.raises(
            CheckpointError, match=r"rank-00000.safetensors: cannot be read .*--from-step 5$"
        ):
            run_training(longer, run_dir.path, world)
    finally:
        log.removeHandler(losing)
        log.setLevel(logging.NOTSET)
    with pytest.raises(ConfigError, match=r"no checkpoint of step 7; give --from-step 0 or 5$"):
        run_training(longer, run_dir.path, world, from_step=7)
    # A word that is refused is not kept for later starts.
    with pytest.raises(CheckpointError, match=r"step-00000010.*--from-step 5$"):
        run_training(longer, run_dir.path, world)
    assert run_dir.past().asked is None
    assert trained_steps(run_dir) == [*range(1, 11)], "no line goes before a start is sure"
    assert run_training(longer, run_dir.path, world, from_step=5) == 0
    assert trained_steps(run_dir) == [*range(1, 13)]
