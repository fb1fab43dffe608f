"""Predictions from a fit for a budget, a size or a number of tokens, and reasons to doubt them.

Legend: K lines, X sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foundation.errors import ConfigError
from foundation.yaml_files import did_you_mean
from pretrain.scaling.fit import TITLES, Fit, disagreement, loss_interval
from pretrain.scaling.frontier import Approach, LawLine, Line
from pretrain.scaling.intervals import Interval, as_loss, as_size, shown
from pretrain.scaling.law import FlopsLaw, log_loss, loss_at
from pretrain.scaling.table import Array

FURTHEST = 100.0  # times the largest budget (or below the smallest by as much)
FURTHEST_UNCHECKED = 10.0  # with two budgets, which nothing checks
WIDEST = 10.0  # high over low end of the interval of N*
LARGEST_DISAGREEMENT = 3.0
FURTHEST_AXIS = 30.0  # times the largest N or D, for the loss of one run
WIDEST_LOSS = 1.2  # high over low end of the interval of one run's loss
BAND = 0.01  # sizes whose loss is within this part of the least are near-optimal
BAND_REACH = np.log(100.0)


@dataclass(frozen=True)
class Forecast:
    """One approach's optimum; every number with its interval."""

    approach: str
    flops: Interval
    parameters: Interval
    tokens: Interval
    loss: Interval
    # fraction of the lines without such an optimum; the intervals are those of the rest
    unanswered: float


def forecast(
    approach: Approach,
    flops_law: FlopsLaw,
    *,
    flops: float = 0,
    tokens: float = 0,
    parameters: float = 0,
) -> Forecast:
    """The optimum of that many FLOPs, tokens or parameters (exactly one is given)."""
    assert bool(flops) + bool(tokens) + bool(parameters) == 1

    def optimum_of(line: Line) -> tuple[Array, Array, Array, Array]:
        if flops:
            c = np.log(flops) + 0 * line.log_parameters(0.0)
        else:
            c = _log_flops_at(line, flops_law, tokens, parameters)
        n = _log_size(line, c)
        loss = line.loss(np.log(flops)) if flops else _loss(line, c)
        return np.exp(c), np.exp(n), np.exp(flops_law.log_tokens(c, n)), loss

    unanswered = 0.0
    if approach.region is not None:
        with np.errstate(over="ignore"):
            is_absent_K = np.isnan(optimum_of(approach.region)[1])
        unanswered = 0.0 if is_absent_K.all() else float(is_absent_K.mean())
    numbers = approach.intervals(optimum_of)
    if np.log(numbers[0].value) > approach.last + 1e-6:
        numbers[3] = Interval(np.nan, np.nan, np.nan)
    return Forecast(approach.title, *numbers, unanswered=unanswered)


def preferred(fit: Fit, key: str = "") -> Approach:
    """Return the law of that key, or the one that comes first; ConfigError if it is missing."""
    refuse_unknown(key)
    if not key:
        return fit.approaches[0]
    if approach := fit.approach(key):
        return approach
    raise ConfigError(
        f"law {key!r} is not available for these runs: {fit.estimates.unavailable[key]}"
    )


def law_of_runs(fit: Fit) -> Approach:
    """The law of N and D that comes first; ConfigError if these runs allow none."""
    if fit.law is None:
        reason = fit.estimates.unavailable["parametric"]
        raise ConfigError(f"this needs a law of N and D, and there is none: {reason}")
    return fit.law


def refuse_unknown(key: str) -> None:
    """Raise ConfigError for an unknown approach; an empty key is allowed."""
    if key and key not in TITLES:
        raise ConfigError(f"--law {key} is not a law{did_you_mean(key, list(TITLES))}")


def loss_of_run(fit: Fit, parameters: float, tokens: float) -> Interval:
    """Return L(N, D); ConfigError if these runs do not allow such a law."""
    return loss_interval(law_of_runs(fit), parameters, tokens)


def near_optimal_band(
    fit: Fit, flops: float, approach: Approach, band: float = BAND
) -> tuple[float, float] | None:
    """Return the smallest and largest size whose loss at these FLOPs is within `band` of the least.

    None for approach 1, and if the approach has no optimum there.
    """
    if not np.isfinite(flops):
        return None
    n_star = float(approach.line.log_parameters(np.log(flops)))
    if isinstance(approach.line, LawLine):
        n_X = n_star + np.linspace(-BAND_REACH, BAND_REACH, 8001)
        d_X = fit.flops_law.log_tokens(np.log(flops), n_X)
        loss_X = np.exp(log_loss(approach.line.theta, n_X, d_X))
        near = n_X[loss_X <= (1 + band) * float(approach.line.loss(np.log(flops)))]
        return (float(np.exp(near[0])), float(np.exp(near[-1]))) if len(near) else None
    if approach.key != "isoflop" or fit.estimates.isoflop is None:
        return None
    off = float(np.sqrt(2 * band / fit.estimates.isoflop.bend))
    return float(np.exp(n_star - off)), float(np.exp(n_star + off))


