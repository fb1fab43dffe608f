"""Predictions from a fit and reasons to doubt them: optima, and runs that are not compute-optimal
on purpose, being cheaper to serve, at a fixed ratio, or over repeated data.

FLOPs per token are s N^p in training and a third of that, one forward pass, for each token served.
Of U unique tokens, R repeats after the first epoch are worth U R* (1 - exp(-R / R*)) new ones, and
likewise parameters beyond the compute-optimal number for U tokens. Sources: Sardana et al. 2023
(least FLOPs of training and inference at a loss), Gadre et al. 2024 (fixed tokens per parameter),
Muennighoff et al. 2023, section 5 (constants of runs of up to 9G parameters on C4, with up to 1,500
epochs).

Legend: G laws, X sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foundation.errors import ConfigError
from foundation.yaml_files import did_you_mean
from pretrain.scaling.fit import TITLES, Fit, disagreement, loss_interval
from pretrain.scaling.frontier import Approach, LawLine, Line, law_of
from pretrain.scaling.intervals import Interval, amount, as_loss, as_size, shown
from pretrain.scaling.law import FlopsLaw, log_loss, log_optimum, loss_at
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


@dataclass(frozen=True)
class Forecast:
    """One approach's optimum; every number with its interval."""

    approach: str
    flops: Interval
    parameters: Interval
    tokens: Interval
    loss: Interval


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

    numbers = approach.intervals(optimum_of)
    if np.log(numbers[0].value) > approach.last + 1e-6:
        numbers[3] = Interval(np.nan, np.nan, np.nan)
    return Forecast(approach.title, *numbers)


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


SERVED = 1 / 3  # FLOPs of a served token over those of a trained one
SMALLEST = np.log(1e-4)  # of the optimum's size: smaller ones are not searched
GRID, REFINEMENTS = 65, 6  # each refinement is 32 times as fine
SIZES = (1.0, 0.71, 0.5, 0.35, 0.25, 0.18, 0.12)  # of the optimum, in a table of equal losses


@dataclass(frozen=True)
class Lifetime:
    """A run and what it costs; every number with its interval."""

    parameters: Interval
    tokens: Interval
    training: Interval  # FLOPs
    serving: Interval  # FLOPs
    total: Interval  # FLOPs
    loss: Interval


def compute_optimal(law: Approach, flops: float, served: float) -> Lifetime:
    """The run with the least loss for its training, whatever serving costs."""
    return _lifetime(
        law, lambda line: log_optimum(line.theta, np.log(flops), line.flops_law), served
    )


def cheapest_at_loss(law: Approach, flops: float, served: float) -> Lifetime:
    """The run with the loss of the compute-optimal one at `flops` and the least FLOPs in all."""
    return _lifetime(law, lambda line: _cheapest(line, flops, served), served)


def best_in_all(law: Approach, flops: float, served: float) -> Lifetime:
    """The run with the least loss if training and serving together cost `flops`."""
    return _lifetime(law, lambda line: _best_in_all(line, flops, served), served)


def at_ratio(law: Approach, flops: float, tokens_per_parameter: float) -> Lifetime:
    """The run at these FLOPs that reads so many tokens per parameter."""

    def size(line: LawLine) -> tuple[Array, Array]:
        fixed = line.flops_law
        n = (np.log(flops / tokens_per_parameter) - np.log(fixed.scale)) / (1 + fixed.power)
        n = n + 0 * line.theta[..., 0]
        return n, n + np.log(tokens_per_parameter)

    return _lifetime(law, size, 0.0)


def at_size(law: Approach, flops: float, log_parameters: float, served: float) -> Lifetime:
    """The run of that size with the loss of the compute-optimal one at `flops`."""

    def size(line: LawLine) -> tuple[Array, Array]:
        n = log_parameters + 0 * line.theta[..., 0]
        return n, tokens_at_loss(line.theta, np.log(line.loss(np.log(flops))), n)

    return _lifetime(law, size, served)


def tokens_at_loss(theta: Array, log_of_loss: Array, log_parameters: Array) -> Array:
    """ln D with which a run of size N reaches the loss; infinite if no data is enough."""
    e, a, b, alpha, beta = (theta[..., index] for index in range(5))
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = np.exp(log_of_loss) - np.exp(e) - np.exp(a - alpha * log_parameters)
        return np.where(rest > 0, (b - np.log(np.maximum(rest, 1e-300))) / beta, np.inf)


def _lifetime(
    law: Approach,
    run_of: Callable[[LawLine], tuple[Array, Array]],
    served: float,
    unique: float = math.inf,
) -> Lifetime:
    """The run whose ln N and ln D each law gives, over `unique` tokens."""

    def numbers(line: Line) -> tuple[Array, ...]:
        laws = law_of(line)
        n, d = run_of(laws)
        training = np.exp(laws.flops_law.log_flops(n, d))
        serving = served * SERVED * _flops_per_token(laws.flops_law, n)
        loss = loss_with_repeats(laws, n, d, unique)
        return np.exp(n), np.exp(d), training, serving, training + serving, loss

    return Lifetime(*law.intervals(numbers))  # in the order of its fields


def _cheapest(line: LawLine, flops: float, served: float) -> tuple[Array, Array]:
    theta, log_flops = line.theta, np.log(flops)
    n_star, _ = log_optimum(theta, log_flops, line.flops_law)
    goal = np.log(line.loss(log_flops))

    def cost(n_GX: Array) -> Array:
        d_GX = tokens_at_loss(theta[..., None, :], goal[..., None], n_GX)
        return _flops_per_token(line.flops_law, n_GX) * (np.exp(d_GX) + served * SERVED)

    n = lowest(cost, n_star + SMALLEST, n_star)
    return n, tokens_at_loss(theta, goal, n)


