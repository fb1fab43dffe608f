"""The best learning rate of a sweep of rates, and a rule of rates for runs of other sizes.

The loss over ln(rate) is flat at the bottom, rises slowly towards lower rates and steeply towards
higher ones. So a parabola is fitted only to rates near the lowest loss, and the answer is a range
of rates rather than one. Over several sizes (rungs) the best rate is fitted as a power of N, the
parameters without embeddings. In names of arrays, S is the axis of runs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from foundation.errors import ConfigError, DataError
from pretrain.config.run import RunConfig
from pretrain.costs.flops import run_cost
from pretrain.scaling.collect import Row, read_rows
from pretrain.scaling.frontier import parabola
from pretrain.scaling.intervals import Interval, amount, as_loss, as_size, students
from pretrain.scaling.table import Array
from pretrain.terminal.text import counted

FAR_RUNG = 4.0  # times the smallest or largest rung: beyond, a rate is extrapolated
FAR_TOKENS = 10.0  # times the fewest or most tokens of a rung: the best rate depends on them, too
NEAR = 4.0  # rates within this factor of the one with the lowest loss shape the parabola
FEWEST_RATES = 3
DIVERGED = 1.5  # times the lowest loss: above it, a run at a higher rate has diverged
TOLERABLE = 0.005  # how much higher, relatively, the loss may be at a rate in the reported range


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The lowest point of a valley of losses over rates; NaN where nothing can be estimated."""

    rate: Interval
    loss: float  # at that rate
    low: float  # from here...
    high: float  # ...to here the loss is at most TOLERABLE higher
    doubt: str = ""  # why there is no optimum, or no interval

    @property
    def is_known(self) -> bool:
        return math.isfinite(self.rate.value)


