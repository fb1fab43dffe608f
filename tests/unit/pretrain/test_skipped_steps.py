"""A skipped step, with every optimizer; the average of the weights (EMA)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from foundation.errors import ConfigError
from pretrain.checkpoint import marker
from pretrain.checkpoint.elastic_reader import load_memory
from pretrain.config.choices import OptimizerName
from pretrain.config.optim import OptimConfig
from pretrain.config.resolve import resolve
from pretrain.config.run import EvaluationConfig, MetricsConfig, RecoveryConfig, RunConfig
from pretrain.distributed.world import destroy_process_group, init_world
from pretrain.run import build_engine, run_training
from pretrain.rundir.run_dir import RunDir
from tests.helpers.tiny_runs import ALONE, tiny_run, training_stream


@pytest.mark.parametrize("name", get_args(OptimizerName))
@pytest.mark.parametrize(("clip_norm", "limit"), [(0.05, 1e-9), (OptimConfig().clip_norm, 0.0)])
def test_a_step_beyond_the_limit_or_with_nan_changes_nothing(
    tmp_path: Path, name: OptimizerName, clip_norm: float, limit: float
) -> None:
    run = tiny_run(tmp_path, OptimConfig(name=name, clip_norm=clip_norm))
    run = replace(run, recovery=RecoveryConfig(skip_grad_norm=limit))
    engine = build_engine(run, ALONE)
    before = {each.name: each.values["weight"].clone() for each in engine.fragments()}
    engine.forward_backward(next(training_stream(run)), None, 0)
    if not limit:
        for parameter in engine.module.parameters():
            parameter.grad.fill_(math.nan)
    assert engine.step(learning_rate=0.02).skipped
    assert engine.optimizer_step_count() == 0
    for fragment in engine.fragments():
        assert torch.equal(fragment.values["weight"], before[fragment.name])
        assert not any(fragment.values[kind].any() for kind in fragment.values.keys() - {"weight"})


DECAY, EMA = 0.75, "ema"


@pytest.fixture
def run(tmp_path: Path):
    yield tiny_run(tmp_path, OptimConfig(learning_rate=1e-2, ema_decay=DECAY))
    destroy_process_group()


def train(run: RunConfig, steps: int = 4):
    """The engine after some steps, and the weights before each and after the last."""
    engine, memory = build_engine(run, init_world()), None
    stream = training_stream(run)
    weights = [parameters_of(engine)]
    for step in range(steps):
        _, memory = engine.forward_backward(next(stream), memory, step)
        engine.step(1e-2)
        weights.append(parameters_of(engine))
    return engine, weights


def parameters_of(engine) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone().view(-1)
        for name, parameter in engine.module.named_parameters()
    }


def test_the_ema_weighs_older_weights_by_its_decay(run):
    engine, (first, *later) = train(run)
    for fragment in engine.fragments():
        expected = first[fragment.name]
        for weights in later:
            expected = DECAY * expected + (1 - DECAY) * weights[fragment.name]
        torch.testing.assert_close(fragment.values[EMA], expected, rtol=0, atol=1e-6)
        assert not torch.equal(fragment.values[EMA], fragment.values["weight"])


def test_the_ema_does_not_affect_training(run):
    with_ema, plain = train(run)[1], train(replace(run, optim=replace(run.optim, ema_decay=0.0)))[1]
    assert all(torch.equal(with_ema[-1][name], plain[-1][name]) for name in plain[-1])


def test_a_skipped_step_does_not_change_the_ema(run):
    engine, _ = train(run)
    before = {each.name: each.values[EMA].clone() for each in engine.fragments()}
    engine.forward_backward(next(training_stream(run)), None, 4)
    next(engine.module.parameters()).grad.fill_(math.inf)
    assert engine.step(1e-2).skipped
    assert all(torch.equal(each.values[EMA], before[each.name]) for each in engine.fragments())


def test_loading_initial_weights_restarts_the_ema(run):
    engine, _ = train(run)
    engine.after_load(0)
    assert all(torch.equal(each.values[EMA], each.values["weight"]) for each in engine.fragments())


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_a_decay_out_of_range_is_rejected(decay):
    with pytest.raises(ConfigError, match=f"optim.ema_decay={decay}"):
        OptimConfig(ema_decay=decay)


@pytest.mark.parametrize("limit", [1e-9, 0.0])
def test_what_a_skipped_step_read_is_not_remembered(run, tmp_path, limit):
    run = replace(
        run,
        optim=replace(run.optim, steps=2),
        recovery=RecoveryConfig(skip_grad_norm=limit, spike_threshold=0.0),
        metrics=MetricsConfig(tensorboard=False),
        evaluation=EvaluationConfig(interval=0, max_tokens=100),
    )
    assert run_training(resolve(run), tmp_path / "run", init_world()) == 0
    found = marker.latest_valid(RunDir(tmp_path / "run").checkpoints, pytest.fail)
    assert found is not None
    assert (load_memory(found, range(run.data.lanes)) is None) == (limit > 0.0)
