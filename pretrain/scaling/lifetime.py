"""Runs that are not compute-optimal on purpose: smaller ones over more tokens, cheaper to serve.

By a law of size and data (approach 3), with FLOPs per token s N^p in training and a third of that,
one forward pass, for each token served. Sources: Sardana et al. 2023 (least FLOPs of training and
inference at a loss), Gadre et al. 2024 (fixed tokens per parameter).

Legend: K laws, X sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pretrain.scaling.frontier import Approach, LawLine, Line, law_of
from pretrain.scaling.intervals import Interval
from pretrain.scaling.law import FlopsLaw, log_optimum, loss_at
from pretrain.scaling.points import Array

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
