from __future__ import annotations

import itertools

import pytest

from pretrain.config.optim import OptimConfig, ScheduleConfig
from pretrain.optim.learning_rate import learning_rate_at


def optim(shape: str, **settings: float) -> OptimConfig:
    schedule = ScheduleConfig(shape=shape, warmup_steps=10, **settings)  # type: ignore[arg-type]
    return OptimConfig(steps=100, learning_rate=2.0, schedule=schedule)


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "inverse_sqrt", "wsd"])
def test_warmup_rises_linearly_to_the_peak(shape: str) -> None:
    rates = [learning_rate_at(optim(shape), step) for step in range(10)]
    assert rates == pytest.approx([2.0 * part / 10 for part in range(1, 11)])


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "inverse_sqrt", "wsd"])
def test_no_rate_exceeds_the_peak_or_rises_after_warmup(shape: str) -> None:
    rates = [learning_rate_at(optim(shape), step) for step in range(9, 100)]
    assert max(rates) <= 2.0 + 1e-12
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(rates))


def test_linear_and_cosine_end_at_the_final_fraction() -> None:
    for shape in ("linear", "cosine"):
        assert learning_rate_at(optim(shape, final_fraction=0.1), 100) == pytest.approx(0.2)


def test_cosine_is_half_way_down_in_the_middle() -> None:
    assert learning_rate_at(optim("cosine"), 55) == pytest.approx(1.0)


def test_wsd_is_flat_until_its_decay() -> None:
    wsd = optim("wsd", decay_steps=20)
    assert learning_rate_at(wsd, 80) == 2.0
    assert learning_rate_at(wsd, 90) == pytest.approx(1.0)


def test_inverse_sqrt_halves_when_the_step_is_four_times_the_warmup() -> None:
    assert learning_rate_at(optim("inverse_sqrt"), 39) == pytest.approx(1.0)