def _best_in_all(line: LawLine, flops: float, served: float) -> tuple[Array, Array]:
    n_star, _ = log_optimum(line.theta, np.log(flops), line.flops_law)

    def tokens(n: Array) -> Array:
        left = flops / _flops_per_token(line.flops_law, n) - served * SERVED
        with np.errstate(divide="ignore"):
            return np.log(np.maximum(left, 0.0))  # ln 0: nothing is left to train with

    def loss(n_GX: Array) -> Array:
        return _loss_there(line.theta[..., None, :], n_GX, tokens(n_GX))

    n = lowest(loss, n_star + SMALLEST, n_star)
    return n, tokens(n)


def lowest(value_of: Callable[[Array], Array], low: Array, high: Array) -> Array:
    """Where each row's value, which has one valley, is lowest from `low` to `high`."""
    for _ in range(REFINEMENTS):
        x_GX = np.linspace(low, high, GRID, axis=-1)
        best = np.nan_to_num(value_of(x_GX), nan=np.inf).argmin(axis=-1)[..., None]
        step = (high - low) / (GRID - 1)
        middle = np.take_along_axis(x_GX, best, axis=-1)[..., 0]
        low, high = np.maximum(low, middle - step), np.minimum(high, middle + step)
    return (low + high) / 2


def _loss_there(theta: Array, n: Array, d: Array) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):
        return loss_at(theta, n, d)


def _flops_per_token(flops_law: FlopsLaw, n: Array) -> Array:
    return flops_law.scale * np.exp(flops_law.power * n)


REPEATED_TOKENS = 15.387756  # R*_D: repeats at which another one is worth 1/e of new tokens
EXCESS_PARAMETERS = 5.309743  # R*_N: the same for parameters


def effective(count: float | Array, unique: float | Array, constant: float) -> Array:
    """How many unique ones `count` tokens (or parameters) are worth of which `unique` are."""
    repeats = np.maximum(np.asarray(count) / unique - 1, 0.0)
    first = np.minimum(count, unique)
    return first * (1 + constant * -np.expm1(-repeats / constant))


def effective_tokens(tokens: float, unique: float) -> float:
    """Unique tokens that as many tokens, in epochs over `unique` ones, are worth."""
    return float(effective(tokens, unique, REPEATED_TOKENS))


def noted_repeats(runs: Sequence[PlannedRun], unique: int) -> tuple[list[PlannedRun], str]:
    """The runs of a plan with what their tokens are worth among their facts, and a line about it.

    The line is empty if no run reads a token twice.
    """
    repeating = [item for item in runs if item.cost.tokens > unique]
    if not repeating:
        return list(runs), ""
    noted = [
        replace(
            item,
            facts={
                **item.facts,
                "unique_tokens": min(unique, item.cost.tokens),
                "effective_tokens": effective_tokens(item.cost.tokens, unique),
            },
        )
        for item in runs
    ]
    worst = max(repeating, key=lambda item: item.cost.tokens)
    epochs = worst.cost.tokens / unique
    worth = effective_tokens(worst.cost.tokens, unique) / worst.cost.tokens
    return noted, (
        f"{len(repeating)} of {len(runs)} cells repeat the corpus's {amount(unique)} tokens, up to "
        f"{epochs:.3g} epochs ({worst.name}), each token worth {worth:.0%} of a new one "
        "(Muennighoff et al. 2023): fit them with --column tokens=D_effective"
    )


def best_with_repeats(law: Approach, flops: float, unique: float) -> Lifetime:
    """The best size and epochs for `flops` where only `unique` tokens are there."""
    log_flops = np.log(flops)

    def run_of(line: LawLine) -> tuple[Array, Array]:
        n_star, _ = log_optimum(line.theta, log_flops, line.flops_law)
        each = LawLine(line.theta[..., None, :], line.flops_law)

        def loss(n_GX: Array) -> Array:
            d_GX = line.flops_law.log_tokens(log_flops, n_GX)
            return loss_with_repeats(each, n_GX, d_GX, unique)

        n = lowest(loss, n_star - np.log(1e3), n_star + np.log(1e2))
        return n, line.flops_law.log_tokens(log_flops, n)

    return _lifetime(law, run_of, 0.0, unique)


def loss_of_run_with_repeats(
    law: Approach, parameters: float, tokens: float, unique: float
) -> Interval:
    """L(N, D) of a run that reads D tokens, `unique` of them once or more."""
    n, d = np.log(parameters), np.log(tokens)

    def loss(line: Line) -> Array:
        laws = law_of(line)
        zero = 0 * laws.theta[..., 0]
        return loss_with_repeats(laws, n + zero, d + zero, unique)

    return law.interval(loss)


def loss_with_repeats(line: LawLine, n: Array, d: Array, unique: float) -> Array:
    """L at effective sizes and tokens, for laws and logarithms of one shape."""
    if math.isfinite(unique):
        seen = np.minimum(np.exp(d), unique)
        fitting = np.exp(_log_size_for_tokens(line, np.log(seen)))
        n = np.log(effective(np.exp(n), fitting, EXCESS_PARAMETERS))
        d = np.log(effective(np.exp(d), unique, REPEATED_TOKENS))
    return _loss_there(line.theta, n, d)


def _log_size_for_tokens(line: LawLine, log_tokens: Array) -> Array:
    """ln N of the compute-optimal run that reads so many tokens."""
    start, _ = log_optimum(line.theta, 0.0, line.flops_law)
    a, b = line.exponents(line.flops_law)
    log_flops = (log_tokens + np.log(line.flops_law.scale) + line.flops_law.power * start) / b
    return start + a * log_flops
