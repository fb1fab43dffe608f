from __future__ import annotations

import itertools
import math
from typing import get_args

import pytest
import torch

from foundation.errors import ConfigError
from pretrain.config.choices import ScheduleShape
from pretrain.config.optim import OptimConfig, ScheduleConfig
from pretrain.optim.learning_rate import learning_rate_at


def optim(shape: str, **settings: float) -> OptimConfig:
    schedule = ScheduleConfig(shape=shape, warmup_steps=10, **settings)  # type: ignore[arg-type]
    return OptimConfig(steps=100, learning_rate=2.0, schedule=schedule)


@pytest.mark.parametrize("shape", get_args(ScheduleShape))
def test_warmup_rises_linearly_to_the_peak(shape: str) -> None:
    rates = [learning_rate_at(optim(shape), step) for step in range(10)]
    assert rates == pytest.approx([2.0 * part / 10 for part in range(1, 11)])


@pytest.mark.parametrize("shape", get_args(ScheduleShape))
def test_no_rate_exceeds_the_peak_or_rises_after_warmup(shape: str) -> None:
    rates = [learning_rate_at(optim(shape), step) for step in range(9, 100)]
    assert max(rates) <= 2.0 + 1e-12
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(rates))


def test_the_cosine_from_the_start_is_that_of_torch_over_the_whole_run() -> None:
    settings = optim("cosine_from_start", final_fraction=0.1)
    parameter = torch.nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([parameter], lr=2.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, 100, eta_min=0.2)
    for step in range(100):
        if step >= 10:
            assert learning_rate_at(settings, step) == pytest.approx(sgd.param_groups[0]["lr"])
        sgd.step()
        schedule.step()
    apart = [
        abs(
            learning_rate_at(settings, step)
            - learning_rate_at(optim("cosine", final_fraction=0.1), step)
        )
        for step in range(100)
    ]
    assert 0 < max(apart) / 2.0 < math.pi * 10 / 200


def test_the_last_update_has_the_rate_that_the_page_states():
    """The floor belongs to the step after the last, as in the published schedules."""
    floor, left = 0.1, 90  # steps after warm-up
    for shape in ("linear", "wsd"):
        settings = {"decay_steps": 20} if shape == "wsd" else {}
        length = 20 if shape == "wsd" else left
        last = learning_rate_at(optim(shape, final_fraction=floor, **settings), 99)
        assert last == pytest.approx(2.0 * (floor + (1 - floor) / length))
    last = learning_rate_at(optim("cosine", final_fraction=floor), 99)
    assert last == pytest.approx(2.0 * (floor + (1 - floor) * math.sin(math.pi / 2 / left) ** 2))
    for shape in ("linear", "cosine", "wsd"):
        assert learning_rate_at(optim(shape, final_fraction=floor), 100) == pytest.approx(0.2)


@pytest.mark.parametrize(("warmup", "decay", "length"), [(10, 0, 20), (90, 0, 10), (80, 20, 20)])
def test_wsd_decays_from_the_peak_within_what_warm_up_leaves(warmup, decay, length):
    schedule = ScheduleConfig(shape="wsd", warmup_steps=warmup, decay_steps=decay)
    wsd = OptimConfig(steps=100, learning_rate=2.0, schedule=schedule)
    assert wsd.decay_steps == length
    assert learning_rate_at(wsd, 100 - length) == 2.0
    assert learning_rate_at(wsd, 100 - length // 2) == pytest.approx(1.0)


@pytest.mark.parametrize("decay", [21, 100, 10**6])
def test_a_wsd_decay_that_would_start_below_the_peak_is_refused(decay):
    schedule = ScheduleConfig(shape="wsd", warmup_steps=80, decay_steps=decay)
    with pytest.raises(ConfigError, match=f"decay_steps={decay} .* 20 steps"):
        OptimConfig(steps=100, schedule=schedule)


def test_fewer_steps_than_the_warm_up_are_refused_with_a_warm_up_that_fits():
    with pytest.raises(ConfigError, match=r"warmup_steps=2$"):
        OptimConfig(steps=40, schedule=ScheduleConfig(warmup_steps=80))


def test_inverse_sqrt_halves_when_the_step_is_four_times_the_warmup() -> None:
    assert learning_rate_at(optim("inverse_sqrt"), 39) == pytest.approx(1.0)
