"""What tokens are worth that a run reads again, and sizes beyond what unique tokens can fill.

Muennighoff et al. 2023, section 5: of U unique tokens, R repeats after the first epoch are worth
U R* (1 - exp(-R / R*)) new ones, and likewise parameters beyond the compute-optimal number for U
tokens. Their constants were fitted to runs of up to 9G parameters on C4, with up to 1,500 epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pretrain.scaling.frontier import Approach, LawLine, Line, law_of
from pretrain.scaling.intervals import Interval, amount
from pretrain.scaling.law import log_optimum, loss_at
from pretrain.scaling.lifetime import lowest
from pretrain.scaling.plan import PlannedRun
from pretrain.scaling.points import Array

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
