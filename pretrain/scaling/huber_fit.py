"""Approach 3: the Huber fit of L(N, D) = E + A/N^alpha + B/D^beta to final losses.

The objective is the sum over runs of Huber_delta(ln L(N, D) - ln loss). Logarithms make the errors
relative, so that small models with high losses do not dominate. Huber's loss is linear beyond
delta, so that a run that went wrong pulls with a bounded force. It is the sum and not the mean: a
mean of such small numbers is below a solver's default tolerance far from the optimum, and the fit
only looks converged.

The objective has several minima, so the start matters. Variable projection finds it: on a grid over
(alpha, beta) the best E, A, B >= 0 are a linear problem, solved exactly for each cell. L-BFGS goes
from the best cell to the minimum. Legend: P points.

Source: Hoffmann et al. 2022, section 3.3; Besiroglu et al. 2024 for what can go wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_pipeline.errors import DataError
from pretrain.scaling.law import Law, log_loss, log_terms
from pretrain.scaling.points import Array, Points
from pretrain.scaling.projection import EXPONENT_GRID, project

HUBER_DELTA = 1e-3
FEWEST_POINTS = 6  # five numbers and one point to contradict them
RELATIVE_TOLERANCE = (
    1e-12  # restarts of L-BFGS end when one gains less than this part of the objective
)
PERTURBATION = 0.05


@dataclass(frozen=True, kw_only=True)
class ParametricFit:
    """Approach 3's law, with what is needed to judge it."""

    law: Law
    objective: float  # sum of Huber over the points
    start: Law  # variable projection's
    start_objective: float
    num_points: int
    delta: float
    mean_error: float  # mean |L - loss| / loss over the fitted points
    warnings: tuple[str, ...] = ()


def fit_parametric(points: Points, delta: float = HUBER_DELTA) -> ParametricFit:
    """Fit the law; DataError for too few points, or if the best law does not fall with N and D."""
    if len(points) < FEWEST_POINTS:
        raise DataError(
            f"{points.source}: {len(points)} usable points, approach 3 needs at least "
            f"{FEWEST_POINTS} for its five "
            "numbers; add runs"
        )
    for values_P, name in ((points.parameters_P, "N"), (points.tokens_P, "D")):
        if len(np.unique(values_P)) < 3:
            raise DataError(
                f"{points.source}: fewer than 3 distinct {name}; an exponent needs at least 3"
            )
    n_P, d_P, l_P = (
        np.log(values) for values in (points.parameters_P, points.tokens_P, points.loss_P)
    )
    center = np.array([n_P.mean(), d_P.mean()])
    # Centered logarithms keep A and B near 1 and decorrelate them from the exponents.
    n_P, d_P = n_P - center[0], d_P - center[1]
    start, on_edge = project(n_P, d_P, points.loss_P)
    theta, objective = minimize(start, n_P, d_P, l_P, delta)
    if not min(theta[3:]) > 0:
        raise DataError(
            f"{points.source}: the best law has alpha={theta[3]:.3g} and beta={theta[4]:.3g}; the "
            "loss must fall "
            "with N and with D (are all runs tuned and finished?)"
        )
    start_objective = huber_sum(start, n_P, d_P, l_P, delta)[0]
    errors_P = np.abs(np.expm1(log_loss(theta, n_P, d_P) - l_P))
    return ParametricFit(
        law=Law.from_theta(uncenter(theta, center)),
        objective=objective,
        start=Law.from_theta(uncenter(start, center)),
        start_objective=start_objective,
        num_points=len(points),
        delta=delta,
        mean_error=float(errors_P.mean()),
        warnings=tuple(
            _warnings(theta, start, objective, start_objective, on_edge, (n_P, d_P, l_P), delta)
        ),
    )


def uncenter(theta: Array, center: Array) -> Array:
    """Laws fitted to logarithms from which `center` was taken, as laws of N and D themselves."""
    moved = theta.copy()
    moved[..., 1] += theta[..., 3] * center[0]
    moved[..., 2] += theta[..., 4] * center[1]
    return moved


def huber_sum(
    theta: Array, n_P: Array, d_P: Array, l_P: Array, delta: float
) -> tuple[float, Array]:
    """Sum over points of Huber_delta(ln L - ln loss), and its gradient by theta."""
    terms = log_terms(theta, n_P, d_P)
    peak_P = terms.max(axis=0)
    shares = np.exp(terms - peak_P)
    total_P = shares.sum(axis=0)
    shares /= total_P
    residual_P = peak_P + np.log(total_P) - l_P
    size_P = np.abs(residual_P)
    values_P = np.where(size_P <= delta, 0.5 * residual_P**2, delta * (size_P - 0.5 * delta))
    slope_P = np.clip(residual_P, -delta, delta)
    e, a, b = shares @ slope_P
    return float(values_P.sum()), np.array(
        [e, a, b, -(shares[1] * n_P) @ slope_P, -(shares[2] * d_P) @ slope_P]
    )


def minimize(start: Array, n_P: Array, d_P: Array, l_P: Array, delta: float) -> tuple[Array, float]:
    """Return (law, objective) of L-BFGS from `start`, restarted until it gains nothing."""
    from scipy.optimize import minimize

    theta, objective = start, huber_sum(start, n_P, d_P, l_P, delta)[0]
    for _ in range(20):
        scale = 1 / max(
            objective, 1e-30
        )  # the solver's tolerances are absolute, and the objective is near 1e-5

        def scaled(candidate: Array, scale: float = scale) -> tuple[float, Array]:
            value, gradient = huber_sum(candidate, n_P, d_P, l_P, delta)
            return value * scale, gradient * scale

        options = {"maxiter": 20_000, "maxfun": 100_000, "ftol": 1e-16, "gtol": 1e-10, "maxcor": 30}
        result = minimize(scaled, theta, jac=True, method="L-BFGS-B", options=options)
        gain = objective - result.fun / scale
        if gain > 0:
            theta, objective = result.x, float(result.fun / scale)
        if gain <= RELATIVE_TOLERANCE * objective:
            break
    return theta, objective


def _warnings(
    theta: Array,
    start: Array,
    objective: float,
    start_objective: float,
    on_edge: bool,
    data: tuple[Array, Array, Array],
    delta: float,
) -> list[str]:
    found: list[str] = []
    n_P, d_P, l_P = data
    if np.allclose(theta, start, rtol=0, atol=1e-9) and start_objective > 1e-12 * len(l_P):
        found.append(
            "the fit did not move from its start: the optimizer failed, do not use these numbers"
        )
    # A start near the optimum must return to it; one that ends lower shows another minimum.
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=5)
    again = minimize(theta + PERTURBATION * signs, n_P, d_P, l_P, delta)[1]
    if again < objective * (1 - 1e-6) - 1e-15:
        found.append(
            f"a restart near the optimum found a lower one ({again:.6g} < {objective:.6g}): "
            "several minima"
        )
    if on_edge:
        found.append(
            "the best start is on the edge of the exponents' grid "
            f"{EXPONENT_GRID[0]}..{EXPONENT_GRID[-1]}"
        )
    shares = np.exp(log_terms(theta, n_P, d_P) - log_loss(theta, n_P, d_P)).max(axis=-1)
    for share, name in zip(shares, ("floor E", "size term A", "data term B"), strict=True):
        if share < 1e-3:
            found.append(
                f"the {name} is at most {share:.1g} of every loss: these runs do not determine it"
            )
    return found
