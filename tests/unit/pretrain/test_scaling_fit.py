"""Intervals that cover, fits side by side, and errors on runs that were not fitted."""

from __future__ import annotations

import re
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import stdtrit

from foundation.errors import DataError
from pretrain.scaling import charts
from pretrain.scaling.fit import fit_all
from pretrain.scaling.law import log_optimum
from pretrain.scaling.report import fit_lines, left_out_table, seed_spread
from tests.helpers.scaling import BESIROGLU, HOFFMANN, SIX_N, make_points, simulated
from tests.interval_coverage import Sweep, measure, noisy

FURTHER = float(np.log(1e21))  # ten times the largest simulated budget
COLUMNS = ("parameters_P", "tokens_P", "loss_P")


def test_intervals_hold_the_truth_as_often_as_they_say():
    """A part of `make coverage`: 60 sweeps of five budgets whose runs share an error."""
    cells = (Sweep(HOFFMANN, 0.005, "shared", 5, 500 + seed) for seed in range(60))
    tallies = {cell.approach: tally for cell, tally in measure(cells).items()}
    tallies = {title: tallies[title] for title in ("2 IsoFLOP", "3 parametric")}
    for tally in tallies.values():
        few = {name: held for name, (held, count) in tally.held.items() if held < 0.85 * count}
        assert few == {}
    assert min(count for tally in tallies.values() for _, count in tally.held.values()) >= 55


@pytest.mark.parametrize("seed", range(4))
def test_an_estimate_lies_between_the_ends_of_its_interval_where_budgets_differ(seed):
    points = noisy(Sweep(BESIROGLU, 0.02, "shared", 6, seed))
    for approach in fit_all(points).approaches:
        found = [approach.powers(SIX_N)[0]]
        if approach.key == "parametric":
            found += [approach.parameters(FURTHER), approach.loss(FURTHER)]
        for each in found if approach.key in ("isoflop", "parametric") else ():
            assert each.low < each.value < each.high


@pytest.mark.parametrize(("key", "free"), [("isoflop", 3), ("parametric", 4)])
def test_an_interval_is_students_t_of_the_fits_without_each_budget(key, free):
    points = simulated(budgets=(1e18, 1e20, 5), num_sizes=5, noise=0.02, seed=3)
    fit = fit_all(points)
    without = [
        fit_all(points.take(points.budget_P != budget)).approach(key) for budget in points.budgets
    ]
    for of, scale in (
        (lambda law: law.powers(SIX_N)[0], float),
        (lambda law: law.parameters(FURTHER), np.log),
    ):
        interval, value_G = (
            of(fit.approach(key)),
            np.array([scale(of(law).value) for law in without]),
        )
        error = np.sqrt(0.8 * ((value_G - value_G.mean()) ** 2).sum())
        shared = 0.01 if key == "isoflop" and scale is np.log else 0  # of every vertex alike
        half_width = np.hypot(stdtrit(free, 0.975) * error, 1.96 * shared)
        ends = scale(interval.value) + half_width * np.array([-1, 1])
        assert [scale(interval.low), scale(interval.high)] == pytest.approx(
            ends, abs=half_width / 500
        )


def test_too_few_budgets_for_an_interval_get_none_and_the_reason():
    fit = fit_all(simulated(budgets=(1e18, 1e20, 3), num_sizes=5, noise=0.002))
    isoflop, law = (fit.approach(key) for key in ("isoflop", "parametric"))
    for approach in (isoflop, law):
        assert np.isnan(approach.parameters(FURTHER).low)
        assert np.isnan(approach.loss(FURTHER).low)
    said = "\n".join(fit_lines(fit, verbose=True))
    assert "2 IsoFLOP has no intervals: 3 budgets with a vertex" in said
    assert "3 parametric has no intervals: 3 budgets; an interval needs 4" in said
    assert "1 lowest runs has no intervals: its sizes are those of single runs" in said
    assert re.search(r"^2 IsoFLOP .* 0\.\d{3}$", said, re.M)


def test_an_outlier_hardly_widens_the_intervals_of_approach_3():
    points = simulated(noise=0.002, num_sizes=6)
    loss_P = points.loss_P.copy()
    loss_P[7] *= 1.3
    widths = [
        fit_all(replace(points, loss_P=losses)).approach("parametric").parameters(FURTHER).width
        for losses in (points.loss_P, loss_P)
    ]
    assert np.log(widths[1]) < 1.5 * np.log(widths[0])


