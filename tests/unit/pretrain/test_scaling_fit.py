"""Intervals that cover, fits side by side, and errors on runs that were not fitted."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from pretrain.scaling.bootstrap import pair_weights
from pretrain.scaling.checks import seed_spread
from pretrain.scaling.fit import disagreement, fit_all
from pretrain.scaling.isoflop import fit_isoflop, isoflop_draws
from pretrain.scaling.law import exponents, log_optimum
from pretrain.scaling.parametric_draws import fit_draws
from pretrain.scaling.points import make_points
from tests.helpers.scaling import HOFFMANN, SIX_N, simulated

LEVELS = (2.5, 97.5)
COLUMNS = ("parameters_P", "tokens_P", "loss_P")
FURTHER = float(np.log(1e21))  # ten times the largest simulated budget


def coverage_of_approach_3(num_worlds: int, num_draws: int) -> np.ndarray:
    """How often the intervals of the exponent a, ln N* and alpha hold the truth."""
    truth = simulated(budgets=(1e18, 1e20, 6), num_sizes=6)
    n_P, d_P, count = np.log(truth.parameters_P), np.log(truth.tokens_P), len(truth)
    rng = np.random.default_rng(2)
    l_WP = np.log(truth.loss_P) + 0.001 * rng.standard_normal((num_worlds, count))
    weights = pair_weights(count, rng, num_worlds * num_draws)
    theta = fit_draws(n_P, d_P, np.repeat(l_WP, num_draws, axis=0), weights, 1e-3)

    def measured(theta: np.ndarray) -> np.ndarray:
        return np.stack([exponents(theta, SIX_N)[0], log_optimum(theta, FURTHER, SIX_N)[0], theta[..., 3]], axis=-1)

    low, high = np.percentile(measured(theta).reshape(num_worlds, num_draws, 3), LEVELS, axis=1)
    return ((low <= measured(HOFFMANN.theta)) & (measured(HOFFMANN.theta) <= high)).mean(axis=0)


def coverage_of_approach_2(num_worlds: int, num_draws: int) -> np.ndarray:
    """How often the intervals of the exponent a and ln N* hold what parabolas find without noise."""
    setting = {"budgets": (1e18, 1e20, 3), "num_sizes": 5}
    truth = fit_isoflop(simulated(**setting)).frontier
    rng = np.random.default_rng(3)
    hits = []
    for seed in range(num_worlds):
        points = simulated(**setting, noise=0.002, seed=seed)
        draws = isoflop_draws(points, fit_isoflop(points), rng, num_draws)
        for values, true in (
            (draws.power, truth.power),
            (draws.log_parameters(FURTHER), truth.log_parameters(FURTHER)),
        ):
            low, high = np.nanpercentile(values, LEVELS)
            hits.append(low <= true <= high)
    return np.array(hits).reshape(num_worlds, 2).mean(axis=0)


def test_pairs_bootstrap_of_approach_3_covers_between_90_and_97_per_cent():
    covered = coverage_of_approach_3(num_worlds=120, num_draws=100)
    assert ((covered >= 0.90) & (covered <= 0.97)).all(), covered


@pytest.mark.slow
def test_pairs_bootstrap_of_approach_3_covers_between_90_and_97_per_cent_in_many_worlds():
    covered = coverage_of_approach_3(num_worlds=300, num_draws=150)
    assert ((covered >= 0.90) & (covered <= 0.97)).all(), covered


def test_residual_bootstrap_of_approach_2_covers_between_90_and_97_per_cent():
    covered = coverage_of_approach_2(num_worlds=400, num_draws=200)
    assert ((covered >= 0.90) & (covered <= 0.97)).all(), covered


def test_a_fit_of_240_runs_with_1000_draws_takes_well_under_a_minute():
    points = simulated(budgets=(1e18, 1e21, 24), num_sizes=10, noise=0.003)
    assert len(points) == 240
    begin = time.process_time()
    fit = fit_all(points, num_draws=1000)
    assert time.process_time() - begin < 60
    assert {approach.key for approach in fit.approaches} == {"envelope", "isoflop", "parametric"}
    law = fit.approach("parametric")
    a, b = law.powers(fit.flops_law)
    assert a.low < HOFFMANN.beta / (HOFFMANN.alpha + HOFFMANN.beta) < a.high
    assert a.value + b.value == pytest.approx(1)
    assert (
        law.parameters(FURTHER).low
        < np.exp(log_optimum(HOFFMANN.theta, FURTHER, SIX_N)[0])
        < law.parameters(FURTHER).high
    )


def test_the_same_seed_gives_the_same_intervals():
    points = simulated(noise=0.003, budgets=(1e18, 1e20, 3), num_sizes=6)
    first, second, other = (fit_all(points, num_draws=50, seed=seed) for seed in (1, 1, 2))
    widths = [fit.approach("parametric").parameters(FURTHER) for fit in (first, second, other)]
    assert widths[0] == widths[1]
    assert widths[0].low != widths[2].low


def test_the_largest_budget_is_predicted_by_the_rest():
    left_out = fit_all(simulated(noise=0.001), num_draws=20).left_out
    assert left_out.budget == pytest.approx(1e20)
    assert left_out.law_error < 0.003
    size, loss = left_out.optimum["parametric"]
    assert size == pytest.approx(left_out.measured[0], rel=0.15)
    assert loss == pytest.approx(left_out.measured[1], rel=0.003)
    assert fit_all(simulated(budgets=(1e18, 1e19, 2)), num_draws=20).left_out is None


def test_a_law_that_changes_beyond_the_smaller_budgets_shows_in_the_error_of_the_largest():
    points = simulated()
    last = points.budget_P == points.budgets[-1]
    broken = replace(points, loss_P=np.where(last, points.loss_P * 1.05, points.loss_P))
    assert fit_all(broken, num_draws=20).left_out.law_error == pytest.approx(0.05, abs=0.01)


def test_held_out_runs_are_predicted_and_never_fitted():
    points = simulated(noise=0.002)
    held = replace(points, holdout_P=points.budget_P == points.budgets[-1])
    fit = fit_all(held, num_draws=100)
    assert len(fit.points) == len(points) - 8
    assert len(fit.holdouts) == 8
    for prediction in fit.holdouts:
        assert abs(prediction.error) < 0.01
        assert prediction.predicted.low < prediction.predicted.value < prediction.predicted.high


def test_the_spread_between_seeds_is_measured_where_runs_were_repeated():
    once, again = simulated(noise=0.004, seed=1), simulated(noise=0.004, seed=2)
    assert seed_spread(once) is None
    both = make_points(*(np.concatenate([getattr(x, name) for x in (once, again)]) for name in COLUMNS))
    assert seed_spread(both) == pytest.approx(0.004, rel=0.2)


def test_traps_are_named():
    points = simulated(noise=0.001)
    mixed = replace(points, progress_P=np.where(np.arange(len(points)) % 8 == 0, 0.5, 1.0))
    assert any("6 mid-schedule points left out" in warning for warning in fit_all(mixed, num_draws=20).warnings)
    repeated = replace(points, names=("same run",) * len(points))
    assert any("mid-schedule" in warning for warning in fit_all(repeated, num_draws=20).warnings)
    shapes = points.flops_P * np.where(np.arange(len(points)) % 2, 1.0, 1.2)
    rough = make_points(points.parameters_P, points.tokens_P, points.loss_P, flops=shapes, budget=points.budget_P)
    assert any("FLOPs per token differ" in warning for warning in fit_all(rough, num_draws=20).warnings)


def test_approaches_that_disagree_are_said_to():
    size_P, tokens_P = simulated().parameters_P, simulated().tokens_P
    # A learning rate that suits only small models lifts the loss of large ones: the valley moves, the law bends.
    loss_P = HOFFMANN.loss(size_P, tokens_P) * np.exp(0.008 * np.log(size_P / size_P.min()) ** 2)
    fit = fit_all(make_points(size_P, tokens_P, loss_P, budget=simulated().budget_P), num_draws=20)
    ratio = disagreement(fit.approaches, FURTHER)
    assert ratio > 1.5
    assert any(f"{ratio:.2f}x at 10 times that" in warning for warning in fit.warnings)


def test_an_approach_these_runs_do_not_allow_is_a_reason_not_an_error():
    rng = np.random.default_rng(0)
    size_P, tokens_P = np.exp(rng.uniform(16, 21, 20)), np.exp(rng.uniform(20, 25, 20))
    fit = fit_all(make_points(size_P, tokens_P, HOFFMANN.loss(size_P, tokens_P)), num_draws=20)
    assert [approach.key for approach in fit.approaches] == ["parametric"]
    assert "approach 2 needs two" in fit.estimates.unavailable["isoflop"]
