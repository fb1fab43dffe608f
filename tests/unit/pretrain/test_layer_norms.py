"""Per-layer norms from inside the optimizer, against the gradients and weights outside."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import get_args

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pretrain.config.choices import OptimizerName
from pretrain.config.optim import OptimConfig
from pretrain.config.resolve import resolve
from pretrain.config.run import CheckpointConfig, EvaluationConfig, MetricsConfig, RunConfig
from pretrain.distributed.world import destroy_process_group, init_world
from pretrain.engines.engine import StepResult
from pretrain.optim.layer_norms import layer_metrics, layer_of
from pretrain.run import build_engine, run_training
from pretrain.rundir.run_dir import RunDir
from tests.helpers.tiny_runs import tiny_run, training_stream

RATE = 1e-2
LAYERS = {"shared", "embedding", "layer.0", "layer.1", "output"}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunConfig]:
    yield tiny_run(tmp_path, OptimConfig(weight_decay=0.1, clip_norm=0.05))
    destroy_process_group()


def measured(run: RunConfig, result: StepResult) -> dict[str, float]:
    assert result.layers is not None
    assert result.grad_norm is not None
    squares = result.layers.squares_KG.flatten().tolist()
    return layer_metrics(result.layers.names, squares, float(result.grad_norm), run.optim.clip_norm)


@pytest.mark.parametrize(
    ("name", "clip_norm"), list(zip(get_args(OptimizerName), cycle([0.05, 0.0])))
)
def test_norms_and_ratios_equal_those_of_gradients_and_weights(
    run: RunConfig, name: str, clip_norm: float
) -> None:
    run = replace(run, optim=replace(run.optim, name=name, clip_norm=clip_norm))
    engine, memory = build_engine(run, init_world()), None
    stream = training_stream(run)
    for step in range(4):
        _, memory = engine.forward_backward(next(stream), memory, step)
        before = {key: each.detach().clone() for key, each in engine.module.named_parameters()}
        gradients = {
            key: each.grad.clone()
            for key, each in engine.module.named_parameters()
            if each.grad is not None
        }
        result = engine.step(RATE, measure_layers=step == 3)
    found = measured(run, result)
    after = dict(engine.module.named_parameters())
    assert {key.split("/")[1] for key in found} == LAYERS
    for layer in LAYERS:
        keys = [key for key in after if layer_of(key) == layer]
        assert found[f"grad_norm/{layer}"] == pytest.approx(
            norm_of([gradients[key] for key in keys]), rel=1e-5
        )
        moved = norm_of([after[key].detach() - before[key] for key in keys])
        ratio = moved / norm_of([after[key].detach() for key in keys])
        assert found[f"update_ratio/{layer}"] == pytest.approx(ratio, rel=1e-4)
    whole = math.sqrt(sum(found[f"grad_norm/{layer}"] ** 2 for layer in LAYERS))
    assert whole == pytest.approx(float(result.grad_norm), rel=1e-5)


def norm_of(tensors: list[torch.Tensor]) -> float:
    return float(torch.cat([tensor.double().view(-1) for tensor in tensors]).norm())


def test_measuring_changes_no_bit_and_only_requested_steps_are_measured(run: RunConfig) -> None:
    ends = []
    for asked in (False, True):
        engine, memory = build_engine(run, init_world()), None
        stream = training_stream(run)
        for step in range(3):
            _, memory = engine.forward_backward(next(stream), memory, step)
            assert (engine.step(RATE, measure_layers=asked).layers is not None) == asked
        ends.append({fragment.name: fragment.values for fragment in engine.fragments()})
    assert all(
        torch.equal(ends[0][name][kind], ends[1][name][kind])
        for name in ends[0]
        for kind in ends[0][name]
    )


def test_a_run_logs_norms_at_the_end_of_each_interval_and_in_tensorboard(
    run: RunConfig, tmp_path: Path
) -> None:
    run = replace(
        run,
        optim=replace(run.optim, steps=6),
        metrics=MetricsConfig(interval=2),
        checkpoint=CheckpointConfig(interval=3),  # cuts an interval in two
        evaluation=EvaluationConfig(interval=0, max_tokens=200),
    )
    assert run_training(resolve(run), tmp_path / "run", init_world()) == 0
    run_dir = RunDir(tmp_path / "run")
    lines = [line for line in run_dir.read_metrics() if line["kind"] == "train"]
    measured = [line for line in lines if "grad_norm/embedding" in line]
    assert [line["step"] for line in measured] == [2, 4, 6]
    for line in measured:
        squares = [line[f"grad_norm/{layer}"] ** 2 for layer in LAYERS]
        assert math.sqrt(sum(squares)) == pytest.approx(line["grad_norm"], rel=1e-5)
        assert all(0 < line[f"update_ratio/{layer}"] < 1 for layer in LAYERS - {"shared", "output"})
    events = EventAccumulator(str(run_dir.tensorboard)).Reload()
    shown = [(event.step, event.value) for event in events.Scalars("train/grad_norm/layer.0")]
    assert shown == [(line["step"], pytest.approx(line["grad_norm/layer.0"])) for line in measured]
