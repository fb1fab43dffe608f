"""How flat the optimum of a fit is, and reasons not to rely on its predictions.

Legend: X sizes.
"""

from __future__ import annotations

import math

import numpy as np

from foundation.errors import ConfigError
from pretrain.scaling.fit import Fit, disagreement, loss_interval
from pretrain.scaling.frontier import Approach, FrontierFit
from pretrain.scaling.intervals import as_loss, as_size, shown
from pretrain.scaling.law import LawLine, log_loss
from pretrain.scaling.table import Array

FURTHEST = 100.0  # times the largest budget (or below the smallest by as much)
FURTHEST_UNCHECKED = 10.0  # with two budgets, which nothing checks
WIDEST = 10.0  # high over low end of the interval of N*
LARGEST_DISAGREEMENT = 3.0
FURTHEST_AXIS = 30.0  # times the largest N or D, for the loss of one run
WIDEST_LOSS = 1.2  # high over low end of the interval of one run's loss
BAND = 0.01  # sizes whose loss is within this part of the least are near-optimal
BAND_REACH = np.log(100.0)


def preferred(fit: Fit, key: str = "") -> Approach:
    """Return the law of that key, or the one that comes first; ConfigError if it is missing."""
    approach = fit.approach(key) if key else fit.approaches[0]
    if approach is None:
        raise ConfigError(f"law {key!r} is not available for these runs: {fit.unavailable[key]}")
    return approach


def law_of_runs(fit: Fit) -> Approach:
    """The law of N and D that comes first; ConfigError if these runs allow none."""
    if fit.law is None:
        reason = fit.unavailable["parametric"]
        raise ConfigError(f"this needs a law of N and D, and there is none: {reason}")
    return fit.law


def near_optimal_band(fit: Fit, flops: float, approach: Approach) -> tuple[float, float] | None:
    """The smallest and largest size whose loss at these FLOPs is within BAND of the least.

    None for approach 1, and if the approach has no optimum there.
    """
    n_star = float(approach.line.log_parameters(np.log(flops)))
    if isinstance(approach.line, LawLine):
        n_X = n_star + np.linspace(-BAND_REACH, BAND_REACH, 8001)
        d_X = fit.flops_law.log_tokens(np.log(flops), n_X)
        loss_X = np.exp(log_loss(approach.line.theta, n_X, d_X))
        near = n_X[loss_X <= (1 + BAND) * float(approach.line.loss(np.log(flops)))]
        return (float(np.exp(near[0])), float(np.exp(near[-1]))) if len(near) else None
    assert isinstance(approach.fit, FrontierFit)
    off = math.sqrt(2 * BAND / approach.fit.bend)
    with np.errstate(over="ignore"):
        low, high = np.exp([n_star - off, n_star + off])
    return (float(low), float(high)) if math.isfinite(high) else None


def near_optimal_line(fit: Fit, flops: float, approach: Approach) -> str:
    """The band in words; empty without one."""
    if not (band := near_optimal_band(fit, flops, approach)):
        return ""
    low, high = (as_size(size) for size in band)
    return (
        f"near-optimal at {flops:.3g} FLOPs: N from {low} to {high} loses at most {BAND:.0%} by "
        f"{approach.title}"
    )


def doubts(fit: Fit, flops: float, approach: Approach) -> list[str]:
    """Reasons not to rely on this fit at these FLOPs; empty if there are none."""
    found = [f"none of the laws describes these runs: {why}"] if (why := fit.none_because) else []
    budgets = len(fit.points.budgets)
    furthest = FURTHEST if budgets > 2 else FURTHEST_UNCHECKED
    found += _outside("FLOPs", flops, fit.points.flops_P, furthest, f", with {budgets} budgets")
    size = approach.parameters(float(np.log(flops)))
    if size.width > WIDEST:
        found.append(
            f"the interval of N* by {approach.title} is {shown(size, as_size)}, over "
            f"{WIDEST:.0f}x wide"
        )
    if (ratio := disagreement(fit, flops)) > LARGEST_DISAGREEMENT:
        found.append(f"the laws' optimal sizes differ {ratio:.1f}x there")
    return found


def run_doubts(fit: Fit, parameters: float, tokens: float) -> list[str]:
    """Reasons not to rely on this fit for the loss of one run; empty if there are none."""
    points = fit.points
    flops = float(np.exp(fit.flops_law.log_flops(np.log(parameters), np.log(tokens))))
    found = [
        *_outside("FLOPs", flops, points.flops_P, FURTHEST),
        *_outside("parameters", parameters, points.parameters_P, FURTHEST_AXIS),
        *_outside("tokens", tokens, points.tokens_P, FURTHEST_AXIS),
    ]
    law = law_of_runs(fit)
    if why := fit.doubts.get(law.key):
        found.append(f"{law.title} is not relied on: {why}")
    loss = loss_interval(law, parameters, tokens)
    if loss.width > WIDEST_LOSS:
        found.append(
            f"the interval of the loss is {shown(loss, as_loss)}, over {WIDEST_LOSS - 1:.0%} wide"
        )
    return found


def _outside(name: str, value: float, fitted_P: Array, furthest: float, why: str = "") -> list[str]:
    low, high = float(fitted_P.min()), float(fitted_P.max())
    if low / furthest <= value <= high * furthest:
        return []
    return [
        f"{value:.3g} {name} are over {furthest:.0f} times outside the fitted range "
        f"({low:.3g} to {high:.3g}){why}"
    ]


def refuse_wild(doubts: list[str]) -> None:
    """Raise ConfigError that lists the doubts, if there are any."""
    if doubts:
        raise ConfigError(
            f"prediction rejected as extrapolation: {'; '.join(doubts)}. Add runs nearer to it, "
            "or use --force"
        )
