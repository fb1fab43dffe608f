"""A comparison of variants of one model at equal training FLOPs: file, results and page.

Sweeps that vary rates or lengths have such pages too. Losses are in nats per token of the
validation split.

name: variants
experiment: ../experiments/variants.yaml    # relative to this file
flops: 6e11                 # of training, of every run
rates: [2e-3, 4e-3, 8e-3]   # every member is trained with each...
seeds: [1, 2]               # ...and each of these
settings: [model.d_model=64]                # of all members; may be left out
members:                    # settings by which each differs from the experiment
  no-memory: [model.memory_length=0]
  transformer-xl: []

A cell's name is cFLOPS-MEMBER-lrRATE-sSEED, so other FLOPs are other runs. Torch-free.

The loss over ln(rate) is flat at the bottom, rises slowly towards lower rates and steeply towards
higher ones. So a parabola is fitted only to rates near the lowest loss, and the answer is a range
of rates rather than one. Over several sizes (rungs) the rate is a power of N without embeddings.
Letters: S seeds or runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

import numpy as np

from foundation.errors import ConfigError, DataError
from foundation.settings import load_config, require_name
from foundation.yaml_files import read_tree
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of
from pretrain.reporting.charts import (
    INK,
    SERIES,
    canvas,
    legend_above,
    log_ticks,
    plain_ticks,
    spread_colors,
)
from pretrain.scaling.collect import FAR, PROBED, Row, read_rows
from pretrain.scaling.frontier import parabola
from pretrain.scaling.law import Interval, amount, as_loss, as_size, students
from pretrain.scaling.plan import PlannedRun, at_computed_flops, planned_run, varied
from pretrain.scaling.report import LOSS, Part, write_parts
from pretrain.scaling.table import Array, csv_rows
from pretrain.sweeps.sweep_file import check_overrides
from pretrain.terminal.text import counted, fitted_table, flops_text, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PLANNED = ("name", "seed", "optim.steps", "optim.learning_rate", "evaluation.interval")
_PLANNED += ("optim.schedule.warmup_steps", "optim.schedule.decay_steps", "checkpoint.interval")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is compared, and how."""

    name: str
    experiment: Path
    flops: float
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    members: Mapping[str, tuple[str, ...]]
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_name("name", self.name)
        for member in self.members:
            require_name("members", member)
        if len(self.members) < 2:
            raise ConfigError(f"found {len(self.members)} members, expected two or more")
        for name, values, least in (("rates", self.rates, 1e-300), ("seeds", self.seeds, 0)):
            if not values or min(values) < least or len({*values}) < len(values):
                raise ConfigError(
                    f"{name}={list(values)}: expected one or more different numbers, none negative"
                )
        for each in (*self.settings, *(each for item in self.members.values() for each in item)):
            if each.partition("=")[0] in _PLANNED:
                raise ConfigError(f"{each} follows from flops, rates and seeds; leave it out")


def read_comparison(path: Path, overrides: Sequence[str] = ()) -> Comparison:
    """Return the comparison in a file, with further settings of all members.

    ConfigError lists everything that is wrong with it.
    """
    tree = read_tree(path)
    members = tree.get("members")
    for member, settings in members.items() if isinstance(members, dict) else ():
        check_overrides(f"{path}: members.{member}", settings)
    check_overrides(f"{path}: settings", tree.get("settings", []))
    found = load_config(Comparison, path)
    return replace(found, settings=(*found.settings, *overrides))


def plan_members(comparison: Comparison, experiment: Path) -> list[PlannedRun]:
    """Every member at every rate and seed, with the steps that its FLOPs pay for.

    Members take turns, so that what slows the machine for a while slows all of them. Raises
    ConfigError for settings that do not go together, and for too few or too many FLOPs.
    """
    budget = f"c{comparison.flops:.3g}".replace("+", "")
    members = {f"{budget}-{name}": item for name, item in comparison.members.items()}
    rates = {f"lr{rate:g}": [f"optim.learning_rate={rate!r}"] for rate in comparison.rates}
    seeds = {f"s{seed}": [f"seed={seed}"] for seed in comparison.seeds}
    runs = varied(experiment, comparison.settings, [members, rates, seeds])
    runs.sort(key=lambda run: (run.seed, run.optim.learning_rate))
    flops = comparison.flops
    return [planned_run(at_computed_flops(run, flops), {"budget": flops}) for run in runs]


