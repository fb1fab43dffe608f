"""Approach 3 against laws that are known: simulated, Stanford's CS336 points, the OLMo ladder's
published fit.
"""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from foundation.errors import DataError
from pretrain.scaling.fit import fit_all
from pretrain.scaling.law import (
    FlopsLaw,
    Law,
    exponents,
    fit_flops_law,
    fit_parametric,
    huber_sum,
    log_loss,
    log_optimum,
    minimize,
)
from pretrain.scaling.report import law_intervals
from pretrain.scaling.table import Columns, read_points
from tests.helpers.scaling import (
    BESIROGLU,
    HOFFMANN,
    PUBLISHED_DATA,
    SIX_N,
    cs336,
    make_points,
    simulated,
)

TINY = Law(E=0.9, A=12.0, B=900.0, alpha=0.21, beta=0.55)


def as_row(law: Law) -> list[float]:
    return [law.E, law.A, law.B, law.alpha, law.beta]


@pytest.mark.parametrize("law", [HOFFMANN, BESIROGLU, TINY])
def test_noise_free_runs_give_their_law_back(law):
    fit = fit_parametric(simulated(law))
    assert as_row(fit.law) == pytest.approx(as_row(law), rel=1e-5)
    assert fit.undetermined == ()


def test_cs336_points_are_recovered_to_1e_5():
    points = cs336()
    fit = fit_parametric(points)
    assert as_row(fit.law) == pytest.approx([2.69, 1606.4, 3210.7, 0.34, 0.36], rel=1e-5)
    flops_law = fit_flops_law(points.parameters_P, points.tokens_P, points.flops_P)
    assert flops_law == FlopsLaw()
    assert exponents(fit.law.theta, flops_law)[0] == pytest.approx(0.514286, abs=1e-6)


def olmo_ladder():
    columns = Columns(loss="c4_loss", name="run")
    return read_points(PUBLISHED_DATA / "olmo_ladder.csv", columns, where=["mode=train"])


def test_olmo_ladder_fit_predicts_what_was_published():
    """The published fit: the 16 training rungs, loss averaged over the last 5 evaluations, sum of
    Huber 1e-3.
    """
    points = olmo_ladder()
    assert len(points) == 16
    fit = fit_parametric(points)
    assert fit.law.loss(13202396160, 5000088518656.0) == pytest.approx(2.3443873, abs=1e-5)
    assert fit.mean_error == pytest.approx(0.00247307, abs=1e-5)


def test_no_start_of_a_grid_ends_lower_than_the_one_start_of_variable_projection():
    points = simulated(noise=0.003, seed=3)
    fit = fit_parametric(points)
    n_P, d_P, l_P = (
        np.log(values) for values in (points.parameters_P, points.tokens_P, points.loss_P)
    )
    n_P, d_P = n_P - n_P.mean(), d_P - d_P.mean()
    grid = itertools.product(
        (-1.0, 0.0, 1.0), (-2.0, 0.0, 1.0), (-2.0, 0.0, 1.0), (0.1, 0.5, 1.0), (0.1, 0.5, 1.0)
    )
    ends = [
        minimize(np.array(start), n_P, d_P, l_P, 1e-3)[1]
        for start in itertools.islice(grid, 0, None, 4)
    ]
    assert min(ends) == pytest.approx(fit.objective, rel=1e-7)


def test_gradient_of_the_objective_matches_differences():
    points = simulated(noise=0.01)
    data = tuple(np.log(values) for values in (points.parameters_P, points.tokens_P, points.loss_P))
    theta = HOFFMANN.theta + np.array([0.01, -0.02, 0.02, 0.001, -0.001])
    _, gradient = huber_sum(theta, *data, 1e-3)
    for index in range(5):
        step = np.zeros(5)
        step[index] = 1e-7
        difference = (
            huber_sum(theta + step, *data, 1e-3)[0] - huber_sum(theta - step, *data, 1e-3)[0]
        )
        assert gradient[index] == pytest.approx(difference / 2e-7, rel=1e-4)


def test_outliers_hardly_move_the_fit():
    points = simulated()
    points.loss_P[[3, 17, 30]] *= 1.2
    moved = np.array(as_row(fit_parametric(points).law)) / as_row(HOFFMANN)
    assert moved == pytest.approx(1, rel=0.02)


def test_a_size_term_the_runs_do_not_show_is_said():
    points = simulated()
    flat = make_points(points.parameters_P, points.tokens_P, 1.5 + 400 * points.tokens_P**-0.3)
    assert fit_parametric(flat).undetermined == ("size term A",)


def test_too_few_points_or_lengths_are_refused():
    points = simulated()
    with pytest.raises(DataError, match="5 usable points, a law of N and D needs at least 6"):
        fit_parametric(points.take(np.arange(5)))
    with pytest.raises(DataError, match="fewer than 3 distinct N"):
        fit_parametric(
            make_points([1e7] * 4 + [2e7] * 4, np.arange(1, 9) * 1e9, np.linspace(4, 3, 8))
        )


