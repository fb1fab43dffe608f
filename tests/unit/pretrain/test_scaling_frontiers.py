"""Approaches 1 and 2: what they find on known laws, and what they refuse."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest

from foundation.errors import DataError
from pretrain.scaling import frontier
from pretrain.scaling.frontier import fit_frontier, fit_isoflop, fit_lowest_runs
from pretrain.scaling.law import FlopsLaw, log_optimum
from tests.helpers.scaling import HOFFMANN, SIX_N, cs336, make_points, simulated

A_TRUE = HOFFMANN.beta / (HOFFMANN.alpha + HOFFMANN.beta)


def test_parabolas_find_the_exponent_and_sizes_of_the_law():
    fit = fit_isoflop(simulated(spread=3))
    assert fit.frontier.power == pytest.approx(A_TRUE, abs=1e-3)
    size = np.exp(fit.frontier.log_parameters(np.log(1e19)))
    assert size == pytest.approx(
        np.exp(log_optimum(HOFFMANN.theta, np.log(1e19), SIX_N)[0]), rel=0.03
    )
    assert fit.warnings == ()


def test_parabolas_recover_cs336_within_a_thousandth():
    fit = fit_isoflop(cs336())
    assert fit.frontier.power == pytest.approx(0.514286, abs=1e-3)


def test_a_floor_of_the_loss_is_seen_and_extrapolates():
    log_flops_F = np.log(np.geomspace(1e17, 1e20, 5))
    loss_F = 1.7 + 2.1 * np.exp(-0.15 * (log_flops_F - log_flops_F[0]))
    frontier = fit_frontier(log_flops_F, np.linspace(16, 19, 5), loss_F)
    assert frontier.floor == pytest.approx(1.7, abs=1e-3)
    later = np.log(1e22)
    assert frontier.loss(later) == pytest.approx(
        1.7 + 2.1 * np.exp(-0.15 * (later - log_flops_F[0])), abs=1e-3
    )


def test_vertex_outside_the_sizes_is_not_used_and_said():
    points = simulated()
    far = points.budget_P == points.budgets[-1]
    kept = points.take(~far | (points.parameters_P < np.median(points.parameters_P[far]) * 0.6))
    fit = fit_isoflop(kept)
    assert [valley.is_used for valley in fit.valleys] == [True] * 5 + [False]
    assert "is above the sizes" in fit.valleys[-1].reason
    assert any(line.startswith("1 budget not used (1e+20: vertex") for line in fit.warnings)


def test_losses_that_bend_downwards_are_no_valley():
    size_P = np.tile(np.geomspace(1e7, 1e8, 5), 2)
    budget_P = np.repeat([1e17, 1e18], 5)
    loss_P = 4 - 0.1 * np.tile(np.linspace(-1, 1, 5), 2) ** 2
    points = make_points(size_P, budget_P / 6 / size_P, loss_P, budget=budget_P, source="runs.csv")
    with pytest.raises(DataError, match=r"0 of 2 budgets have a vertex.*curve downward"):
        fit_isoflop(points)


def test_a_vertex_that_is_too_far_for_a_number_costs_no_warning():
    points = simulated(budgets=(1e18, 1e20, 3), num_sizes=5)
    straight_P = 3 - 0.01 * np.log(points.parameters_P) + 1e-7 * np.log(points.parameters_P) ** 2
    is_first_P = points.budget_P == points.budgets[0]
    loss_P = np.where(is_first_P, straight_P, points.loss_P)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = fit_isoflop(replace(points, loss_P=loss_P))
    assert np.isinf(fit.valleys[0].parameters)
    assert not fit.valleys[0].is_used


def test_a_wide_grid_biases_the_vertex_which_is_why_it_is_said(monkeypatch):
    monkeypatch.setattr(frontier, "REACH", np.inf)
    truth = log_optimum(HOFFMANN.theta, np.log(1e19), SIX_N)[0]
    narrow, wide = (
        abs(
            float(
                fit_isoflop(simulated(spread=spread)).frontier.log_parameters(np.log(1e19)) - truth
            )
        )
        for spread in (2, 10)
    )
    assert wide > 3 * narrow


def test_exponent_of_tokens_follows_from_the_flops_per_token():
    law = FlopsLaw(scale=40.0, power=0.9)
    a, b = fit_isoflop(simulated(spread=3, flops_law=law)).frontier.exponents(law)
    assert b == pytest.approx(1 - 0.9 * a)
    assert a == pytest.approx(HOFFMANN.beta / (HOFFMANN.alpha + 0.9 * HOFFMANN.beta), abs=1e-3)


def test_a_parabola_goes_through_the_sizes_near_its_budgets_lowest_run(monkeypatch):
    points = simulated(num_sizes=13, spread=20)
    fit = fit_isoflop(points)
    assert all(valley.largest / valley.smallest < 36 for valley in fit.valleys)
    # Where the parabola of all sizes is off, the local one is not.
    truth = float(log_optimum(HOFFMANN.theta, np.log(1e22), SIX_N)[0])
    errors = []
    for reach in (frontier.REACH, np.inf):
        monkeypatch.setattr(frontier, "REACH", reach)
        found = fit_isoflop(points).frontier.log_parameters(np.log(1e22))
        errors.append(abs(float(found) - truth))
    assert errors[1] > 2 * errors[0]


def test_few_sizes_are_said():
    few = fit_isoflop(simulated(num_sizes=4, spread=3))
    assert any("of fewer than 5 sizes" in line for line in few.warnings)


def test_approach_1_is_a_line_through_lowest_runs_between_a_smaller_and_a_larger_size():
    points = simulated(spread=2.9)
    assert fit_lowest_runs(points).frontier.power == pytest.approx(A_TRUE, abs=0.02)
    with pytest.raises(DataError, match="approach 1 needs two sizes that are lowest"):
        fit_lowest_runs(simulated(num_sizes=1))
