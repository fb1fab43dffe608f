"""Learning rates: sweeps of one model at several, their valleys, and the rule of plans by them.

The loss over ln(rate) is flat at the bottom, rises slowly towards lower rates and steeply towards
higher ones. So a parabola is fitted only to rates near the lowest loss, and the answer is a range
of rates rather than one. Over several sizes (rungs) the rate is a power of N without embeddings.
Legend: S runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from foundation.errors import ConfigError, DataError
from foundation.settings import MOST
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of
from pretrain.scaling.collect import Row, read_rows
from pretrain.scaling.intervals import Interval, amount, as_exponent, as_loss, as_size, shown
from pretrain.scaling.plan import PlannedRun, planned_run
from pretrain.scaling.table import Array
from pretrain.terminal.text import counted

NORMAL_95 = 1.96  # standard deviations on either side that hold 95%
UNKNOWN_SPREAD = math.log(2) / 2  # of ln rate, where a rung's sweep gave no interval
FAR = 4.0  # times the smallest or largest rung: beyond, a rate is extrapolated
FAR_TOKENS = 10.0  # times the fewest or most tokens of a rung: the best rate depends on them, too
NEAR = 4.0  # rates within this factor of the one with the lowest loss shape the parabola
FEWEST_RATES = 3
DIVERGED = 1.5  # times the lowest loss: a higher rate whose run ends above has diverged
TOLERABLE = 0.005  # of the loss: what a rate in the reported range may lose


def plan_rates(
    base: RunConfig,
    rates: Sequence[float],
    *,
    lanes: Sequence[int] = (),
    seeds: Sequence[int] = (),
    steps: int | None = None,
) -> list[PlannedRun]:
    """The base with every rate, number of lanes and seed; all read as many tokens.

    More lanes make fewer steps. `steps` are those with the base's lanes (None: the base's); warm-up
    and decay are in proportion to them. Raises ConfigError for rates that are no positive numbers,
    or fewer than three.
    """
    if len({*rates}) < FEWEST_RATES or not all(0 < rate < math.inf for rate in rates):
        raise ConfigError(
            f"--rates {' '.join(f'{rate:g}' for rate in rates)}: expected at least {FEWEST_RATES} "
            "different positive rates, such as 5e-4 1e-3 2e-3 4e-3"
        )
    if base.data.phases:
        raise ConfigError(f"{base.name} has phases (data.phases); take them out to tune its rate")
    steps = base.optim.steps if steps is None else steps
    if steps > MOST:
        raise ConfigError(f"--steps={steps} must be at most {MOST:g}")
    tokens = steps * base.tokens_per_step
    runs = []
    for count in sorted({*(lanes or [base.data.lanes])}):
        run = replace(base, data=replace(base.data, lanes=count))
        if num_steps := tokens // run.tokens_per_step:
            run = _with_steps(run, num_steps)
        else:
            raise ConfigError(f"--lanes {count}: {tokens:,} tokens are less than one step of them")
        runs += [
            _planned(run, rate, seed, len({*seeds}) > 1)
            for rate in sorted({*rates})
            for seed in sorted({*(seeds or [base.seed])})
        ]
    return runs


def _with_steps(run: RunConfig, steps: int) -> RunConfig:
    """The run with that many steps, and warm-up, decay and saves in proportion."""
    optim, schedule = run.optim, run.optim.schedule
    part = steps / optim.steps
    schedule = replace(
        schedule,
        warmup_steps=round(part * schedule.warmup_steps),
        decay_steps=round(part * schedule.decay_steps),
    )
    interval = max(1, round(part * run.checkpoint.interval))
    return replace(
        run,
        optim=replace(optim, steps=steps, schedule=schedule),
        checkpoint=replace(run.checkpoint, interval=interval),
    )


def _planned(run: RunConfig, rate: float, seed: int, has_seeds: bool) -> PlannedRun:
    name = f"b{run.tokens_per_step}-lr{rate:g}" + (f"-s{seed}" if has_seeds else "")
    optim = replace(run.optim, learning_rate=rate)
    facts = {"learning_rate": rate, "tokens_per_step": run.tokens_per_step}
    return planned_run(replace(run, name=name, seed=seed, optim=optim), facts)


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The lowest point of a valley of losses over rates; NaN where nothing can be estimated."""

    rate: Interval
    loss: float  # at that rate
    low: float  # from here...
    high: float  # ...to here a rate loses at most TOLERABLE
    doubt: str = ""  # why there is no optimum, or no interval
    missing_rates: tuple[float, ...] = ()  # without which there is none

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
    near_S: Array  # which runs shaped the parabola
    optimum: Optimum