def doubts(fit: Fit, flops: float, approach: Approach) -> list[str]:
    """Reasons not to rely on this fit at these FLOPs; empty if there are none."""
    found = [f"none of the laws describes these runs: {why}"] if (why := fit.none_because) else []
    low, high = float(fit.points.flops_P.min()), float(fit.points.flops_P.max())
    furthest = FURTHEST if len(fit.points.budgets) > 2 else FURTHEST_UNCHECKED
    limit = f"with {len(fit.points.budgets)} budgets the limit is {furthest:.0f} times"
    if flops > furthest * high:
        found.append(
            f"{flops:.3g} FLOPs are {flops / high:.3g} times the largest fitted run ({high:.3g}); "
            f"{limit}"
        )
    if flops < low / furthest:
        found.append(
            f"{flops:.3g} FLOPs are {low / flops:.3g} times below the smallest fitted run "
            f"({low:.3g}); {limit}"
        )
    size = approach.parameters(float(np.log(flops)))
    if size.width > WIDEST:
        found.append(
            f"the interval of N* by {approach.title} is {shown(size, as_size)}, over "
            f"{WIDEST:.0f}x wide"
        )
    rivals = tuple(each for each in fit.approaches if each.key not in (*fit.doubts, "lowest"))
    ratio = disagreement(rivals, float(np.log(flops)))
    if ratio > LARGEST_DISAGREEMENT:
        found.append(f"the laws' optimal sizes differ {ratio:.1f}x there")
    return found


def run_doubts(fit: Fit, parameters: float, tokens: float) -> list[str]:
    """Reasons not to rely on this fit for the loss of one run; empty if there are none."""
    found: list[str] = []
    points = fit.points
    asked = {
        "FLOPs": (
            float(np.exp(fit.flops_law.log_flops(np.log(parameters), np.log(tokens)))),
            points.flops_P,
            FURTHEST,
        ),
        "parameters": (parameters, points.parameters_P, FURTHEST_AXIS),
        "tokens": (tokens, points.tokens_P, FURTHEST_AXIS),
    }
    for name, (value, fitted_P, furthest) in asked.items():
        low, high = float(fitted_P.min()), float(fitted_P.max())
        if not low / furthest <= value <= high * furthest:
            found.append(
                f"{value:.3g} {name} are over {furthest:.0f}x outside the fitted range "
                f"({low:.3g}..{high:.3g})"
            )
    loss = loss_of_run(fit, parameters, tokens)
    if loss.width > WIDEST_LOSS:
        found.append(
            f"the interval of the loss is {shown(loss, as_loss)}, over {WIDEST_LOSS - 1:.0%} wide"
        )
    return found


def refuse_wild(doubts: list[str]) -> None:
    """Raise ConfigError that lists the doubts, if there are any."""
    if doubts:
        raise ConfigError(
            f"prediction rejected as extrapolation: {'; '.join(doubts)}. Add runs nearer to it, "
            "or use --force"
        )


def _log_size(line: Line, log_flops: Array) -> Array:
    """ln N* where every draw has its own ln C: all lines are straight in ln C."""
    start = line.log_parameters(0.0)
    return start + (line.log_parameters(1.0) - start) * log_flops


def _loss(line: Line, log_flops: Array) -> Array:
    if isinstance(line, LawLine):
        n = _log_size(line, log_flops)
        d = line.flops_law.log_tokens(log_flops, n)
        return loss_at(line.theta, n, d)
    return line.loss(log_flops)


def _log_flops_at(line: Line, flops_law: FlopsLaw, tokens: float, parameters: float) -> Array:
    """ln C at which the line has these tokens or parameters; NaN where they do not grow with C."""
    start = line.log_parameters(0.0)
    power = line.log_parameters(1.0) - start
    if tokens:
        start, power = (
            -np.log(flops_law.scale) - flops_law.power * start,
            1 - flops_law.power * power,
        )
    return (np.log(tokens or parameters) - start) / np.where(power > 0, power, np.nan)
