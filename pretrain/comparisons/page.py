"""The page of a sweep that varies learning rates, lengths or variants, not sizes. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foundation.errors import DataError, UserError
from pretrain.comparisons.members import (
    MemberResult,
    baseline_of,
    member_results,
    variant_notes,
    variant_numbers,
    variant_table,
)
from pretrain.reporting.charts import (
    FAINT,
    INK,
    SERIES,
    UNDRAWN,
    canvas,
    comparison_panels,
    legend_above,
    log_ticks,
    member_colors,
    panel_figure,
    plain_ticks,
    spread_colors,
)
from pretrain.reporting.members import without_shared
from pretrain.reporting.run_history import read_histories
from pretrain.scaling.collect import Row, read_rows
from pretrain.scaling.fit_charts import LOSS
from pretrain.scaling.intervals import amount, as_loss
from pretrain.scaling.learning_rate import Tuned, best_rate_lines, rates_table, tuned_rates
from pretrain.scaling.report import Part, write_parts
from pretrain.scaling.table import csv_rows
from pretrain.terminal.text import counted, fitted_table, flops_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVE_POINTS = 60  # at which the parabola is drawn


def rows_without_sizes(path: Path) -> list[Row]:
    """Return the rows of a table whose sweep did not vary sizes; [] for any other table."""
    varies = {row.get("varies") for _, row in csv_rows(path)} - {None, "", "sizes"}
    return read_rows(path) if varies else []


def write_sweep_page(rows: Sequence[Row], source: Path, directory: Path, title: str) -> str:
    """Write report.html about the table `source` with its figures; return what to print."""
    kinds = {row.varies for row in rows}
    if len(kinds) != 1:
        raise DataError(f"{source}: rows of sweeps that vary {' and '.join(sorted(kinds))}")
    (kind,) = kinds
    shown = {"rates": _rates, "lengths": _lengths, "variants": partial(_variants, source.parent)}
    parts = shown[kind](rows)
    left_out = [f"left out: {row.name}: {row.excluded}" for row in rows if row.excluded]
    parts[-1] = replace(parts[-1], lines=[*parts[-1].lines, *left_out])
    done = counted(len(rows) - len(left_out), "finished run")
    title = title or source.absolute().parent.name
    path = write_parts(parts, source, directory, title, f"{done} of a sweep of {kind}.", [])
    texts = ["\n".join([*part.above, fitted_table(part.rows), *part.lines]) for part in parts]
    return "\n".join([*texts, f"report: {path}"])


def _rates(runs: Sequence[Row]) -> list[Part]:
    tuned = tuned_rates(runs)
    caption = "Loss at the end over the peak learning rate"
    if tuned.optimum.is_known:
        caption += "; star: the lowest point of the parabola through the rates near it, shaded: "
        caption += "what loses at most 0.5%"
    figures = {"rates": (partial(loss_by_rate, tuned), caption)}
    rows = rates_table(tuned)
    return [Part(title="Learning rates", rows=rows, lines=best_rate_lines(tuned), figures=figures)]


def loss_by_rate(tuned: Tuned) -> Figure:
    """Draw final losses over the learning rate, with a parabola and its vertex."""
    figure, axes = canvas(3.6, "peak learning rate", LOSS)
    color = SERIES[0]
    axes.plot(tuned.rates_S, tuned.loss_S, "o", color=color, markersize=4)
    if (best := tuned.optimum).is_known:
        rates_S, loss_S = tuned.rates_S[tuned.near_S], tuned.loss_S[tuned.near_S]
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
    """Draw the loss over the memory length, a line per segment length; means over seeds."""
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


def _variants(runs: Path, rows: Sequence[Row]) -> list[Part]:
    results = member_results(rows)
    numbers, base = variant_numbers(results), baseline_of(results)
    caption = "Loss at equal training FLOPs: a dot per seed, and a bar at the mean"
    figures = {"variants": (partial(member_losses, results), caption)}
    if any(row["interval_low"] is not None for row in numbers):
        caption = f"Difference from {base.member}, paired by seed, with 95% intervals over seeds"
        figures["differences"] = (partial(member_differences, numbers), caption)
    figures |= _curves(results, runs)
    if base.probed("position"):
        caption = (
            "Loss by position in the document: means over the seeds, from each dot's position on"
        )
        figures["positions"] = (partial(position_chart, results), caption)
        caption += f"; minus that of {base.member}"
        figures["positions-differences"] = (partial(position_chart, results, base), caption)
    heads, *cells = table = variant_table(numbers)
    tex = [[*heads[:6], "parameters / tokens"], *([*c[:6], f"{c[-2]} / {c[-1]}"] for c in cells)]
    shown, shared = without_shared(table, "All members")
    files = {"tex": tex, "numbers": numbers, "figures": figures}
    return [Part(title="Variants", above=shared, rows=shown, lines=variant_notes(results), **files)]


def _curves(
    results: Sequence[MemberResult], runs: Path
) -> dict[str, tuple[Callable[[], Figure], str]]:
    """Return figures of the losses in training, if the runs are in the directory `runs`."""
    members = {runs / row.name: result.member for result in results for row in result.runs}
    try:
        histories = read_histories([*members])
    except (UserError, OSError):  # the table needs no runs
        return {}
    panels = comparison_panels(histories, [members[history.path] for history in histories])[:2]
    return {
        f"loss-over-{quantity.lower()}": (
            partial(panel_figure, panel, 3.4),
            f"Losses in training over {quantity}, at each member's best rate: the means of the "
            "seeds, and a band from the lowest to the highest; dots: validation",
        )
        for panel, quantity in zip(panels, ("tokens", "FLOPs"), strict=True)
    }


def member_losses(results: Sequence[MemberResult]) -> Figure:
    """Draw the losses of every member's seeds, and their mean."""
    figure, axes, colors = _rows_of_members([result.member for result in results], LOSS)
    for index, (result, color) in enumerate(zip(results, colors, strict=True)):
        losses, style = list(result.seeds.losses.values()), {"color": color, "markersize": 5}
        axes.plot(losses, [index] * len(losses), "o", label=result.member, **style)
        style = {"color": INK, "markersize": 14, "label": f"{result.member}, mean"}
        axes.plot([result.loss], [index], "|", **style)
    plain_ticks(axes.xaxis)
    return figure


