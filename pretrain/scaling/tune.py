"""The best learning rate of a run: one model at several rates, and the valley of their losses.

The loss over ln(rate) is flat at the bottom, rises slowly towards lower rates and steeply towards
higher ones. So a parabola is fitted only to rates near the lowest loss, and the answer is a range
of rates rather than one. Legend: K draws, S runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.setting_fields import MOST
from pretrain.config.run import RunConfig
from pretrain.scaling.collect import row_of
from pretrain.scaling.intervals import Interval, amount, as_loss, interval
from pretrain.scaling.parabola import (
    fitted_and_residuals,
    frame,
    parabolas,
    vertex_draws,
    widening,
)
from pretrain.scaling.plan import PlannedRun, planned_run
from pretrain.scaling.points import Array
from pretrain.scaling.which_runs import PlacedCell
from pretrain.terminal.text import counted

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
    facts = {"tuned_rate": rate, "tokens_per_step": run.tokens_per_step}
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
    *,
    num_draws: int = 1000,
    seed: int = 0,
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
    optimum = _optimum(rates_S[near_S], loss_S[near_S], num_draws, seed) if not doubt else _NONE
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


def _optimum(rates_S: Array, loss_S: Array, num_draws: int, seed: int) -> Optimum:
    """The lowest point of the parabola through these runs."""
    log_S = np.log(rates_S)
    center, half = frame(log_S)
    x_S = (log_S - center) / half
    vertex, bottom, bend = (float(value[0]) for value in parabolas(x_S, loss_S[None]))
    if not bend > 0 or abs(vertex) > 1:
        return replace(_NONE, doubt="the losses have no valley: train longer, or use more seeds")
    reach = math.sqrt(2 * TOLERABLE * bottom / bend)
    low, high, value = (
        math.exp(center + half * x) for x in (vertex - reach, vertex + reach, vertex)
    )
    spare = len(x_S) - 3
    fitted_S, residual_S = fitted_and_residuals(x_S, loss_S)
    pool = (residual_S - residual_S.mean()) * widening(spare)
    vertex_K, _ = vertex_draws(x_S, fitted_S, pool, np.random.default_rng(seed), num_draws)
    found = interval(value, np.exp(center + half * vertex_K))
    doubt = ""
    if spare < 1:
        found = replace(found, low=math.nan, high=math.nan)
        doubt = f"no interval: three runs determine a parabola; add rates near {value:.2g} or seeds"
    return Optimum(rate=found, loss=bottom, low=low, high=high, doubt=doubt)


def tuned_rates(cells: Sequence[PlacedCell]) -> tuple[list[Tuned], list[str]]:
    """The valley of every batch size of a sweep, and a line for every cell that takes no part.

    Raises DataError if too few cells have ended.
    """
    losses: dict[int, list[tuple[float, float]]] = {}
    left_out = []
    for placed in cells:
        row, config = row_of(placed), placed.config
        batch = losses.setdefault(config.tokens_per_step, [])
        if row.progress == 1.0 and isinstance(row.loss, float):
            batch.append((config.optim.learning_rate, row.loss))
        if row.excluded:
            left_out.append(f"left out: {row.name}: {row.excluded}")
    found = [
        fit_rates(batch, [rate for rate, _ in pairs], [loss for _, loss in pairs])
        for batch, pairs in sorted(losses.items())
    ]
    return found, left_out


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
