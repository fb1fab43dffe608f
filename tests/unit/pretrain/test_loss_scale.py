from __future__ import annotations

import pytest
import torch

from pretrain.optim.loss_scale import LossScaler

pytestmark = pytest.mark.usefixtures("world")


def step(scaler: LossScaler, grad_norm: float, loss: float = 2.0, applied: bool = True) -> bool:
    scaler.observe(torch.tensor(loss))
    return scaler.update(grad_norm, applied)


def test_the_scale_halves_on_an_overflow_and_doubles_after_a_window_without():
    scaler = LossScaler(64.0, window=3)
    assert step(scaler, float("inf"))
    assert scaler.scale == 32.0
    assert not any(step(scaler, 1.0) for _ in range(2))
    assert scaler.scale == 32.0
    step(scaler, 1.0)
    assert scaler.scale == 64.0
    step(scaler, 1.0)
    step(scaler, 1.0)
    step(scaler, float("nan"))  # resets the count
    step(scaler, 1.0)
    step(scaler, 1.0)
    assert scaler.scale == 32.0


def test_updates_that_were_not_applied_are_not_counted():
    scaler = LossScaler(64.0, window=1)
    assert not step(scaler, 1e9, applied=False)
    assert scaler.scale == 64.0


def test_a_nan_loss_is_not_an_overflow():
    scaler = LossScaler(64.0, window=3)
    scaler.observe(torch.tensor(float("nan")))
    assert not step(scaler, float("inf"))
    assert scaler.scale == 64.0
    assert step(scaler, float("inf"))  # the loss before is forgotten


def test_at_the_smallest_scale_non_finite_gradients_are_not_an_overflow():
    scaler = LossScaler(2.0, window=3)
    assert step(scaler, float("inf"))
    assert scaler.scale == 1.0
    assert not step(scaler, float("inf"))
    assert scaler.scale == 1.0


def test_the_state_survives_a_checkpoint():
    scaler, resumed = LossScaler(64.0, window=3), LossScaler(2.0, window=3)
    step(scaler, 1.0)
    step(scaler, 1.0)
    resumed.restore(scaler.to_tree())
    step(resumed, 1.0)
    assert resumed.scale == 128.0


def test_a_window_that_was_lowered_on_resume_ends_immediately():
    scaler, resumed = LossScaler(64.0, window=5), LossScaler(64.0, window=2)
    for _ in range(4):
        step(scaler, 1.0)
    resumed.restore(scaler.to_tree())
    step(resumed, 1.0)
    assert resumed.scale == 128.0
    step(resumed, 1.0)
    step(resumed, 1.0)
    assert resumed.scale == 256.0
