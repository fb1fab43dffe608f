"""A skipped step, with every optimizer."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from pretrain.config.choices import OptimizerName
from pretrain.config.optim import OptimConfig
from pretrain.config.run import RecoveryConfig
from pretrain.run import build_engine
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