def test_a_loss_that_grows_with_size_is_refused():
    points = simulated()
    worse = HOFFMANN.loss(points.parameters_P, points.tokens_P) * (points.parameters_P / 1e8) ** 0.3
    with pytest.raises(DataError, match="the loss must fall with N and with D"):
        fit_parametric(make_points(points.parameters_P, points.tokens_P, worse))


def test_closed_form_optimum_is_the_lowest_loss_on_the_line_of_equal_flops():
    flops_law = FlopsLaw(scale=40.0, power=0.93)
    n_star, d_star = log_optimum(HOFFMANN.theta, np.log(1e20), flops_law)
    assert flops_law.log_flops(n_star, d_star) == pytest.approx(np.log(1e20))
    n_X = n_star + np.linspace(-1, 1, 20001)
    loss_X = log_loss(HOFFMANN.theta, n_X, flops_law.log_tokens(np.log(1e20), n_X))
    assert n_X[loss_X.argmin()] == pytest.approx(float(n_star), abs=2e-4)
    further = log_optimum(HOFFMANN.theta, np.log(1e22), flops_law)
    a, b = exponents(HOFFMANN.theta, flops_law)
    assert (further[0] - n_star) / np.log(100) == pytest.approx(float(a))
    assert (further[1] - d_star) / np.log(100) == pytest.approx(float(b))


def test_flops_per_token_are_fitted_as_a_power_and_kept_exact_for_6n():
    points = simulated(flops_law=FlopsLaw(scale=40.0, power=0.93))
    found = fit_flops_law(points.parameters_P, points.tokens_P, points.flops_P)
    assert (found.scale, found.power) == pytest.approx((40.0, 0.93), rel=1e-9)
    assert found.largest_error < 1e-9


CHINCHILLA = 5.76e23  # FLOPs, spent on 70B parameters and 1.4T tokens
UNROUNDED = Law(
    E=np.exp(0.5267228), A=np.exp(6.0073404), B=np.exp(6.0179186), alpha=0.33917084, beta=0.2849083
)


@pytest.mark.parametrize(
    ("law", "parameters", "tokens"),
    [
        (BESIROGLU, 70e9, 1.4e12),  # agrees with approaches 1 and 2, as Besiroglu et al. found
        (UNROUNDED, 40e9, 2.4e12),  # what Hoffmann et al. published of approach 3
        (HOFFMANN, 32e9, 3.0e12),  # its rounded exponents
    ],
)
def test_published_laws_have_their_published_optimum_at_chinchillas_budget(law, parameters, tokens):
    n, d = log_optimum(law.theta, np.log(CHINCHILLA), SIX_N)
    assert np.exp([n, d]) == pytest.approx([parameters, tokens], rel=0.06)


def test_intervals_are_as_wide_as_the_published_ones_of_chinchillas_points():
    """Besiroglu et al. 2024 published standard errors of their fit to 240 points. Their points are
    not ours to keep. Simulated ones over Hoffmann et al.'s budgets, with the noise of a fit to
    those, have about the same.
    """
    published = {"A": 124.58, "B": 1293.23, "E": 0.03, "alpha": 0.02, "beta": 0.02, "a": 0.02}
    widths = {name: list[float]() for name in published}
    for seed in range(8):
        points = simulated(
            BESIROGLU, budgets=(6e18, 3e21, 9), num_sizes=27, noise=0.0125, seed=seed
        )
        fit = fit_all(points)
        a, _ = fit.approach("parametric").powers(SIX_N)
        for name, interval in {**law_intervals(fit), "a": a}.items():
            widths[name].append(interval.high - interval.low)
    for name, error in published.items():
        assert 0.7 < np.median(widths[name]) / (2 * 1.96 * error) < (2 if name == "E" else 1.5), (
            name
        )
    # "Implausibly narrow": Hoffmann et al. published 0.454 to 0.455, of about 400 runs.
    assert min(widths["a"]) > 0.03


def test_a_tied_law_is_given_back_by_its_runs():
    truth = Law(E=1.7, A=300.0, B=900.0, alpha=0.31, beta=0.31)
    assert as_row(fit_parametric(simulated(truth), tied=True).law) == pytest.approx(
        as_row(truth), rel=1e-5
    )


def test_a_tied_law_predicts_the_olmo_ladders_largest_run_better():
    """13B parameters over 5T tokens ended at 2.4379; the ladder's 16 runs are up to 1,000 times
    smaller.
    """
    errors = [
        abs(
            fit_parametric(olmo_ladder(), tied=tied).law.loss(13202396160, 5000088518656.0) - 2.4379
        )
        for tied in (False, True)
    ]
    assert errors[1] < 0.75 * errors[0]


def test_a_fit_of_10_000_runs_with_intervals_takes_less_than_half_a_minute():
    points = simulated(budgets=(1e18, 1e21, 100), num_sizes=100, noise=0.01)
    begin = time.process_time()
    _, free, groups = fit_parametric(points).left_out(points, SIX_N)
    assert (free, groups) == (19, "20 groups of runs")
    assert time.process_time() - begin < 30
