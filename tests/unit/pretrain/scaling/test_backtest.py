"""Backtests, how many runs a choice rests on, and intervals beyond the runs."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from pretrain.scaling.backtest import FEWEST_CHECKED, backtests, estimate
from pretrain.scaling.fit import LOSS_OFF, SIZE_OFF, fit_all
from pretrain.scaling.intervals import Interval, widened
from pretrain.scaling.report import answer_lines, fit_lines
from tests.helpers.scaling import BESIROGLU, CS336, HOFFMANN, make_points, simulated

SPREAD = {"budgets": (1e18, 1e21, 7), "num_sizes": 5}


def test_a_backtest_is_the_fit_without_the_budgets_near_the_top():
    points = simulated(BESIROGLU, **SPREAD, noise=0.003, seed=1)
    fit = fit_all(points)
    top = points.budgets[-1]
    (test,) = fit.backtests["isoflop"]  # budgets are 3.16x apart: none at a fourth
    assert test.times == pytest.approx(10)
    for key, tests in fit.backtests.items():
        for test in tests:
            below = points.take(points.budget_P <= 1.01 * top / test.times)
            line = estimate(below)[0][key].line(fit.flops_law)
            vertex = next(valley for valley in fit.valleys if valley.budget == top)
            size = math.exp(line.log_parameters(np.log(top)))
            assert test.size == pytest.approx(size / vertex.parameters)
            assert test.loss == pytest.approx(float(line.loss(np.log(top))) / vertex.loss - 1)
    said = "\n".join(answer_lines(fit, fit.beyond))
    assert said.count("backtest: fitted up to 1/") == len(fit.backtests[fit.approaches[0].key])


def test_without_four_budgets_below_there_is_no_backtest():
    points = simulated(BESIROGLU, budgets=(1e18, 1e20, 4), num_sizes=5)
    assert backtests(points, estimate(points)[0]) == {}
    assert "backtest" not in "\n".join(fit_lines(fit_all(points)))


@pytest.mark.parametrize("noise", [0.002, 0.01])
def test_on_a_grid_the_choice_rests_on_a_tenth_of_the_runs_and_five_at_least(noise):
    sizes, tokens = np.meshgrid(np.geomspace(1e7, 3e8, 6), np.geomspace(1e8, 1e10, 7))
    rng = np.random.default_rng(5)
    loss = BESIROGLU.loss(sizes.ravel(), tokens.ravel())
    points = make_points(
        sizes.ravel(), tokens.ravel(), loss * np.exp(noise * rng.standard_normal(loss.size))
    )
    assert (points.budget_P == points.budgets[-1]).sum() == 1
    fit = fit_all(points)
    first = fit.approaches[0].key
    assert fit.num_left_out[first] >= 0.6 * FEWEST_CHECKED, "those of them near the optimum"
    assert re.search(r"it predicts the loss of \d+ runs there", "\n".join(fit_lines(fit)))


def test_intervals_grow_beyond_the_runs_by_what_published_sweeps_missed():
    fit = fit_all(simulated(BESIROGLU, **SPREAD, noise=0.003, seed=2))
    for law in fit.approaches:
        if law.no_interval:
            continue
        inside, own = fit.optimum(law, fit.largest)[0], law.parameters(np.log(fit.largest))
        assert inside == own, "nothing is added within the budgets"
        for times in (4.0, 10.0, 30.0):
            size, _, loss = fit.optimum(law, times * fit.largest)
            assert size.width >= math.exp(2 * SIZE_OFF * math.sqrt(math.log(times)))
            assert loss.width >= math.exp(2 * LOSS_OFF * math.log(times))
    assert math.isnan(widened(Interval(2.0, math.nan, math.nan), 0.1).high), "it makes none"
    assert widened(Interval(2.0, 1.0, 4.0), 0.0) == Interval(2.0, 1.0, 4.0)


def test_under_the_tied_law_stands_the_one_whose_exponents_may_differ():
    runs = (simulated(BESIROGLU, **SPREAD, noise=0.003, seed=seed) for seed in range(20))
    fit = next(fit for fit in map(fit_all, runs) if fit.approaches[0].key == "tied")
    lines = answer_lines(fit, fit.beyond)
    (line,) = [line for line in lines if "lets the exponents differ" in line]
    size = fit.optimum(fit.approach("parametric"), fit.beyond)[0]
    assert f"N* {size.value / 1e9:.2f}G [" in line


def test_the_default_answer_has_the_doubts_that_an_asked_one_is_refused_for():
    points = simulated(HOFFMANN, budgets=(1e18, 2e18, 4), num_sizes=4, noise=0.03, seed=3)
    said = "\n".join(fit_lines(fit_all(points)))
    assert "doubt: " in said


@pytest.mark.parametrize("law", [BESIROGLU, HOFFMANN, CS336])
@pytest.mark.parametrize("seed", [3, 11, 13])
@pytest.mark.parametrize("changed", [1, 2])
def test_a_recipe_that_changes_between_budgets_is_warned_of(law, seed, changed):
    points = simulated(law, budgets=(1e18, 1e20, 6), num_sizes=5, noise=0.003, seed=seed)
    late_P = points.budget_P >= points.budgets[-changed]
    assert not [line for line in fit_all(points).warnings if "jump" in line]
    fit = fit_all(replace(points, loss_P=points.loss_P * np.where(late_P, 1.05, 1.0)))
    (line,) = [line for line in fit.warnings if "jump" in line]
    low, high = points.budgets[-changed - 1], points.budgets[-changed]
    assert f"between {low:.3g} and {high:.3g} FLOPs" in line


def test_an_outlier_without_a_name_is_named_by_its_size_and_tokens():
    points = simulated(noise=0.003, num_sizes=6)
    loss_P = points.loss_P * np.where(np.arange(len(points)) == 17, 1.2, 1)
    (said,) = [w for w in fit_all(replace(points, loss_P=loss_P)).warnings if "4.5 " in w]
    size, tokens = points.parameters_P[17] / 1e6, points.tokens_P[17] / 1e9
    assert f"(N {size:#.3g}".rstrip(".") in said
    assert f"D {tokens:#.3g}"[:5] in said
