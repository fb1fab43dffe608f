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
Letters: S seeds.
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
from pretrain.scaling.law import amount, as_loss
from pretrain.scaling.plan import PlannedRun, at_computed_flops, planned_run, varied
from pretrain.scaling.rates import Tuned, tuned_rates, tuned_table, verdicts
from pretrain.scaling.report import LOSS, Part, write_parts
from pretrain.scaling.sweep_file import check_overrides
from pretrain.scaling.table import csv_rows
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