def member_of(cell: str) -> str:
    """Return the member that a cell trains, by the cell's name."""
    return cell.partition("-")[2].rpartition("-lr")[0]


@dataclass(frozen=True, kw_only=True)
class MemberResult:
    """One member at its best rate; losses are of the validation split, in nats per token."""

    member: str
    first: Row  # of its runs
    losses_S: tuple[float, ...]
    is_edge: bool  # the best rate is the lowest or the highest one tried
    tokens_per_second: float  # the median of all runs of the member, of training alone
    probes: Mapping[str, float]  # the means of the seeds, by column

    @property
    def loss(self) -> float:
        return fmean(self.losses_S)

    @property
    def spread(self) -> float | None:
        """Half the range of the seeds; None with one seed."""
        losses = self.losses_S
        return (max(losses) - min(losses)) / 2 if len(losses) > 1 else None

    def probed(self, name: str) -> dict[int, float]:
        """The values of the columns probes/NAME/NUMBER, by their numbers."""
        parts = ((key.rpartition("/"), value) for key, value in self.probes.items())
        return {int(last): value for (kind, _, last), value in parts if kind == PROBED + name}


def results_of(rows: Sequence[Row]) -> list[MemberResult]:
    """Each member at its best rate, one run per seed, where all of its runs have ended.

    The best rate has the lowest mean loss of the seeds. DataError if no member has one.
    """
    found = []
    for member in dict.fromkeys(member_of(row.name) for row in rows):
        mine = [row for row in rows if member_of(row.name) == member]
        if not all(row.progress == 1.0 and row.loss != "" for row in mine):
            continue
        by_rate: dict[float, list[Row]] = {}
        for row in mine:
            by_rate.setdefault(float(row.learning_rate), []).append(row)
        best = min(by_rate.values(), key=lambda runs: fmean(float(row.loss) for row in runs))
        if any(row.excluded for row in best):
            continue
        first, speeds = best[0], [float(row.D) / float(row.seconds) for row in mine if row.seconds]
        shared = [name for name in first.tasks if all(name in row.tasks for row in best)]
        edges = min(by_rate), max(by_rate)
        result = MemberResult(
            member=member,
            first=first,
            losses_S=tuple(float(row.loss) for row in best),
            is_edge=len(by_rate) > 1 and first.learning_rate in edges,
            tokens_per_second=median(speeds) if speeds else math.nan,
            probes={name: fmean(row.tasks[name] for row in best) for name in shared},
        )
        found.append(result)
    if not found:
        raise DataError("no member has ended at all of its rates and seeds; let the sweep finish")
    return found


CURVE_POINTS = 60


def rows_of_comparison(path: Path) -> list[Row]:
    """The rows of a table whose sweep varied something else than sizes; [] for any other table."""
    varies = {row.get("varies") for _, row in csv_rows(path)} - {None, "", "sizes"}
    return read_rows(path) if varies else []


def write_comparison(rows: Sequence[Row], source: Path, directory: Path, title: str) -> str:
    """Write report.html about the table `source` with its figures; return what to print.

    DataError if the table has several kinds of sweeps, or too few finished runs.
    """
    kinds = {row.varies for row in rows}
    if len(kinds) != 1:
        raise DataError(f"{source}: rows of sweeps that vary {' and '.join(sorted(kinds))}")
    (kind,) = kinds
    parts = {"rates": _rates, "lengths": _lengths, "variants": _variants}[kind](rows)
    left_out = [f"left out: {row.name}: {row.excluded}" for row in rows if row.excluded]
    parts[-1] = replace(parts[-1], lines=[*parts[-1].lines, *left_out])
    done = counted(len(rows) - len(left_out), "finished run")
    path = write_parts(parts, source, directory, title, f"{done} of a sweep of {kind}.", [])
    texts = ["\n".join([fitted_table(part.rows), *part.lines]) for part in parts]
    return "\n".join([*texts, f"report: {path}"])


