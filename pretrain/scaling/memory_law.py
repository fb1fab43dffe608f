"""How long a memory pays: a law of the loss over size, data and context, fitted to context sweeps.

L(N, D, M) = E + A / N^alpha + B / D^beta + G <k^-gamma>, the mean over the tokens of a segment of
T, which attend to k = M + 1 to M + T keys. The power of the mean number of keys instead would miss
that without memory the first tokens of every segment have nearly none. With runs of one size the
second term is part of E. A longer memory lowers the last term and costs FLOPs, which the runs' own
counts give exactly: they are linear in M. So each budget has a memory length of lowest loss.
Legend: P runs, G laws, each without a group of runs, X memory lengths, N sizes.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foundation.errors import DataError
from pretrain.scaling.collect import Row
from pretrain.scaling.intervals import Interval, groups_of, jackknife
from pretrain.scaling.table import Array
from pretrain.terminal.text import counted

FEWEST = 3  # different memory lengths, numbers of tokens, and (for the term of N) sizes
NUMBERS = 7  # that a law of several sizes has
SPARE = 2  # runs beyond the numbers that are fitted
STARTS = (0.15, 0.6)  # of each exponent
STEEPEST = 8.0
FLATTEST = 1e-3
FURTHEST_MEMORY = 2.0  # times the longest memory of the runs: longer ones are not answered with
FURTHEST_SIZE = 2.0
MEMORIES, SIZES = 400, 24


@dataclass(frozen=True)
class Trained:
    """Runs evaluated with the memory they trained with, as columns."""

    parameters_P: Array
    tokens_P: Array
    flops_P: Array
    memory_P: Array
    loss_P: Array
    segment_length: int

    @property
    def values(self) -> tuple[Array, Array, Array]:
        """N, D and M of each run."""
        return self.parameters_P, self.tokens_P, self.memory_P


@dataclass(frozen=True)
class MemoryLaw:
    """A fitted law; terms are relative to reference values, so that all numbers are near 1."""

    numbers: Array  # E, A, B, G >= 0 and alpha, beta, gamma
    reference: Array  # N, D, M at which the terms are 1
    segment_length: int

    def loss(self, parameters: Array, tokens: Array, memory: Array) -> Array:
        """The loss at sizes, tokens and memory lengths that broadcast."""
        floor, a, b, g, alpha, beta, gamma = self.numbers
        size, data, shortest = self.reference
        context = mean_power(memory, self.segment_length, gamma)
        context = context / mean_power(shortest, self.segment_length, gamma)
        return (
            floor + a * (parameters / size) ** -alpha + b * (tokens / data) ** -beta + g * context
        )

    def errors(self, runs: Trained) -> Array:
        """(predicted - measured) / measured of each run."""
        return self.loss(*runs.values) / runs.loss_P - 1


def mean_power(memory: Array | float, segment_length: int, power: float) -> Array:
    """The mean of k^-power over the keys k = M + 1 ... M + T."""
    keys = np.asarray(memory, float)[..., None] + np.arange(1, segment_length + 1)
    return (keys**-power).mean(axis=-1)


@dataclass(frozen=True)
class MemoryFit:
    """Runs, their law, and the laws without each group of them."""

    runs: Trained
    law: MemoryLaw
    left_out: Sequence[MemoryLaw]


@dataclass(frozen=True, kw_only=True)
class BestMemory:
    """The memory length of lowest loss at a budget, with intervals."""

    flops: float
    memory: Interval
    parameters: float
    tokens: float
    loss: Interval
    without: float  # the lowest loss without memory
    is_edge: bool  # the longest memory that is answered with: a longer one may be better


def trained_runs(rows: Sequence[Row]) -> Trained:
    """Return the runs of the most frequent segment length, as means over seeds."""
    own = [row for row in rows if not row.excluded]
    lengths = [int(row.segment_length) for row in own]
    segment = max(sorted({*lengths}), key=lengths.count, default=0)
    # Repeats that counted as single runs would narrow the intervals as if the law were exact.
    losses: dict[tuple[float, ...], list[float]] = {}
    for row in own:
        if row.segment_length == segment:
            cell = float(row.N), float(row.D), float(row.C), float(row.memory_length)
            losses.setdefault(cell, []).append(float(row.loss))
    sizes, tokens, memories = (len({cell[index] for cell in losses}) for index in (0, 1, 3))
    found = f"segments of {segment}: found {counted(len(losses), 'run')} of "
    found += f"{counted(memories, 'memory length')}, {counted(tokens, 'number')} of tokens and "
    found += counted(sizes, "size")
    numbers = 5 + 2 * (sizes > 1)
    if min(memories, tokens) < FEWEST or sizes == 2 or len(losses) < numbers + SPARE:
        raise DataError(
            f"{found}; a law needs at least {numbers + SPARE} runs of {FEWEST} memory lengths, "
            f"{FEWEST} numbers of tokens, and one size or {FEWEST}: plan with more --memories or "
            "other optim.steps, and give all tables"
        )
    means_P = np.array([np.mean(same) for same in losses.values()])
    size_P, tokens_P, flops_P, memory_P = np.array([*losses]).T
    return Trained(size_P, tokens_P, flops_P, memory_P, means_P, segment)


def fit_memory_law(runs: Trained) -> MemoryFit:
    """Least squares of relative errors: the lowest end of several starts. Of runs of one size the
    term of N is a constant, like E, and only their sum is determined.
    """
    reference = np.array([*np.exp(np.log(runs.values[:2]).mean(axis=1)), runs.memory_P.min()])
    terms, everything_P = np.full(4, runs.loss_P.mean() / 4), np.ones(len(runs.loss_P), bool)
    starts = [
        MemoryLaw(np.array([*terms, *exponents]), reference, runs.segment_length)
        for exponents in itertools.product(STARTS, repeat=3)
    ]
    ends = [_refined(start, runs, everything_P) for start in starts]
    law = min(ends, key=lambda end: float((end.errors(runs) ** 2).sum()))
    # Runs of one size and number of tokens share more than noise, such as a rate: where there are
    # enough such pairs, one at a time is left out, else single runs.
    pairs_P2 = np.stack(runs.values[:2], axis=1)
    pair_P = np.unique(pairs_P2, axis=0, return_inverse=True)[1].reshape(-1)
    is_enough = pair_P.max() + 1 >= NUMBERS + SPARE
    group_P = groups_of(pair_P if is_enough else np.arange(len(runs.loss_P)))
    left_out = [_refined(law, runs, group_P != group) for group in range(group_P.max() + 1)]
    return MemoryFit(runs, law, left_out)


def _refined(start: MemoryLaw, runs: Trained, chosen_P: Array) -> MemoryLaw:
    """The least squares of the chosen runs that is nearest to `start`."""
    from scipy.optimize import least_squares

    low, high = np.array([0.0] * 4 + [FLATTEST] * 3), np.array([np.inf] * 4 + [STEEPEST] * 3)
    solution = least_squares(
        lambda numbers: replace(start, numbers=numbers).errors(runs)[chosen_P],
        np.clip(start.numbers, low + 1e-9, high - 1e-9),
        bounds=(low, high),
    )
    return replace(start, numbers=solution.x)


def best_memory(fit: MemoryFit, flops: float) -> BestMemory:
    """The memory length (and size, if the runs have several) of lowest loss at these FLOPs, with
    intervals from the laws without each group of runs.
    """
    runs = fit.runs
    longest = FURTHEST_MEMORY * runs.memory_P.max()
    memory_X = np.geomspace(1, 1 + longest, MEMORIES) - 1
    low, high = runs.parameters_P.min(), runs.parameters_P.max()
    size_N = np.array([low])
    if high > low:
        size_N = np.geomspace(low / FURTHEST_SIZE, high * FURTHEST_SIZE, SIZES)
    tokens_NX = flops / flops_per_token(runs, size_N, memory_X)
    values = (size_N[:, None], tokens_NX, memory_X[None])
    loss_NX = fit.law.loss(*values)
    size, memory = np.unravel_index(int(loss_NX.argmin()), loss_NX.shape)
    without_GX = np.array([law.loss(*values).min(axis=0) for law in fit.left_out])
    free = len(without_GX) - (7 if len(size_N) > 1 else 5)
    keys = jackknife(1 + memory_X[memory], 1 + memory_X[without_GX.argmin(axis=1)], free)
    return BestMemory(
        flops=flops,
        memory=Interval(keys.value - 1, max(keys.low - 1, 0.0), min(keys.high - 1, longest)),
        parameters=float(size_N[size]),
        tokens=float(tokens_NX[size, memory]),
        loss=jackknife(loss_NX.min(), without_GX.min(axis=1), free),
        without=float(loss_NX[:, 0].min()),
        is_edge=memory == len(memory_X) - 1,
    )


def flops_per_token(runs: Trained, size_N: Array, memory_X: Array) -> Array:
    """C / D of each size and memory: linear in M at the runs' sizes, powers of N between them."""
    sizes = np.unique(runs.parameters_P)
    lines = []
    for size in sizes:
        chosen = runs.parameters_P == size
        if len(np.unique(runs.memory_P[chosen])) < 2:
            raise DataError(
                f"the runs of {size:g} parameters have one memory length; its cost needs two"
            )
        ratio_P = runs.flops_P[chosen] / runs.tokens_P[chosen]
        lines.append(np.polyfit(runs.memory_P[chosen], ratio_P, 1)[::-1])
    logs = np.log(np.array(lines)), np.log(sizes)
    degree = min(1, len(sizes) - 1)
    at_zero_N, per_key_N = (
        np.exp(np.polyval(np.polyfit(logs[1], each, degree), np.log(size_N))) for each in logs[0].T
    )
    return at_zero_N[:, None] + per_key_N[:, None] * memory_X[None]
