"""Runs that do not follow the law: outliers are named with their effect, a kink is noticed."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from pretrain.scaling.fit import fit_all
from pretrain.scaling.huber_fit import fit_parametric
from pretrain.scaling.intervals import as_size
from pretrain.scaling.isoflop import fit_isoflop
from pretrain.scaling.misfit import misfit_warnings
from tests.helpers.scaling import HOFFMANN, SIX_N, simulated


def warnings_about(points) -> str:
    return "\n".join(misfit_warnings(points, fit_parametric(points), SIX_N))


def test_runs_that_follow_the_law_are_not_warned_of():
    for seed in range(12):
        assert warnings_about(simulated(noise=0.005, num_sizes=5, seed=seed)) == ""
    assert warnings_about(simulated()) == ""


@pytest.mark.parametrize("factor", [1.1, 40.0])
def test_an_outlier_is_named_with_its_effect(factor):
    points = simulated(noise=0.003, num_sizes=6)
    loss_P = points.loss_P.copy()
    loss_P[17] *= factor
    said = warnings_about(replace(points, loss_P=loss_P))
    assert said.startswith("1 run off the law by over 4.5 standard deviations: point 17 (loss ")
    without = fit_parametric(points.take(np.arange(len(points)) != 17)).law
    assert re.search(rf"B \S+ -> {without.B:.4g};", said)
    assert said.endswith(
        "; if a run went wrong, leave it out with --exclude 'name=point 17: reason'"
    )


def test_an_outliers_effect_on_approach_2_is_shown():
    points = simulated(noise=0.003, num_sizes=6, budgets=(1e18, 1e20, 5))
    loss_P = points.loss_P.copy()
    loss_P[9] = 100.0  # whose budget has no valley with it
    fit = fit_all(replace(points, loss_P=loss_P))
    said = "\n".join(fit.warnings)
    without = fit_isoflop(points.take(np.arange(len(points)) != 9))
    size = as_size(float(np.exp(without.frontier.log_parameters(np.log(1e21)))))
    assert re.search(rf"; approach 2: a \S+ -> \S+, N\* at 1e\+21 \S+ -> {size}, by 4 -> 5 ", said)


def test_a_kink_is_noticed_by_the_errors_trend():
    points = simulated(noise=0.002, num_sizes=5)
    kink_P = np.exp(0.03 * np.maximum(0, np.log(points.flops_P / 1e19)))
    said = warnings_about(replace(points, loss_P=points.loss_P * kink_P))
    assert "approach 3's errors have a trend: predicted minus measured " in said
    assert "the runs do not follow one law" in said


def test_a_learning_rate_that_suits_only_small_models_is_a_trend():
    points = simulated(noise=0.001)
    tilt_P = np.exp(0.01 * np.log(points.parameters_P / points.parameters_P.min()) ** 2)
    assert "errors have a trend" in warnings_about(replace(points, loss_P=points.loss_P * tilt_P))


def test_a_fit_warns_of_its_outliers():
    points = simulated(noise=0.003, num_sizes=6)
    loss_P = points.loss_P.copy()
    loss_P[0] = 100.0
    fit = fit_all(replace(points, loss_P=loss_P))
    assert any("point 0 (loss 100.0000, +" in warning for warning in fit.warnings)
    # And it hardly moves approach 3.
    law = fit.estimates.parametric.law
    assert law.alpha == pytest.approx(HOFFMANN.alpha, rel=0.15)


def test_a_run_far_off_is_named_among_nine_too():
    points = simulated(num_sizes=3, budgets=(1e18, 1e20, 3), noise=0.005, seed=1)
    assert warnings_about(points) == ""
    loss_P = points.loss_P.copy()
    loss_P[4] = 100.0
    said = warnings_about(replace(points, loss_P=loss_P))
    assert said.startswith("1 run off the law by over 4.5 standard deviations: point 4 (loss 100")


def test_a_trend_has_the_sign_of_all_errors():
    points = simulated(noise=0.002, num_sizes=5)
    kink_P = np.exp(0.05 * np.maximum(0, np.log(points.flops_P / 1e19)))
    bent = replace(points, loss_P=points.loss_P * kink_P)
    trend = r"predicted minus measured ([-+.\d]+)%.* ([-+.\d]+)% from"
    said = re.search(trend, warnings_about(bent))
    law = fit_parametric(bent).law
    last = bent.take(bent.budget_P == bent.budgets[-1])
    error_P = law.loss(last.parameters_P, last.tokens_P) / last.loss_P - 1
    assert said
    assert np.sign(float(said[2])) == np.sign(error_P.mean())