def _rates(runs: Sequence[Row]) -> list[Part]:
    found = tuned_rates(runs)
    caption = "Loss at the end over the peak learning rate"
    if found.optimum.is_known:
        caption += "; star: the lowest point of the parabola through the rates near it, shaded: "
        caption += "what loses at most 0.5%"
    figures = {"rates": (partial(loss_by_rate, found), caption)}
    rows = tuned_table(found)
    return [Part(title="Learning rates", rows=rows, lines=verdicts(found), figures=figures)]


def loss_by_rate(found: Tuned) -> Figure:
    """Final losses over the learning rate, with a parabola and its vertex."""
    figure, axes = canvas(3.6, "peak learning rate", LOSS)
    color = SERIES[0]
    axes.plot(found.rates_S, found.loss_S, "o", color=color, markersize=4)
    if (best := found.optimum).is_known:
        rates_S, loss_S = found.rates_S[found.near_S], found.loss_S[found.near_S]
        drawn = np.geomspace(rates_S.min(), rates_S.max(), CURVE_POINTS)
        fitted = np.polynomial.Polynomial.fit(np.log(rates_S), loss_S, 2)
        axes.plot(drawn, fitted(np.log(drawn)), "-", color=color, linewidth=1.2)
        axes.plot([best.rate.value], [best.loss], "*", color=INK, markersize=9)
        axes.axvspan(best.low, best.high, color=color, alpha=0.08, linewidth=0)
    axes.set_xscale("log")
    log_ticks(axes.xaxis)
    plain_ticks(axes.yaxis)
    return figure


def _lengths(rows: Sequence[Row]) -> list[Part]:
    if not (ended := [row for row in rows if not row.excluded]):
        raise DataError("no run of the table has ended; let the sweep finish and collect again")
    parts = []
    for other, equal, effect in (
        ("same-flops", "tokens", "a longer context costs more FLOPs"),
        ("same-tokens", "FLOPs", "a longer context reads fewer tokens"),
    ):
        mine = [row for row in ended if not row.name.endswith(other)]
        cells = [["run", "segment", "memory", "tokens", "FLOPs", "loss"]]
        for row in sorted(mine, key=lambda row: float(row.loss)):
            sizes = str(row.segment_length), str(row.memory_length), amount(float(row.D))
            cells.append([row.name, *sizes, flops_text(float(row.C)), as_loss(float(row.loss))])
        caption = f"Loss over memory length, a line per segment length; equal {equal}; {effect}"
        figures = {f"equal-{equal.lower()}": (partial(loss_by_memory, mine), caption)}
        parts += [Part(title=f"Equal {equal}", rows=cells, figures=figures)] if mine else []
    return parts


def loss_by_memory(rows: Sequence[Row]) -> Figure:
    """Loss over the memory length, a line per segment length; means over seeds."""
    figure, axes = canvas(3.4, "memory length M (tokens)", LOSS)
    memories = sorted({int(row.memory_length) for row in rows})
    segments = sorted({int(row.segment_length) for row in rows})
    for segment, color in zip(segments, spread_colors(len(segments)), strict=True):
        means = []
        for memory in memories:
            same = [r for r in rows if (r.segment_length, r.memory_length) == (segment, memory)]
            means.append(float(np.mean([float(row.loss) for row in same])) if same else np.nan)
        axes.plot(means, "o-", color=color, markersize=4, label=str(segment))
    axes.set_xticks(range(len(memories)), [str(memory) for memory in memories])
    plain_ticks(axes.yaxis)
    legend_above(figure, axes, "segment length T (tokens)")
    return figure


def _variants(rows: Sequence[Row]) -> list[Part]:
    results = results_of(rows)
    caption = "Loss at equal training FLOPs, a dot per seed"
    figures = {"variants": (partial(member_losses, results), caption)}
    if all(each.probed("position") for each in results):
        caption = f"Loss by position in the document, minus that of {results[0].member}"
        figures["positions"] = (partial(loss_by_position, results), caption)
    table, notes = variant_table(results), variant_notes(results)
    return [Part(title="Variants", rows=table, lines=notes, figures=figures)]


