"""Intervals that cover, fits side by side, and errors on runs that were not fitted."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import numpy as np
import pytest

from pretrain.reporting.charts import PRINT
from pretrain.scaling import charts
from pretrain.scaling.checks import contradictions, disagreement, seed_spread
from pretrain.scaling.fit import fit_all
from pretrain.scaling.huber_bootstrap import fit_draws, pair_weights
from pretrain.scaling.intervals import Interval
from pretrain.scaling.isoflop import fit_isoflop, isoflop_draws
from pretrain.scaling.law import exponents, log_optimum
from pretrain.scaling.summary import check_lines
from tests.helpers.scaling import HOFFMANN, SIX_N, make_points, simulated

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
        return np.stack(
            [exponents(theta, SIX_N)[0], log_optimum(theta, FURTHER, SIX_N)[0], theta[..., 3]],
            axis=-1,
        )

    low, high = np.percentile(measured(theta).reshape(num_worlds, num_draws, 3), LEVELS, axis=1)
    return ((low <= measured(HOFFMANN.theta)) & (measured(HOFFMANN.theta) <= high)).mean(axis=0)


def coverage_of_approach_2(num_worlds: int, num_draws: int) -> np.ndarray:
    """How often the intervals of the exponent a and ln N* hold what parabolas find without noise."""  # noqa: E501
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


def test_every_error_is_predicted_minus_measured():
    points = simulated()
    held = points.budget_P == points.budgets[-1]
    # These runs end a tenth below what the law promises: too much was predicted.
    lucky = replace(
        points, holdout_P=held, loss_P=np.where(held, points.loss_P / 1.1, points.loss_P)
    )
    fit = fit_all(lucky, num_draws=20)
    assert [item.error for item in fit.holdouts] == pytest.approx([0.1] * 8, abs=1e-3)
    assert re.search(r"held out point \d+: .* \(\+10\.\d\d%\)", "\n".join(check_lines(fit)))
    left_out = fit_all(replace(lucky, holdout_P=np.zeros(len(points), bool)), num_draws=20)
    said = "\n".join(check_lines(left_out))
    assert left_out.left_out.law_error == pytest.approx(0.1, abs=1e-3)
    assert re.search(r"3 parametric: N\* \S+ \(\S+\), loss \S+ \(\+10\.\d\d%\)", said)
    assert "errors are predicted minus measured" in said
    drawn = charts.residuals(left_out, PRINT).axes[0]
    shown_P = np.asarray(drawn.collections[0].get_offsets())[:, 1]
    law = left_out.estimates.parametric.law
    assert shown_P == pytest.approx(
        100 * (law.loss(points.parameters_P, points.tokens_P) / lucky.loss_P - 1)
    )
    assert drawn.get_ylabel().startswith("(predicted - measured)")


def test_an_approach_that_is_lost_with_the_largest_budget_says_why():
    # The middle of three sizes is lowest at the first two budgets, the next one at the third:
    # without it, one step.
    size_P, budget_P = np.tile([1e6, 2e6, 4e6, 8e6], 3), np.repeat([1e16, 2e16, 8e16], 4)
    loss_P = np.array([4.0, 3.8, 3.9, 4.1, 3.8, 3.6, 3.7, 3.9, 3.6, 3.3, 3.2, 3.4])
    fit = fit_all(make_points(size_P, budget_P / 6 / size_P, loss_P, budget=budget_P), num_draws=20)
    assert fit.approach("envelope")
    assert "envelope" not in fit.left_out.optimum
    said = "\n".join(check_lines(fit))
    assert (
        "  1 envelope: not available without that budget: approach 1 needs two sizes that are lowest"  # noqa: E501
        in said
    )


def test_held_out_runs_that_nothing_predicts_are_said_to_be():
    size_P, tokens_P = (
        np.repeat(np.geomspace(1e7, 1e9, 5), 30),
        np.tile(np.geomspace(1e8, 1e12, 30), 5),
    )
    loss_P = HOFFMANN.loss(size_P, tokens_P)
    training = {"run": size_P.astype(str), "N": size_P, "C": 6 * size_P * tokens_P, "loss": loss_P}
    few = make_points(
        [1e7, 3e7, 1e7, 3e7, 1e8], [2e9, 7e8, 2e10, 7e9, 1e11], [4.0, 3.9, 3.7, 3.6, 3.0]
    )
    fit = fit_all(replace(few, holdout_P=few.parameters_P > 9e7), training=training, num_draws=20)
    assert [approach.key for approach in fit.approaches] == ["envelope"]
    said = "1 held-out run not predicted: only approach 3 can, and it is not available"
    assert check_lines(fit)[-1] == said


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
    both = make_points(
        *(np.concatenate([getattr(x, name) for x in (once, again)]) for name in COLUMNS)
    )
    assert seed_spread(both) == pytest.approx(0.004, rel=0.2)


def test_traps_are_named():
    points = simulated(noise=0.001)
    mixed = replace(points, progress_P=np.where(np.arange(len(points)) % 8 == 0, 0.5, 1.0))
    assert any(
        "6 mid-schedule points left out" in warning
        for warning in fit_all(mixed, num_draws=20).warnings
    )
    repeated = replace(points, names=("same run",) * len(points))
    assert any("mid-schedule" in warning for warning in fit_all(repeated, num_draws=20).warnings)
    shapes = points.flops_P * np.where(np.arange(len(points)) % 2, 1.0, 1.2)
    rough = make_points(
        points.parameters_P, points.tokens_P, points.loss_P, flops=shapes, budget=points.budget_P
    )
    assert any(
        "FLOPs per token differ" in warning for warning in fit_all(rough, num_draws=20).warnings
    )


def test_approaches_that_disagree_are_said_to():
    size_P, tokens_P = simulated().parameters_P, simulated().tokens_P
    # A learning rate that suits only small models lifts the loss of large ones: the valley moves,
    # the law bends.
    loss_P = HOFFMANN.loss(size_P, tokens_P) * np.exp(0.008 * np.log(size_P / size_P.min()) ** 2)
    fit = fit_all(make_points(size_P, tokens_P, loss_P, budget=simulated().budget_P), num_draws=20)
    ratio = disagreement(fit.approaches, FURTHER)
    assert ratio > 1.5
    where = "at 1e+21 FLOPs, 10 times the largest budget"
    assert f"{where}, the approaches' optimal sizes differ {ratio:.2f}x" in fit.warnings


def test_losses_whose_intervals_do_not_overlap_are_named_with_both_intervals():
    near, also_near, far = (
        Interval(3.0, 2.9, 3.1),
        Interval(3.15, 3.05, 3.2),
        Interval(3.4, 3.3, 3.5),
    )
    assert contradictions({"1 envelope": near, "2 IsoFLOP": also_near}, "here") == []
    (said,) = contradictions(
        {"1 envelope": near, "2 IsoFLOP": also_near, "3 parametric": far}, "at 1e+21 FLOPs"
    )
    assert said.startswith("at 1e+21 FLOPs, the intervals of the loss do not overlap: ")
    assert (
        "1 envelope 3.0000 [2.9000, 3.1000] and 3 parametric 3.4000 [3.3000, 3.5000]; 2 IsoFLOP"
        in said
    )
    assert "1 envelope 3.0000 [2.9000, 3.1000] and 2 IsoFLOP" not in said
    unknown = Interval(9.0, np.nan, np.nan)
    assert contradictions({"1 envelope": near, "2 IsoFLOP": unknown}, "here") == []


def test_a_fit_says_that_its_approaches_losses_contradict_each_other():
    # Three budgets show approach 2 no floor: its loss falls below that of the law, which has one.
    fit = fit_all(simulated(noise=1e-4, budgets=(1e18, 1e20, 3), seed=1), num_draws=50)
    isoflop, law = (fit.approach(key).loss(FURTHER) for key in ("isoflop", "parametric"))
    assert isoflop.high < law.low
    said = [
        warning for warning in fit.warnings if "the intervals of the loss do not overlap" in warning
    ]
    assert any("1e+21 FLOPs, 10 times the largest budget" in warning for warning in said)


def test_an_approach_these_runs_do_not_allow_is_a_reason_not_an_error():
    rng = np.random.default_rng(0)
    size_P, tokens_P = np.exp(rng.uniform(16, 21, 20)), np.exp(rng.uniform(20, 25, 20))
    fit = fit_all(make_points(size_P, tokens_P, HOFFMANN.loss(size_P, tokens_P)), num_draws=20)
    assert [approach.key for approach in fit.approaches] == ["parametric"]
    assert "approach 2 needs two" in fit.estimates.unavailable["isoflop"]
