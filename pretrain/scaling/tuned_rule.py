"""Learning rate and batch of every size, from sweeps of rates at some sizes (rungs).

`scale tune` fits each rung's best rate with its interval. Over several rungs the rate is a power of
N without embeddings, by weighted least squares on the logarithms. One rung's rate is used as it is:
that is right for models whose rates transfer between widths, and for others near that size only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_pipeline.errors import ConfigError
from pretrain.config.resolve import with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of
from pretrain.scaling.intervals import Interval, amount, as_exponent, as_size, shown
from pretrain.scaling.sweep_file import read_sweep, require_reader
from pretrain.scaling.tune import Tuned, tuned_rates
from pretrain.scaling.which_runs import cells_directory, cells_of

NORMAL_95 = 1.96  # standard deviations on either side that hold 95%
UNKNOWN_SPREAD = math.log(2) / 2  # of ln rate, where a rung's sweep gave no interval
FAR = 4.0  # times the smallest or largest rung: beyond, a rate is extrapolated
FAR_TOKENS = 10.0  # times the fewest or most tokens of a rung: the best rate depends on them, too


@dataclass(frozen=True, kw_only=True)
class Rung:
    """The optimum of one sweep of rates."""

    name: str
    body_parameters: float
    tokens: float
    rate: Interval
    tokens_per_step: float
    num_batches: int  # batch sizes that were compared
    base_width: int = 0  # from which its rates transfer to other widths; 0: they do not

    @property
    def spread(self) -> float:
        """The standard deviation of ln rate."""
        if not self.rate.high > self.rate.low > 0:
            return UNKNOWN_SPREAD
        return math.log(self.rate.high / self.rate.low) / (2 * NORMAL_95)


def read_rungs(sweeps: Sequence[str]) -> tuple[Rung, ...]:
    """The rungs of sweep files, each FILE or FILE=RUNS_DIR, by size.

    ConfigError for a sweep whose best rate is not known yet.
    """
    rungs = [_rung_of(*text.partition("=")[::2]) for text in sweeps]
    return tuple(sorted(rungs, key=lambda rung: rung.body_parameters))


def _rung_of(file: str, runs_dir: str) -> Rung:
    path = Path(file)
    sweep = read_sweep(path)
    require_reader(sweep, path, "pretrain scale tune report")
    runs = cells_directory(sweep, Path(runs_dir) if runs_dir else None)
    cells = cells_of(sweep, path, runs)
    found, _ = tuned_rates(cells)
    known = [item for item in found if item.optimum.is_known]
    if not known:
        raise ConfigError(
            f"--tuned {path}: has no best rate: {found[0].optimum.doubt}; "
            "'pretrain scale tune report' prints what to add"
        )
    best: Tuned = min(known, key=lambda item: item.optimum.loss)
    run = with_vocabulary(cells[0].config)
    cost = cost_of(run)
    return Rung(
        name=sweep.name,
        body_parameters=cost.body_parameters,
        tokens=cost.tokens,
        rate=best.optimum.rate,
        tokens_per_step=best.tokens_per_step,
        num_batches=len(found),
        base_width=run.model.base_width,
    )


@dataclass(frozen=True, kw_only=True)
class Power:
    """y = exp(intercept) x^power, with the 95% interval of the power (NaN: it was not fitted)."""

    intercept: float
    power: Interval

    def at(self, x: float) -> float:
        return math.exp(self.intercept + self.power.value * math.log(x))


def fit_power(x: Sequence[float], y: Sequence[float], spread: Sequence[float]) -> Power:
    """Weighted least squares of ln y over ln x; a constant if all x are the same.

    The errors are those stated, or the scatter around the line if that is larger.
    """
    log_x, log_y = np.log(x), np.log(y)
    weights = 1 / np.square(spread)
    x_mean, y_mean = np.average(log_x, weights=weights), np.average(log_y, weights=weights)
    squares = float((weights * (log_x - x_mean) ** 2).sum())
    if squares < 1e-12:
        return Power(intercept=float(y_mean), power=Interval(0.0, math.nan, math.nan))
    power = float((weights * (log_x - x_mean) * (log_y - y_mean)).sum()) / squares
    residuals = log_y - y_mean - power * (log_x - x_mean)
    spare = len(log_x) - 2
    scatter = float((weights * residuals**2).sum()) / spare if spare else 0.0
    error = NORMAL_95 * math.sqrt(max(1.0, scatter) / squares)
    return Power(
        intercept=float(y_mean - power * x_mean),
        power=Interval(power, power - error, power + error),
    )


@dataclass(frozen=True, kw_only=True)
class TunedRule:
    """A rule for `with_budget`: the rungs' rate and batch at any size."""

    rungs: tuple[Rung, ...]
    base_width: int = 0  # of the runs

    @property
    def transfers(self) -> bool:
        """Whether one rung's rate holds at every width."""
        return self.base_width > 0 and {rung.base_width for rung in self.rungs} == {self.base_width}

    @property
    def rate(self) -> Power:
        """The rate over N without embeddings."""
        return fit_power(
            [1.0 if self.transfers else rung.body_parameters for rung in self.rungs],
            [rung.rate.value for rung in self.rungs],
            [rung.spread for rung in self.rungs],
        )

    @property
    def batch(self) -> Power | None:
        """Tokens per step over D; None if no rung compared batches: then the run keeps its own."""
        rungs = self._with_batches
        if not rungs:
            return None
        return fit_power(
            [rung.tokens for rung in rungs],
            [rung.tokens_per_step for rung in rungs],
            [UNKNOWN_SPREAD] * len(rungs),  # the best of a few, usually 2x apart
        )

    def __call__(self, run: RunConfig, tokens: float) -> tuple[float, float]:
        batch = self.batch
        return self.rate.at(cost_of(run).body_parameters), batch.at(tokens) if batch else 0.0

    def describe(self, runs: Sequence[RunConfig]) -> list[str]:
        """The rungs, the rule, and which of the runs it is extrapolated to; a line each."""
        rungs = ", ".join(
            f"{shown(rung.rate, as_rate)} at {as_size(rung.body_parameters)}" for rung in self.rungs
        )
        words = "the same at every width (model.base_width)"
        words = words if self.transfers else _words(self.rate, "N")
        lines = [f"rate: tuned on {rungs} (N without embeddings); {words}"]
        if batch := self.batch:
            sizes = ", ".join(
                f"{amount(rung.tokens_per_step)} at D of {as_size(rung.tokens)}"
                for rung in self._with_batches
            )
            lines.append(f"batch: the best of those tried, {sizes}; {_words(batch, 'D')}")
        return lines + self._doubts(runs)

    def _doubts(self, runs: Sequence[RunConfig]) -> list[str]:
        """A line for runs far from the rungs in size, and one for those far from them in tokens."""
        found = []
        sizes, tokens = (
            [getattr(rung, name) for rung in self.rungs] for name in ("body_parameters", "tokens")
        )
        if not self.transfers and (
            far := _far(runs, [cost_of(run).body_parameters for run in runs], sizes, FAR)
        ):
            found.append(
                f"warning: the rates of {len(far)} of {len(runs)} cells are extrapolated over "
                f"{FAR:g}x beyond the rungs, such as {far[0].name}'s: tune a rung nearer to them"
            )
        if far := _far(runs, [cost_of(run).tokens for run in runs], tokens, FAR_TOKENS):
            ends = " to ".join(dict.fromkeys(amount(end) for end in (min(tokens), max(tokens))))
            found.append(
                f"warning: {len(far)} of {len(runs)} cells, such as {far[0].name}, read over "
                f"{FAR_TOKENS:g}x more or fewer tokens than the rungs ({ends}), and the best rate "
                "depends on that, too: tune over about as many"
            )
        return found

    @property
    def _with_batches(self) -> tuple[Rung, ...]:
        """The rungs that compared batches."""
        return tuple(rung for rung in self.rungs if rung.num_batches > 1)


def _far(
    runs: Sequence[RunConfig], values: Sequence[float], known: Sequence[float], factor: float
) -> list[RunConfig]:
    """The runs whose value is over `factor` times outside of the known ones."""
    low, high = min(known) / factor, max(known) * factor
    return [run for run, value in zip(runs, values, strict=True) if not low <= value <= high]


def _words(fitted: Power, letter: str) -> str:
    if not math.isfinite(fitted.power.low):
        return "the same at every size, since there is one rung: add a second"
    return f"{letter}^{shown(fitted.power, as_exponent)} between and beyond"


def as_rate(value: float) -> str:
    """A learning rate: `2.1e-03`."""
    return f"{value:.1e}" if math.isfinite(value) else "-"
