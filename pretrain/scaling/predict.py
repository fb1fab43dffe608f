"""Predictions from a fit and reasons to doubt them: optima, and runs that are not compute-optimal
on purpose, being cheaper to serve, or over repeated data.

FLOPs per token are s N^p in training and a third of that, one forward pass, for each token served.
Of U unique tokens, R repeats after the first epoch are worth U R* (1 - exp(-R / R*)) new ones, and
likewise parameters beyond the compute-optimal number for U tokens. Sources: Sardana et al. 2023
(least FLOPs of training and inference at a loss), Muennighoff et al. 2023, section 5 (constants of
runs of up to 9G parameters on C4, with up to 1,500 epochs).

Legend: G laws, X sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foundation.errors import ConfigError
from pretrain.scaling.fit import Fit, disagreement, loss_interval
from pretrain.scaling.frontier import Approach, FrontierFit, Line, law_of
from pretrain.scaling.intervals import Interval, amount, as_loss, as_size, shown
from pretrain.scaling.law import FlopsLaw, LawLine, log_loss, log_optimum, loss_at
from pretrain.scaling.plan import PlannedRun
from pretrain.scaling.table import Array

FURTHEST = 100.0  # times the largest budget (or below the smallest by as much)
FURTHEST_UNCHECKED = 10.0  # with two budgets, which nothing checks
WIDEST = 10.0  # high over low end of the interval of N*
LARGEST_DISAGREEMENT = 3.0
FURTHEST_AXIS = 30.0  # times the largest N or D, for the loss of one run
WIDEST_LOSS = 1.2  # high over low end of the interval of one run's loss
BAND = 0.01  # sizes whose loss is within this part of the least are near-optimal
BAND_REACH = np.log(100.0)
SERVED = 1 / 3  # FLOPs of a served token over those of a trained one
SMALLEST = np.log(1e-4)  # of the optimum's size: smaller ones are not searched
GRID, REFINEMENTS = 65, 6  # each refinement is 32 times as fine
REPEATED_TOKENS = 15.387756  # R*_D: repeats at which another one is worth 1/e of new tokens
EXCESS_PARAMETERS = 5.309743  # R*_N: the same for parameters


@dataclass(frozen=True)
class Run:
    """A run that answers a question, and what it costs; estimates have their intervals."""

    parameters: Interval
    tokens: Interval
    training: Interval  # FLOPs
    serving: Interval  # FLOPs
    total: Interval  # FLOPs
    loss: Interval


def optimal_flops(
    approach: Approach, flops_law: FlopsLaw, tokens: float = 0, parameters: float = 0
) -> float:
    """The FLOPs C at which D* or N* is that many; NaN where they do not grow with C."""
    start = float(approach.line.log_parameters(0.0))
    power = float(approach.line.log_parameters(1.0)) - start
    if tokens:
        start = -math.log(flops_law.scale) - flops_law.power * start
        power = 1 - flops_law.power * power
    return math.exp((math.log(tokens or parameters) - start) / power) if power > 0 else math.nan


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
    if not isinstance(approach.fit, FrontierFit):
        return None
    off = math.sqrt(2 * BAND / approach.fit.bend)
    with np.errstate(over="ignore"):
        ends = float(np.exp(n_star - off)), float(np.exp(n_star + off))
    return ends if math.isfinite(ends[1]) else None


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


def compute_optimal(law: Approach, flops: float, served: float) -> Run:
    """The run with the least loss for its training, whatever serving costs."""
    return _run(law, lambda line: log_optimum(line.theta, np.log(flops), line.flops_law), served)


def cheapest_at_loss(law: Approach, flops: float, served: float) -> Run:
    """The run with the loss of the compute-optimal one at `flops` and the least FLOPs in all."""

    def run_of(line: LawLine) -> tuple[Array, Array]:
        theta = line.theta
        n_star, _ = log_optimum(theta, np.log(flops), line.flops_law)
        goal = np.log(line.loss(np.log(flops)))

        def cost(n_GX: Array) -> Array:
            d_GX = tokens_at_loss(theta[..., None, :], goal[..., None], n_GX)
            return np.exp(line.flops_law.log_flops(n_GX, 0.0)) * (np.exp(d_GX) + served * SERVED)

        n = _lowest(cost, n_star + SMALLEST, n_star)
        return n, tokens_at_loss(theta, goal, n)

    return _run(law, run_of, served)


def best_with_repeats(law: Approach, flops: float, unique: float) -> Run:
    """The best size and epochs for `flops` where only `unique` tokens are there."""
    log_flops = np.log(flops)

    def run_of(line: LawLine) -> tuple[Array, Array]:
        n_star, _ = log_optimum(line.theta, log_flops, line.flops_law)
        each = LawLine(line.theta[..., None, :], line.flops_law)

        def loss(n_GX: Array) -> Array:
            d_GX = line.flops_law.log_tokens(log_flops, n_GX)
            return loss_with_repeats(each, n_GX, d_GX, unique)

        n = _lowest(loss, n_star - np.log(1e3), n_star + np.log(1e2))
        return n, line.flops_law.log_tokens(log_flops, n)

    return _run(law, run_of, 0.0, unique)


def _run(
    law: Approach,
    run_of: Callable[[LawLine], tuple[Array, Array]],
    served: float,
    unique: float = math.inf,
) -> Run:
    """The run whose ln N and ln D each law gives, over `unique` tokens."""

    def costs(line: Line) -> tuple[Array, ...]:
        laws = law_of(line)
        n, d = run_of(laws)
        training = np.exp(laws.flops_law.log_flops(n, d))
        serving = served * SERVED * np.exp(laws.flops_law.log_flops(n, 0.0))
        return np.exp(n), np.exp(d), training, serving, training + serving

    def loss(line: Line) -> Array:
        return loss_with_repeats(law_of(line), *run_of(law_of(line)), unique)

    numbers = [*law.intervals(costs), law.loss_of(loss)]
    return Run(*numbers)  # in the order of its fields


def tokens_at_loss(theta: Array, log_of_loss: Array, log_parameters: Array) -> Array:
    """ln D with which a run of size N reaches the loss; infinite if no data is enough."""
    e, a, b, alpha, beta = (theta[..., index] for index in range(5))
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = np.exp(log_of_loss) - np.exp(e) - np.exp(a - alpha * log_parameters)
        return np.where(rest > 0, (b - np.log(np.maximum(rest, 1e-300))) / beta, np.inf)


def _lowest(value_of: Callable[[Array], Array], low: Array, high: Array) -> Array:
    """Where each row's value, which has one valley, is lowest from `low` to `high`."""
    for _ in range(REFINEMENTS):
        x_GX = np.linspace(low, high, GRID, axis=-1)
        best = np.nan_to_num(value_of(x_GX), nan=np.inf).argmin(axis=-1)[..., None]
        step = (high - low) / (GRID - 1)
        middle = np.take_along_axis(x_GX, best, axis=-1)[..., 0]
        low, high = np.maximum(low, middle - step), np.minimum(high, middle + step)
    return (low + high) / 2