def member_differences(numbers: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw each member's difference from the baseline, with its interval."""
    names = [row["member"] for row in numbers]
    figure, axes, colors = _rows_of_members(names, "difference of losses (nats per token)")
    for index, (row, color) in enumerate(zip(numbers, colors, strict=True)):
        ends = row["interval_low"], row["interval_high"]
        if row["difference"] is not None:
            axes.plot([row["difference"]], [index], "o", color=color, label=row["member"])
        if None not in ends:
            axes.plot(ends, [index] * 2, "|-", color=color, label=f"{row['member']}, interval")
    axes.axvline(0, color=FAINT, linewidth=1.0, label=UNDRAWN)
    return figure


def _rows_of_members(names: Sequence[str], label: str) -> tuple[Figure, Axes, Sequence[str]]:
    """Return a chart with a row for each member, and the members' colors."""
    figure, axes = canvas(0.8 + 0.4 * len(names), label, "")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    return figure, axes, member_colors(len(names))


def position_chart(results: Sequence[MemberResult], baseline: MemberResult | None = None) -> Figure:
    """Draw the loss of each bin of positions, or what it is above the baseline's."""
    drawn = zip(results, member_colors(len(results)), strict=True)
    probed = [(one, color) for one, color in drawn if one.probed("position")]
    shown = sorted(set.intersection(*(set(one.probed("position")) for one, _ in probed)))
    subtracted = baseline.probed("position") if baseline else dict.fromkeys(shown, 0.0)
    label = f"loss minus that of {baseline.member}" if baseline else LOSS
    figure, axes = canvas(3.4, "position (tokens)", label)
    for result, color in probed:
        values = [result.probed("position")[first] - subtracted[first] for first in shown]
        axes.plot(shown, values, "o-", color=color, markersize=3, label=result.member)
    axes.set_xscale("symlog", base=2, linthresh=max([1, *shown[:1]]))
    axes.set_xticks(shown[::2], [str(first) for first in shown[::2]])
    legend_above(figure, axes)
    return figure