def variant_table(results: Sequence[MemberResult]) -> list[list[str]]:
    """Heads and rows, lowest loss first; a star marks a rate at the edge of those tried."""
    heads = ["member", "loss", "+-", f"loss from token {FAR}", "needle", "rate"]
    heads += ["state of a lane", "tokens/s", "parameters"]
    rows = []
    for each in sorted(results, key=lambda each: each.loss):
        needle = list(each.probed("needle").values())
        rows.append(
            [
                each.member,
                as_loss(each.loss),
                number(each.spread, ".4f"),
                number(each.probes.get(f"{PROBED}far_loss"), ".4f"),
                number(float(np.mean(needle)) if needle else None, ".1%"),
                f"{each.first.learning_rate:g}{'*' * each.is_edge}",
                f"{amount(float(each.first.lane_bytes))}B",
                number(each.tokens_per_second, ",.0f"),
                amount(float(each.first.N)),
            ]
        )
    return [heads, *rows]


def variant_notes(results: Sequence[MemberResult]) -> list[str]:
    """Say what the columns are, and what they rest on."""
    first = results[0]
    seeds = max(len(each.losses_S) for each in results)
    notes = [
        f"every run trained for {flops_text(float(first.first.C))} FLOPs; losses are means of "
        f"{counted(seeds, 'seed')} at the member's best rate, +- is half their range, tokens/s the "
        "median of the member's runs"
    ]
    if distances := ", ".join(map(str, first.probed("needle"))):
        chance = first.probes[f"{PROBED}chance"]
        notes.append(f"needle: accuracy over distances of {distances}; chance is {chance:.1%}")
    if any(each.is_edge for each in results):
        notes.append("a star marks the lowest or highest rate: a better one may lie beyond it")
    return notes


def member_losses(results: Sequence[MemberResult]) -> Figure:
    """The losses of every member's seeds, and their mean."""
    figure, axes = canvas(0.8 + 0.4 * len(results), LOSS, "")
    for index, (each, color) in enumerate(zip(results, spread_colors(len(results)), strict=True)):
        axes.plot(each.losses_S, [index] * len(each.losses_S), "o", color=color, markersize=5)
        axes.plot([each.loss], [index], "|", color=INK, markersize=14)
    axes.set_yticks(range(len(results)), [each.member for each in results])
    axes.invert_yaxis()
    plain_ticks(axes.xaxis)
    return figure


def loss_by_position(results: Sequence[MemberResult]) -> Figure:
    """The loss of each bin of positions, minus that of the first member."""
    base = results[0].probed("position")
    shown = [first for first in base if all(first in each.probed("position") for each in results)]
    label = f"loss minus that of {results[0].member}"
    figure, axes = canvas(3.4, "position (tokens)", label)
    for each, color in zip(results, spread_colors(len(results)), strict=True):
        values = [each.probed("position")[first] - base[first] for first in shown]
        axes.plot(range(len(shown)), values, "o-", color=color, markersize=3, label=each.member)
    axes.set_xticks(range(0, len(shown), 2), [str(first) for first in shown[::2]])
    legend_above(figure, axes)
    return figure


FAR_RUNG = 4.0  # times the smallest or largest rung: beyond, a rate is extrapolated
FAR_TOKENS = 10.0  # times the fewest or most tokens of a rung: the best rate depends on them, too
NEAR = 4.0  # rates within this factor of the one with the lowest loss shape the parabola
FEWEST_RATES = 3
DIVERGED = 1.5  # times the lowest loss: a higher rate whose run ends above has diverged
TOLERABLE = 0.005  # of the loss: what a rate in the reported range may lose


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The lowest point of a valley of losses over rates; NaN where nothing can be estimated."""

    rate: Interval
    loss: float  # at that rate
    low: float  # from here...
    high: float  # ...to here a rate loses at most TOLERABLE
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
    """The valley of the losses over the rates, without those of runs that diverged.

    Their loss is not finite, or far above the lowest one at a higher rate than that of the lowest,
    which would bend the parabola. A far lower rate that ends as high only learns slowly.
    Raises DataError if fewer than three rates ended with a loss.
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
    """Which rates to add for the lowest loss to have some on both sides; empty if it has."""
    add = [best / 2] if near.min() == best else []
    if near.max() == best:
        too_high = min((rate for rate in diverged if rate > best), default=math.inf)
        add.append(math.sqrt(best * too_high) if too_high < 2.01 * best else 2 * best)
    rates = " and ".join(f"{rate:.2g}" for rate in add)
    return f"no loss on either side of that at {best:g}: add {rates}" if add else ""


