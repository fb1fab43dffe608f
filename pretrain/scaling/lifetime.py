"""Runs that are not compute-optimal on purpose: smaller and cheaper to serve, at a fixed ratio, or
over repeated data.

By a law of size and data, with FLOPs per token s N^p in training and a third of that, one forward
pass, for each token served. Of U unique tokens, R repeats after the first epoch are worth
U R* (1 - exp(-R / R*)) new ones, and likewise parameters beyond the compute-optimal number for U
tokens. Sources: Sardana et al. 2023 (least FLOPs of training and inference at a loss), Gadre et al.
2024 (fixed tokens per parameter), Muennighoff et al. 2023, section 5 (repeats; constants fitted to
runs of up to 9G parameters on C4, with up to 1,500 epochs).

Legend: K laws, X sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pretrain.scaling.frontier import Approach, LawLine, Line, law_of
from pretrain.scaling.intervals import Interval, amount
from pretrain.scaling.law import FlopsLaw, log_optimum, loss_at
from pretrain.scaling.plan import PlannedRun
from pretrain.scaling.table import Array

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
    law: Approach, run_of: Callable[[LawLine], tuple[Array, Array]], served: float
) -> Lifetime:
    def numbers(line: Line) -> tuple[Array, ...]:
        laws = law_of(line)
        n, d = run_of(laws)
        training = np.exp(laws.flops_law.log_flops(n, d))
        serving = served * SERVED * _flops_per_token(laws.flops_law, n)
        return np.exp(n), np.exp(d), training, serving, training + serving, _loss(laws.theta, n, d)

    return Lifetime(*law.intervals(numbers))  # in the order of its fields


def _cheapest(line: LawLine, flops: float, served: float) -> tuple[Array, Array]:
    theta, log_flops = line.theta, np.log(flops)
    n_star, _ = log_optimum(theta, log_flops, line.flops_law)
    goal = np.log(line.loss(log_flops))

    def cost(n_KX: Array) -> Array:
        d_KX = tokens_at_loss(theta[..., None, :], goal[..., None], n_KX)
        return _flops_per_token(line.flops_law, n_KX) * (np.exp(d_KX) + served * SERVED)

    n = lowest(cost, n_star + SMALLEST, n_star)
    return n, tokens_at_loss(theta, goal, n)


def _best_in_all(line: LawLine, flops: float, served: float) -> tuple[Array, Array]:
    n_star, _ = log_optimum(line.theta, np.log(flops), line.flops_law)

    def tokens(n: Array) -> Array:
        left = flops / _flops_per_token(line.flops_law, n) - served * SERVED
        with np.errstate(divide="ignore"):
            return np.log(np.maximum(left, 0.0))  # ln 0: nothing is left to train with

    def loss(n_KX: Array) -> Array:
        return _loss(line.theta[..., None, :], n_KX, tokens(n_KX))

    n = lowest(loss, n_star + SMALLEST, n_star)
    return n, tokens(n)


def lowest(value_of: Callable[[Array], Array], low: Array, high: Array) -> Array:
    """Where each row's value, which has one valley, is lowest from `low` to `high`."""
    for _ in range(REFINEMENTS):
        x_KX = np.linspace(low, high, GRID, axis=-1)
        best = np.nan_to_num(value_of(x_KX), nan=np.inf).argmin(axis=-1)[..., None]
        step = (high - low) / (GRID - 1)
        middle = np.take_along_axis(x_KX, best, axis=-1)[..., 0]
        low, high = np.maximum(low, middle - step), np.minimum(high, middle + step)
    return (low + high) / 2


def _loss(theta: Array, n: Array, d: Array) -> Array:
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


@dataclass(frozen=True, kw_only=True)
class Constrained:
    """The run with the least loss at some FLOPs over unique tokens; intervals for each number."""

    parameters: Interval
    tokens: Interval
    loss: Interval
    unlimited: Interval  # loss of the compute-optimal run with new tokens only


def best_with_repeats(law: Approach, flops: float, unique: float) -> Constrained:
    """The best size and epochs for `flops` where only `unique` tokens are there."""
    log_flops = np.log(flops)

    def size(line: LawLine) -> Array:
        n_star, _ = log_optimum(line.theta, log_flops, line.flops_law)

        def loss(n_KX: Array) -> Array:
            d_KX = line.flops_law.log_tokens(log_flops, n_KX)
            return loss_with_repeats(
                LawLine(line.theta[..., None, :], line.flops_law), n_KX, d_KX, unique
            )

        return lowest(loss, n_star - np.log(1e3), n_star + np.log(1e2))

    def numbers(line: Line) -> tuple[Array, Array, Array]:
        laws = law_of(line)
        n = size(laws)
        d = laws.flops_law.log_tokens(log_flops, n)
        return np.exp(n), np.exp(d), loss_with_repeats(laws, n, d, unique)

    parameters, tokens, loss = law.intervals(numbers)
    unlimited = law.loss(float(log_flops))
    return Constrained(parameters=parameters, tokens=tokens, loss=loss, unlimited=unlimited)


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
    seen = np.minimum(np.exp(d), unique)
    fitting = np.exp(_log_size_for_tokens(line, np.log(seen)))
    size = effective(np.exp(n), fitting, EXCESS_PARAMETERS)
    tokens = effective(np.exp(d), unique, REPEATED_TOKENS)
    with np.errstate(invalid="ignore"):
        return loss_at(line.theta, np.log(size), np.log(tokens))


def _log_size_for_tokens(line: LawLine, log_tokens: Array) -> Array:
    """ln N of the compute-optimal run that reads so many tokens."""
    start, _ = log_optimum(line.theta, 0.0, line.flops_law)
    a, b = line.exponents(line.flops_law)
    log_flops = (log_tokens + np.log(line.flops_law.scale) + line.flops_law.power * start) / b
    return start + a * log_flops