def effective(count: float | Array, unique: float | Array, constant: float) -> Array:
    """How many unique ones `count` tokens (or parameters) are worth of which `unique` are."""
    repeats = np.maximum(np.asarray(count) / unique - 1, 0.0)
    first = np.minimum(count, unique)
    return first * (1 + constant * -np.expm1(-repeats / constant))


def effective_tokens(tokens: float, unique: float) -> float:
    """Unique tokens that as many tokens, in epochs over `unique` ones, are worth."""
    return float(effective(tokens, unique, REPEATED_TOKENS))


def noted_repeats(runs: Sequence[PlannedRun], unique: int) -> tuple[list[PlannedRun], str]:
    """The runs of a plan with the unique tokens of each among its facts, and a line about it.

    The line is empty if no run reads a token twice.
    """
    repeating = [item for item in runs if item.cost.tokens > unique]
    if not repeating:
        return list(runs), ""
    noted = [
        replace(item, facts={**item.facts, "unique_tokens": min(unique, item.cost.tokens)})
        for item in runs
    ]
    worst = max(repeating, key=lambda item: item.cost.tokens)
    worth = effective_tokens(worst.cost.tokens, unique) / worst.cost.tokens
    return noted, (
        f"{len(repeating)} of {len(runs)} cells repeat the corpus's {amount(unique)} tokens, up to "
        f"{worst.cost.tokens / unique:.3g} epochs ({worst.name}), each token worth {worth:.0%} of "
        "a new one (Muennighoff et al. 2023): fit them with --column tokens=D_effective"
    )


def loss_with_repeats(line: LawLine, n: Array, d: Array, unique: float) -> Array:
    """L at effective sizes and tokens, for laws and logarithms of one shape."""
    if math.isfinite(unique):
        seen = np.minimum(np.exp(d), unique)
        # the compute-optimal size for that many tokens
        start, _ = log_optimum(line.theta, 0.0, line.flops_law)
        a, b = line.exponents(line.flops_law)
        at_zero = np.log(line.flops_law.scale) + line.flops_law.power * start
        fitting = np.exp(start + a * (np.log(seen) + at_zero) / b)
        n = np.log(effective(np.exp(n), fitting, EXCESS_PARAMETERS))
        d = np.log(effective(np.exp(d), unique, REPEATED_TOKENS))
    with np.errstate(invalid="ignore", over="ignore"):
        return loss_at(line.theta, n, d)