def _optimum(rates_S: Array, loss_S: Array) -> Optimum:
    """The lowest point of the parabola through these runs, with its interval by its scatter."""
    x_S, num_runs = np.log(rates_S), len(rates_S)
    vertex, bottom, bend, apart = parabola(x_S, loss_S)
    if not (bend > 0 and bottom > 0) or apart > 1:
        return replace(_NONE, doubt="the losses have no valley: train longer, or use more seeds")
    reach, value, doubt = math.sqrt(2 * TOLERABLE * bottom / bend), math.exp(vertex), ""
    error = math.nan
    if num_runs <= FEWEST_RATES:
        doubt = f"no interval: three runs determine a parabola; add rates near {value:.2g} or seeds"
    else:  # the vertex moves by the slope there over the second derivative
        covariance = np.polyfit(x_S - vertex, loss_S, 2, cov=True)[1]
        error = math.sqrt(covariance[1, 1]) / bend
    rate = students(value, error, num_runs - 3)
    low, high = value * math.exp(-reach), value * math.exp(reach)
    return Optimum(rate=rate, loss=bottom, low=low, high=high, doubt=doubt)


def tuned_rates(rows: Sequence[Row]) -> Tuned:
    """The valley of a table. DataError if too few runs have ended, or batch sizes differ."""
    batches = sorted({int(row.tokens_per_step) for row in rows if row.tokens_per_step}) or [0]
    if len(batches) > 1:
        found = " and ".join(f"{batch:,}" for batch in batches)
        raise DataError(f"rates at {found} tokens per step, expected one number: plan each alone")
    ended = [row for row in rows if row.progress == 1.0 and row.loss != ""]
    rates = [float(row.learning_rate) for row in ended]
    return fit_rates(batches[0], rates, [float(row.loss) for row in ended])


def tuned_table(found: Tuned) -> list[list[str]]:
    """Heads and rows: the mean loss over the seeds at each rate."""
    rows = [["rate", f"{amount(found.tokens_per_step)} tokens a step"]]
    for rate in sorted({*found.rates_S.tolist(), *found.diverged}):
        loss_S = found.loss_S[found.rates_S == rate]
        gone = rate in found.diverged
        rows.append([f"{rate:.3g}", "diverged" if gone else as_loss(float(loss_S.mean()))])
    return rows


def verdicts(found: Tuned) -> list[str]:
    """The best rate, or why there is none; and a warning if the losses contradict it."""
    best, (rate, loss) = found.optimum, found.lowest
    start = f"{amount(found.tokens_per_step)} tokens a step: "
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
    base_width: int = 0  # from which its rates transfer to other widths; 0: they do not


def read_rungs(tables: Sequence[Path]) -> tuple[Rung, ...]:
    """The rungs of tables that `collect` wrote of sweeps of rates, by size.

    ConfigError for a table whose best rate is not known yet.
    """
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
    """A rule for `with_budget`: the rungs' rate at any size, with the run's own lanes.

    The rate is a power of N without embeddings, or that of the rungs at any size if rates transfer
    between widths.
    """

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
        return math.exp(self.rate(math.log(cost_of(run).body_parameters))), 0.0

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
        cost = cost_of(run)
        sizes = [cost.body_parameters / rung.body_parameters for rung in self.rungs]
        tokens = [cost.tokens / rung.tokens for rung in self.rungs]
        far = [(tokens, FAR_TOKENS)] + ([] if self.transfers else [(sizes, FAR_RUNG)])
        return any(min(ratios) > factor or max(ratios) < 1 / factor for ratios, factor in far)