def fit_rates(
    tokens_per_step: int,
    rates: Sequence[float],
    losses: Sequence[float],
) -> Tuned:
    """The valley of the losses over the rates, without those of runs that diverged.

    Their loss is not finite, or far above the lowest one at a higher rate than that of the lowest,
    which would bend the parabola. A far lower rate that ends as high only learns slowly.
    Raises DataError if fewer than three rates ended with a loss.
    """
    pairs = sorted(zip(rates, losses, strict=True))
    _require_enough(tokens_per_step, [rate for rate, loss in pairs if math.isfinite(loss)])
    rates_S, loss_S = (np.array(x) for x in zip(*pairs, strict=True))
    finite_S = np.where(np.isfinite(loss_S), loss_S, math.inf)
    is_slower_S = rates_S <= rates_S[finite_S.argmin()]
    usable_S = np.isfinite(loss_S) & (is_slower_S | (loss_S <= DIVERGED * finite_S.min()))
    diverged = tuple(sorted({float(rate) for rate in rates_S[~usable_S]}))
    rates_S, loss_S = rates_S[usable_S], loss_S[usable_S]
    _require_enough(tokens_per_step, rates_S)
    best = _lowest_rate(rates_S, loss_S)
    near_S = (rates_S <= best * NEAR * 1.001) & (rates_S >= best / NEAR / 1.001)
    doubt, missing = _missing_rates(rates_S, near_S, best, diverged)
    optimum = _optimum(rates_S[near_S], loss_S[near_S]) if not doubt else _NONE
    return Tuned(
        tokens_per_step=tokens_per_step,
        rates_S=rates_S,
        loss_S=loss_S,
        diverged=diverged,
        near_S=near_S,
        optimum=replace(optimum, doubt=doubt or optimum.doubt, missing_rates=missing),
    )


def _require_enough(tokens_per_step: int, rates: Sequence[float] | Array) -> None:
    if (count := len({*rates})) < FEWEST_RATES:
        raise DataError(
            f"{tokens_per_step:,} tokens per step: {counted(count, 'rate')} ended with a loss, a "
            f"valley needs {FEWEST_RATES}; let the sweep finish, or add lower rates"
        )


def _lowest_rate(rates_S: Array, loss_S: Array) -> float:
    """The rate whose mean loss over the seeds is lowest."""
    means = {rate: loss_S[rates_S == rate].mean() for rate in np.unique(rates_S)}
    return float(min(means, key=means.__getitem__))


def _missing_rates(
    rates_S: Array, near_S: Array, best: float, diverged: Sequence[float]
) -> tuple[str, tuple[float, ...]]:
    """Why the lowest loss cannot be enclosed, and by which rates it could be.

    Empty if there are rates on both sides of it.
    """
    lower, higher = best / 2, best * 2
    too_high = min((rate for rate in diverged if rate > best), default=math.inf)
    if best == rates_S.min():
        return f"{best:g} is the lowest rate tried: add {lower:g}", (lower,)
    if best == rates_S.max():
        if too_high <= higher * 1.001:
            higher = float(f"{math.sqrt(best * too_high):.2g}")
        what = "that did not diverge" if math.isfinite(too_high) else "tried"
        return f"{best:g} is the highest rate {what}: add {higher:g}", (higher,)
    near = rates_S[near_S]
    if near.min() == best or near.max() == best:
        return f"rates near {best:g} are missing: add {lower:g} and {higher:g}", (lower, higher)
    return "", ()


def _optimum(rates_S: Array, loss_S: Array) -> Optimum:
    """The lowest point of the parabola through these runs, with its interval by its scatter."""
    log_S = np.log(rates_S)
    center, half = float(log_S.max() + log_S.min()) / 2, float(max(np.ptp(log_S) / 2, 1e-12))
    terms_S3 = np.vander((log_S - center) / half, 3)
    curve, slope, level = coefficients = np.linalg.lstsq(terms_S3, loss_S, rcond=None)[0]
    if not curve > 0 or abs(slope) > 2 * curve:
        return replace(_NONE, doubt="the losses have no valley: train longer, or use more seeds")
    vertex, bottom = -slope / (2 * curve), float(level - slope**2 / (4 * curve))
    reach, error = math.sqrt(TOLERABLE * bottom / curve), math.nan
    if spare := len(log_S) - 3:
        from scipy.special import stdtrit

        variance = ((loss_S - terms_S3 @ coefficients) ** 2).sum() / spare
        change = np.array([slope / (2 * curve**2), -1 / (2 * curve), 0.0])
        of_vertex = change @ np.linalg.pinv(terms_S3.T @ terms_S3) @ change * variance
        error = float(stdtrit(spare, 0.975) * math.sqrt(of_vertex))
    value, low, high, best_low, best_high = (
        math.exp(center + half * x)
        for x in (vertex, vertex - error, vertex + error, vertex - reach, vertex + reach)
    )
    doubt = (
        ""
        if spare
        else (f"no interval: three runs determine a parabola; add rates near {value:.2g} or seeds")
    )
    rate = Interval(value, low, high)
    return Optimum(rate=rate, loss=bottom, low=best_low, high=best_high, doubt=doubt)