def test_a_fit_of_240_runs_takes_well_under_a_minute():
    points = simulated(budgets=(1e18, 1e21, 24), num_sizes=10, noise=0.003)
    assert len(points) == 240
    begin = time.process_time()
    fit = fit_all(points)
    assert time.process_time() - begin < 60
    assert {approach.key for approach in fit.approaches} == {
        "lowest",
        "isoflop",
        "parametric",
        "tied",
    }
    law = fit.approach("parametric")
    a, b = law.powers(fit.flops_law)
    assert a.low < HOFFMANN.beta / (HOFFMANN.alpha + HOFFMANN.beta) < a.high
    assert a.value + b.value == pytest.approx(1)
    assert (
        law.parameters(FURTHER).low
        < np.exp(log_optimum(HOFFMANN.theta, FURTHER, SIX_N)[0])
        < law.parameters(FURTHER).high
    )


def test_the_largest_budget_is_predicted_by_the_rest():
    left_out = fit_all(simulated(noise=0.001)).left_out
    assert left_out.budget == pytest.approx(1e20)
    assert left_out.error["parametric"] < 0.003
    size, loss = left_out.optimum["parametric"]
    assert size == pytest.approx(left_out.measured[0], rel=0.15)
    assert loss == pytest.approx(left_out.measured[1], rel=0.003)
    assert fit_all(simulated(budgets=(1e18, 1e19, 2))).left_out is None


def test_a_law_that_changes_beyond_the_smaller_budgets_shows_in_the_error_of_the_largest():
    points = simulated()
    last = points.budget_P == points.budgets[-1]
    broken = replace(points, loss_P=np.where(last, points.loss_P * 1.05, points.loss_P))
    assert fit_all(broken).left_out.error["parametric"] == pytest.approx(0.05, abs=0.01)


def test_every_error_is_predicted_minus_measured():
    points = simulated()
    held = points.budget_P == points.budgets[-1]
    # These runs end a tenth below what the law promises: too much was predicted.
    lucky = replace(
        points, holdout_P=held, loss_P=np.where(held, points.loss_P / 1.1, points.loss_P)
    )
    fit = fit_all(lucky)
    assert [item.error for item in fit.holdouts] == pytest.approx([0.1] * 8, abs=1e-3)
    assert re.search(r"held out point \d+: .* \(\+10\.\d\d%\)", "\n".join(fit_lines(fit)))
    left_out = fit_all(replace(lucky, holdout_P=np.zeros(len(points), bool)))
    assert left_out.left_out.error["parametric"] == pytest.approx(0.1, abs=1e-3)
    (row,) = [row for row in left_out_table(left_out) if row[0] == "3 parametric"]
    assert row[-1].startswith("+10.")
    assert "errors are predicted minus measured" in "\n".join(fit_lines(left_out, verbose=True))
    drawn = charts.residuals(left_out).axes[0]
    shown_P = np.asarray(drawn.collections[0].get_offsets())[:, 1]
    law = left_out.law.fit.law
    assert shown_P == pytest.approx(
        100 * (law.loss(points.parameters_P, points.tokens_P) / lucky.loss_P - 1)
    )
    assert drawn.get_ylabel().startswith("(predicted - measured)")


def test_held_out_runs_are_predicted_and_never_fitted():
    points = simulated(noise=0.002)
    held = replace(points, holdout_P=points.budget_P == points.budgets[-1])
    fit = fit_all(held)
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
    assert sum("mid-schedule" in item.reason for item in fit_all(mixed).points.excluded) == 6
    repeated = replace(points, names=("same run",) * len(points))
    assert any("mid-schedule" in warning for warning in fit_all(repeated).warnings)
    shapes = points.flops_P * np.where(np.arange(len(points)) % 2, 1.0, 1.2)
    rough = make_points(
        points.parameters_P, points.tokens_P, points.loss_P, flops=shapes, budget=points.budget_P
    )
    assert any("FLOPs per token differ" in warning for warning in fit_all(rough).warnings)


def test_an_approach_these_runs_do_not_allow_is_a_reason_not_an_error():
    rng = np.random.default_rng(0)
    size_P, tokens_P = np.exp(rng.uniform(16, 21, 20)), np.exp(rng.uniform(20, 25, 20))
    fit = fit_all(make_points(size_P, tokens_P, HOFFMANN.loss(size_P, tokens_P)))
    assert {approach.key for approach in fit.approaches} == {"parametric", "tied"}
    assert "approach 2 needs two" in fit.unavailable["isoflop"]


def test_flops_per_token_that_fall_with_the_size_are_refused():
    points = simulated(num_sizes=5)
    falling = replace(points, flops_P=1e12 * points.tokens_P / points.parameters_P)
    with pytest.raises(DataError, match=r"FLOPs per token go as N\^-1, so larger models cost no"):
        fit_all(falling)


def test_intervals_without_an_end_cost_no_warning():
    points = simulated(num_sizes=3, budgets=(1e18, 1e20, 5), noise=0.005, seed=1)
    loss_P = points.loss_P.copy()
    loss_P[4] = 100.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = fit_all(replace(points, loss_P=loss_P))
        assert fit_lines(fit)
        assert fit.approach("parametric").parameters(FURTHER).value > 0