_NONE = Optimum(rate=Interval(*[math.nan] * 3), loss=math.nan, low=math.nan, high=math.nan)


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The runs of one number of tokens per step, and the best rate among them."""

    tokens_per_step: int
    rates_S: Array  # of every run that ended well, seeds included
    loss_S: Array
    diverged: tuple[float, ...]  # rates of runs without a loss, or with a far higher one
    lowest: tuple[float, float]  # the rate whose mean loss over the seeds is lowest, and that loss
    near_S: Array  # which runs shaped the parabola
    optimum: Optimum


def fit_rates(tokens_per_step: int, rates: Sequence[float], losses: Sequence[float]) -> Tuned:
    """Return the valley of the losses over the rates, without diverged runs, which would bend it.

    A run diverged if it has no loss, or both a higher rate and a far higher loss than the best run.
    A high loss at a lower rate is only slow learning. DataError for fewer than three rates.
    """
    order = np.argsort(rates, kind="stable")
    rates_S, loss_S = np.array(rates, float)[order], np.array(losses, float)[order]
    finite_S = np.where(np.isfinite(loss_S), loss_S, math.inf)
    usable_S = np.isfinite(loss_S)
    if usable_S.any():
        is_slower_S = rates_S <= rates_S[finite_S.argmin()]
        usable_S &= is_slower_S | (loss_S <= DIVERGED * finite_S.min())
    diverged = tuple(sorted({float(rate) for rate in rates_S[~usable_S]}))
    rates_S, loss_S = rates_S[usable_S], loss_S[usable_S]
    if (count := len({*rates_S})) < FEWEST_RATES:
        raise DataError(
            f"{tokens_per_step:,} tokens per step: {counted(count, 'rate')} ended with a loss, a "
            f"valley needs {FEWEST_RATES}; let the sweep finish, or add lower rates"
        )
    loss, best = min((float(loss_S[rates_S == rate].mean()), float(rate)) for rate in rates_S)
    near_S = (rates_S <= best * NEAR * 1.001) & (rates_S >= best / NEAR / 1.001)
    doubt = _missing_rates(rates_S[near_S], best, diverged)
    return Tuned(
        tokens_per_step=tokens_per_step,
        rates_S=rates_S,
        loss_S=loss_S,
        diverged=diverged,
        lowest=(best, loss),
        near_S=near_S,
        optimum=replace(_NONE, doubt=doubt) if doubt else _optimum(rates_S[near_S], loss_S[near_S]),
    )


def _missing_rates(near: Array, best: float, diverged: Sequence[float]) -> str:
    """Which rates to add so that the best one has neighbors on both sides; empty if it has them."""
    add = [best / 2] if near.min() == best else []
    if near.max() == best:
        too_high = min((rate for rate in diverged if rate > best), default=math.inf)
        add.append(math.sqrt(best * too_high) if too_high < 2.01 * best else 2 * best)
    rates = " and ".join(f"{rate:.2g}" for rate in add)
    return f"no loss on either side of that at {best:g}: add {rates}" if add else ""


def _optimum(rates_S: Array, loss_S: Array) -> Optimum:
    """The lowest point of the parabola fitted to these runs; their scatter gives its interval."""
    x_S, num_runs = np.log(rates_S), len(rates_S)
    vertex, bottom, bend, apart = parabola(x_S, loss_S)
    if not (bend > 0 and bottom > 0) or apart > 1:
        return replace(_NONE, doubt="the losses have no valley: train longer, or use more seeds")
    reach, value, doubt = math.sqrt(2 * TOLERABLE * bottom / bend), math.exp(vertex), ""
    error = math.nan
    if num_runs <= FEWEST_RATES:
        doubt = f"no interval: three runs determine a parabola; add rates near {value:.2g} or seeds"
    else:  # an error of the slope moves the vertex by error / second derivative
        covariance = np.polyfit(x_S - vertex, loss_S, 2, cov=True)[1]
        error = math.sqrt(covariance[1, 1]) / bend
    rate = students(value, error, num_runs - 3)
    low, high = value * math.exp(-reach), value * math.exp(reach)
    return Optimum(rate=rate, loss=bottom, low=low, high=high, doubt=doubt)


def tuned_rates(rows: Sequence[Row]) -> Tuned:
    """The valley of a table. DataError if too few runs have ended, or batch sizes differ."""
    batches = sorted({int(row.tokens_per_step) for row in rows if row.tokens_per_step}) or [0]
    if len(batches) > 1:
        numbers = " and ".join(f"{batch:,}" for batch in batches)
        raise DataError(f"rates at {numbers} tokens per step, expected one number: plan each alone")
    ended = [row for row in rows if row.progress == 1.0 and row.loss != ""]
    rates = [float(row.learning_rate) for row in ended]
    return fit_rates(batches[0], rates, [float(row.loss) for row in ended])


def rates_table(tuned: Tuned) -> list[list[str]]:
    """The mean loss over the seeds at each rate, as a table whose first row is its header."""
    rows = [["rate", f"{amount(tuned.tokens_per_step)} tokens a step"]]
    for rate in sorted({*tuned.rates_S.tolist(), *tuned.diverged}):
        loss_S = tuned.loss_S[tuned.rates_S == rate]
        gone = rate in tuned.diverged
        rows.append([f"{rate:.3g}", "diverged" if gone else as_loss(float(loss_S.mean()))])
    return rows


def best_rate_lines(tuned: Tuned) -> list[str]:
    """Return the best rate, or why it is unknown, and a warning if losses contradict it."""
    best, (rate, loss) = tuned.optimum, tuned.lowest
    start = f"{amount(tuned.tokens_per_step)} tokens a step: "
    if not best.is_known:
        return [f"{start}no best rate: {best.doubt} (plan again; finished runs are kept)"]
    text = f"{start}optim.learning_rate={best.rate.value:.2g}"
    if math.isfinite(best.rate.low):
        text += f" [{best.rate.low:.2g}, {best.rate.high:.2g}]"
    text += f", loss {as_loss(best.loss)}; {best.low:.2g} to {best.high:.2g} lose at most "
    lines = [f"{text}{TOLERABLE:.1%}" + (f" ({best.doubt})" if best.doubt else "")]
    if not best.low <= rate <= best.high or best.loss < loss * (1 - TOLERABLE):
        lines.append(
            f"warning: the lowest measured loss is {as_loss(loss)}, at {rate:.3g}: the losses do "
            f"not follow the parabola, so prefer {rate:.3g}, or add seeds and rates near it"
        )
    return lines


@dataclass(frozen=True, kw_only=True)
class Rung:
    """The optimum of one sweep of rates."""

    body_parameters: float
    tokens: float
    rate: Interval
    base_width: int = 0  # muP's, if the rate transfers to other widths; 0: it does not


def read_rungs(tables: Sequence[Path]) -> tuple[Rung, ...]:
    """Return a rung per table of a sweep of rates, by size; ConfigError if one has no best rate."""
    rungs = []
    for path in tables:
        rows = read_rows(path)
        if {row.varies for row in rows} != {"rates"}:
            raise ConfigError(f"--tuned {path}: expected the table of a sweep that varies rates")
        best = tuned_rates(rows).optimum
        if not best.is_known:
            raise ConfigError(
                f"--tuned {path}: has no best rate: {best.doubt}; "
                f"'pretrain scale report {path}' shows the losses"
            )
        ended = next(row for row in rows if row.progress == 1.0)
        size, tokens, width = float(ended.N_body), float(ended.D), int(ended.base_width)
        rungs.append(Rung(body_parameters=size, tokens=tokens, rate=best.rate, base_width=width))
    return tuple(sorted(rungs, key=lambda rung: rung.body_parameters))


@dataclass(frozen=True, kw_only=True)
class TunedRule:
    """A rule for `with_budget` that takes the rate from the rungs and keeps the run's lanes."""

    rungs: tuple[Rung, ...]
    base_width: int = 0  # of the runs

    @property
    def transfers(self) -> bool:
        """Whether one rung's rate holds at every width."""
        return self.base_width > 0 and {rung.base_width for rung in self.rungs} == {self.base_width}

    @property
    def rate(self) -> np.poly1d:
        """ln rate over ln N: a line, or a constant if all rungs have one size."""
        sizes = [1.0 if self.transfers else rung.body_parameters for rung in self.rungs]
        rates = [rung.rate.value for rung in self.rungs]
        return np.poly1d(np.polyfit(np.log(sizes), np.log(rates), int(len({*sizes}) > 1)))

    def __call__(self, run: RunConfig, tokens: float) -> tuple[float, float]:
        return math.exp(self.rate(math.log(run_cost(run).body_parameters))), 0.0

    def describe(self, runs: Sequence[RunConfig]) -> list[str]:
        """The rungs, the rule, and which of the runs it is extrapolated to; a line each."""
        rungs = ", ".join(
            f"{rung.rate.value:.1e} at {as_size(rung.body_parameters)}" for rung in self.rungs
        )
        words = f"N^{self.rate.coef[0]:.3f} between and beyond"
        if self.rate.order == 0:
            words = "the same at every size, as of one rung: add a second"
        words = "the same at every width (model.base_width)" if self.transfers else words
        lines = [f"rate: tuned on {rungs} (N without embeddings); {words}"]
        far = [run.name for run in runs if self._is_far(run)]
        if far:
            lines.append(
                f"warning: {len(far)} of {counted(len(runs), 'cell')}, such as {far[0]}, are over "
                f"{FAR_RUNG:g}x from the rungs in size or {FAR_TOKENS:g}x in tokens, so that their "
                "rates are extrapolated: tune a rung nearer to them"
            )
        return lines

    def _is_far(self, run: RunConfig) -> bool:
        cost = run_cost(run)
        sizes = [cost.body_parameters / rung.body_parameters for rung in self.rungs]
        tokens = [cost.tokens / rung.tokens for rung in self.rungs]
        far = [(tokens, FAR_TOKENS)] + ([] if self.transfers else [(sizes, FAR_RUNG)])
        return any(min(ratios) > factor or max(ratios) < 1 / factor for ratios, factor in far)
