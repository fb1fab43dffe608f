"""Seeds and averaged final losses in the intervals of a fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from data_pipeline.errors import DataError
from pretrain.scaling.fit import fit_all
from pretrain.scaling.huber_fit import fit_parametric
from pretrain.scaling.law_region import NUMBERS, parametric_region
from pretrain.scaling.points import Points
from pretrain.scaling.seeds import known_noise, observations, seed_spread
from pretrain.scaling.summary import fit_lines
from tests.helpers.scaling import simulated

FURTHER = float(np.log(1e21))


def seeds(
    number: int, noise: float, offsets: float = 0.0, sizes: int = 5, budgets: int = 4
) -> Points:
    """A sweep with several seeds; `offsets` are errors that all seeds of a run share."""
    once = simulated(num_sizes=sizes, budgets=(1e18, 1e20, budgets))
    rng = np.random.default_rng(4)
    shared_P = offsets * rng.standard_normal(len(once))
    points = once.take(np.tile(np.arange(len(once)), number))
    noise_P = np.tile(shared_P, number) + noise * rng.standard_normal(len(points))
    return replace(points, loss_P=points.loss_P * np.exp(noise_P))


def width_of_alpha(points: Points) -> float:
    return float(np.ptp(parametric_region(points, fit_parametric(points))[:, 3]))


def test_more_seeds_narrow_the_intervals():
    assert width_of_alpha(seeds(4, 0.005)) < 0.7 * width_of_alpha(seeds(1, 0.005))


def test_seeds_do_not_average_out_what_the_law_misses():
    points = seeds(4, noise=0.0005, offsets=0.005)
    law = fit_parametric(points).law
    predicted_P = law.loss(points.parameters_P, points.tokens_P)
    means = observations(points, predicted_P, NUMBERS)
    assert len(means) == 20
    first = points.parameters_P == means.parameters_P[0]
    assert means.loss_P[0] == pytest.approx(points.loss_P[first].mean())
    alone = width_of_alpha(seeds(1, noise=0.0005, offsets=0.005))
    assert width_of_alpha(points) == pytest.approx(alone, rel=0.25)
    assert "its interval takes each mean as one run" in "\n".join(fit_lines(fit_all(points)))
    assert seed_spread(points) == pytest.approx(0.0005, rel=0.25)


def test_seeds_that_explain_the_scatter_count_as_single_runs():
    points = seeds(3, noise=0.005)
    predicted_P = fit_parametric(points).law.loss(points.parameters_P, points.tokens_P)
    assert len(observations(points, predicted_P, NUMBERS)) == 60
    assert "each mean as one run" not in "\n".join(fit_lines(fit_all(points)))


def test_three_sizes_with_seeds_have_an_interval_by_approach_2():
    alone, repeated = (
        fit_all(seeds(number, 0.002, sizes=3, budgets=3)).approach("isoflop") for number in (1, 3)
    )
    assert "9 losses for 8 numbers" in alone.no_interval
    size = repeated.parameters(FURTHER)
    assert size.low < size.value < size.high


def test_known_errors_of_the_losses_are_the_least_noise():
    points = simulated(num_sizes=6, noise=1e-4)
    known = replace(points, error_P=0.004 * points.loss_P)
    assert known_noise(known) == pytest.approx(0.004)
    assert width_of_alpha(known) > 10 * width_of_alpha(points)
    sizes = [
        fit_all(item).approach("isoflop").parameters(FURTHER).width for item in (points, known)
    ]
    assert np.log(sizes[1]) > 10 * np.log(sizes[0])


def test_means_over_seeds_that_are_too_few_have_no_interval():
    points = seeds(3, noise=0.0002, offsets=0.01, sizes=3, budgets=2)
    with pytest.raises(DataError, match="6 losses for 5 numbers leave nothing to measure"):
        parametric_region(points, fit_parametric(points))