def tuned_rates(rows: Sequence[Row]) -> list[Tuned]:
    """The valley of every batch size in a table. DataError if too few runs have ended."""
    losses: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        if row.tokens_per_step:
            batch = losses.setdefault(int(row.tokens_per_step), [])
            if row.progress == 1.0 and row.loss != "":
                batch.append((float(row.learning_rate), float(row.loss)))
    return [
        fit_rates(batch, [rate for rate, _ in pairs], [loss for _, loss in pairs])
        for batch, pairs in sorted(losses.items())
    ] or [fit_rates(0, [], [])]


def tuned_table(found: Sequence[Tuned]) -> list[list[str]]:
    """Heads and rows: the mean loss over the seeds, a row per rate and a column per batch size."""
    rates = sorted({float(rate) for item in found for rate in (*item.rates_S, *item.diverged)})
    heads = ["rate", *(f"{amount(item.tokens_per_step)} tokens a step" for item in found)]
    return [heads, *([f"{rate:.3g}", *(_loss_at(item, rate) for item in found)] for rate in rates)]


def _loss_at(item: Tuned, rate: float) -> str:
    if rate in item.diverged:
        return "diverged"
    losses = item.loss_S[item.rates_S == rate]
    return as_loss(float(losses.mean())) if len(losses) else "-"


def verdicts(found: Sequence[Tuned]) -> list[str]:
    """One line per batch size: the best rate, or why there is none; and one for each warning."""
    lines = []
    for item in found:
        lines.append(f"{amount(item.tokens_per_step)} tokens a step: {_verdict(item.optimum)}")
        if warning := _warning(item):
            lines.append(f"warning: {warning}")
    if added := sorted({rate for item in found for rate in item.optimum.missing_rates}):
        words = " ".join(f"{rate:g}" for rate in added)
        lines.append(
            f"to add rates: plan again with {words} among --rates and the other flags as before; "
            "finished runs are kept"
        )
    return lines


def _warning(item: Tuned) -> str:
    """Where the parabola contradicts the losses that it stands for; empty if it does not."""
    optimum, rate = item.optimum, _lowest_rate(item.rates_S, item.loss_S)
    loss = float(item.loss_S[item.rates_S == rate].mean())
    if not optimum.is_known or (
        optimum.low <= rate <= optimum.high and optimum.loss >= loss * (1 - TOLERABLE)
    ):
        return ""
    return (
        f"the lowest measured loss is {as_loss(loss)}, at {rate:.3g}: the losses do not follow the "
        f"parabola, so prefer {rate:.3g}, or add seeds and rates near it"
    )


def _verdict(best: Optimum) -> str:
    if not best.is_known:
        return f"no best rate: {best.doubt}"
    text = f"optim.learning_rate={best.rate.value:.2g}"
    if math.isfinite(best.rate.low):
        text += f" [{best.rate.low:.2g}, {best.rate.high:.2g}]"
    text += f", loss {as_loss(best.loss)}; {best.low:.2g} to {best.high:.2g} lose at most "
    return f"{text}{TOLERABLE:.1%}" + (f" ({best.doubt})" if best.doubt else "")


@dataclass(frozen=True, kw_only=True)
class Rung:
    """The optimum of one sweep of rates."""

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


def read_rungs(tables: Sequence[Path]) -> tuple[Rung, ...]:
    """The rungs of tables that `collect` wrote of sweeps of rates, by size.

    ConfigError for a table whose best rate is not known yet.
    """
    return tuple(sorted(map(_rung_of, tables), key=lambda rung: rung.body_parameters))


def _rung_of(path: Path) -> Rung:
    rows = read_rows(path)
    if {row.varies for row in rows} != {"rates"}:
        raise ConfigError(f"--tuned {path}: expected the table of a sweep that varies rates")
    found = tuned_rates(rows)
    known = [item for item in found if item.optimum.is_known]
    if not known:
        raise ConfigError(
            f"--tuned {path}: has no best rate: {found[0].optimum.doubt}; "
            f"'pretrain scale report {path}' shows the losses"
        )
    best: Tuned = min(known, key=lambda item: item.optimum.loss)
    ended = next(row for row in rows if row.progress == 1.0)
    return Rung(
        body_parameters=float(ended.N_body),
        tokens=float(ended.D),
        rate=best.optimum.rate,
        tokens_per_step=best.tokens_per_step,
        num_batches=len(found),
        base_width=int(ended.base_width),
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


def as_rate(value: float, half: float = math.nan) -> str:
    """A learning rate: `2.1e-03`."""
    return f"{value:.1e}" if math.isfinite(value) else "-"
