"""A fit as text, the answer first, as a JSON tree, and as one self-contained HTML page with its
figures and numbers as files.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from foundation.files import write_json, write_text
from pretrain.reporting.charts import chart_html, save_figure
from pretrain.reporting.html import Card, folded, page, paragraph, section, table, write_page
from pretrain.rundir.code_version import code_version
from pretrain.scaling.charts import charts_of
from pretrain.scaling.fit import BEYOND, TITLES, Fit, relative_error
from pretrain.scaling.frontier import Approach, Line, Valley, law_of
from pretrain.scaling.intervals import (
    ERRORS,
    LEVEL,
    Interval,
    amount,
    as_exponent,
    as_factor,
    as_loss,
    as_size,
    shown,
)
from pretrain.scaling.law import NAMES
from pretrain.scaling.predict import BAND, near_optimal_band
from pretrain.scaling.table import Array, Points
from pretrain.terminal.text import counted, flops_text, text_table

WIDTH = 100
MOST_WARNINGS, WARNING_LINES = 5, 2
Numbers = list[tuple[str, Interval, Callable[[float], str]]]


def numbers_at(fit: Fit, approach: Approach, flops: float) -> Numbers:
    """What a law says of the optimum at C FLOPs: name, interval, and how it is written."""
    log_flops = float(np.log(flops))
    return [
        ("N*", approach.parameters(log_flops), as_size),
        ("D*", approach.tokens(log_flops, fit.flops_law), as_size),
        ("loss", approach.loss(log_flops), as_loss),
        ("a", approach.powers(fit.flops_law)[0], as_exponent),
    ]


def fit_lines(fit: Fit, flops: float = 0.0, verbose: bool = False) -> list[str]:
    """The answer at C FLOPs (or 10 times the largest budget) on one screen; or all there is."""
    flops = flops or BEYOND * fit.largest
    points = fit.points
    excluded = f", {counted(len(points.excluded), 'run')} left out" if points.excluded else ""
    lines = [
        f"{points.source}: {counted(len(points), 'run')} at "
        f"{counted(len(points.budgets), 'budget')}, {points.flops_P.min():.3g} to "
        f"{points.flops_P.max():.3g} FLOPs{excluded}",
        *warning_lines(fit, verbose),
        *answer_lines(fit, flops),
        "",
        text_table(narrow(law_table(fit, flops)), left=(0, -1) if fit.doubts else (0,)),
        *_holdout_lines(fit, verbose),
    ]
    return lines + ([""] + _details(fit) if verbose else [])


def answer_lines(fit: Fit, flops: float) -> list[str]:
    """The law to rely on, why, and its optimum at C FLOPs; or that there is none."""
    lines = [choice_line(fit)]
    if fit.none_because:
        return lines
    times = flops / fit.largest
    lines.append(
        f"at {flops:.3g} FLOPs, {times:.3g} times the largest budget ({LEVEL}% intervals):"
    )
    first = fit.approaches[0]
    numbers = numbers_at(fit, first, flops)
    lines += [f"  {name:5} {shown(interval, text)}" for name, interval, text in numbers]
    if first.no_interval:
        lines.append(f"  without an interval: {first.no_interval}")
    return lines


def choice_line(fit: Fit) -> str:
    """Which law to rely on, and why."""
    if fit.none_because:
        return f"none of these laws describes these runs: {fit.none_because}"
    first, left = fit.approaches[0], fit.left_out
    line = f"rely on {first.title}"
    if left and first.key in left.error:
        return (
            f"{line}: fitted without {left.budget:.3g} FLOPs, it predicts those losses within "
            f"{left.error[first.key]:.2%}"
        )
    return f"{line}, which nothing checks"


def law_table(fit: Fit, flops: float, has_tokens: bool = False) -> list[list[str]]:
    """Heads and a row per law, from the one to rely on; D* only if `has_tokens`."""
    heads = ["law", "left-out error", "a", f"N* at {flops:.3g}", "D*", "loss", "not relied on:"]
    errors = fit.left_out.error if fit.left_out else {}
    rows = [heads]
    for approach in fit.approaches:
        error = f"{errors[approach.key]:.2%}" if approach.key in errors else "-"
        *optimum, a = (shown(value, text) for _, value, text in numbers_at(fit, approach, flops))
        rows.append([approach.title, error, a, *optimum, fit.doubts.get(approach.key, "")])
    columns = [*range(len(heads) - (not fit.doubts))]
    if not has_tokens:
        columns.remove(heads.index("D*"))
    return [[row[column] for column in columns] for row in rows]


def narrow(rows: list[list[str]]) -> list[list[str]]:
    """The rows, without intervals where they would be wider than WIDTH."""
    if max(map(len, text_table(rows).splitlines())) <= WIDTH:
        return rows
    return [[cell.split(" [")[0] for cell in row] for row in rows]


def warning_lines(fit: Fit, verbose: bool = False) -> list[str]:
    """The warnings; without `verbose` MOST_WARNINGS at most, of WARNING_LINES lines each."""
    lines = []
    for warning in fit.warnings if verbose else fit.warnings[:MOST_WARNINGS]:
        wrapped = textwrap.wrap(f"warning: {warning}", WIDTH, subsequent_indent="  ")
        if len(wrapped) > WARNING_LINES and not verbose:
            wrapped = textwrap.wrap(
                f"warning: {warning}", WIDTH, subsequent_indent="  ",
                max_lines=WARNING_LINES, placeholder=" ... (--verbose)",
            )  # fmt: skip
        lines += wrapped
    more = len(fit.warnings) - MOST_WARNINGS
    return lines + [f"{more} more: --verbose"] * (more > 0 and not verbose)


def law_intervals(fit: Fit, key: str = "parametric") -> dict[str, Interval]:
    """The five numbers of a law of approach 3 with their intervals; empty without it."""
    law = fit.approach(key)
    if law is None:
        return {}

    def numbers(line: Line) -> list[Array]:
        *logs, alpha, beta = np.moveaxis(law_of(line).theta, -1, 0)
        return [*map(np.exp, logs), alpha, beta]

    return dict(zip(NAMES, law.intervals(numbers, is_linear=True), strict=True))


def left_out_table(fit: Fit) -> list[list[str]]:
    """Heads and rows: the optimum at the largest budget, measured and predicted without it."""
    if fit.left_out is None:
        return []
    size, loss = fit.left_out.measured
    rows = [["", "N*", "loss", "error of N*", "error of the loss"]]
    rows.append(["measured", as_size(size), as_loss(loss), "", ""])
    for key, (n, least) in fit.left_out.optimum.items():
        errors = f"{relative_error(n, size):+.0%}", f"{relative_error(least, loss):+.2%}"
        rows.append([TITLES[key], as_size(n), as_loss(least), *errors])
    return rows


def _holdout_lines(fit: Fit, verbose: bool) -> list[str]:
    """Predictions of runs that the fit did not see; without `verbose`, of the last one."""
    lines = []
    for item in fit.holdouts if verbose else fit.holdouts[-1:]:
        lines.append(
            f"held out {item.name}: measured {as_loss(item.measured)}, predicted "
            f"{shown(item.predicted, as_loss)} ({item.error:+.2%})"
        )
    if fit.num_unpredicted:
        words = counted(fit.num_unpredicted, "held-out run")
        lines.append(f"{words} not predicted: only approach 3 can, and it is not available")
    return ["", *lines] if lines else []


def _details(fit: Fit) -> list[str]:
    """All else: notes, why what is missing is, the laws' numbers, the left-out optimum, the runs
    left out.
    """
    lines = [*(f"note: {note}" for note in fit.points.notes)]
    lines += [f"{TITLES[key]} is not available: {why}" for key, why in unavailable(fit).items()]
    lines += [
        f"{item.title} has no intervals: {item.no_interval}"
        for item in fit.approaches
        if item.no_interval
    ]
    lines.append(
        f"FLOPs per token: {fit.flops_law.scale:.4g} N^{fit.flops_law.power:.4g}, within "
        f"{fit.flops_law.largest_error:.2%}"
    )
    for key in ("parametric", "tied"):
        if law := law_intervals(fit, key):
            numbers = "  ".join(f"{name} {shown(law[name], as_factor)}" for name in law)
            lines.append(f"{TITLES[key]}, E + A/N^alpha + B/D^beta: {numbers}")
    if (spread := seed_spread(fit.points)) is not None:
        lines.append(f"standard deviation of losses that differ only by the seed: {spread:.3%}")
    if fit.left_out:
        lines += [
            f"{fit.left_out.budget:.3g} FLOPs as a fit without them predicts it; {ERRORS}",
            text_table(left_out_table(fit)),
        ]
    return lines + [f"left out: {item.name}: {item.reason}" for item in fit.points.excluded]


def unavailable(fit: Fit) -> dict[str, str]:
    """The laws that are missing, or were without the largest budget, and why."""
    lost = fit.left_out.unavailable if fit.left_out else {}
    without = {key: f"without the largest budget: {why}" for key, why in lost.items()}
    return {**without, **fit.estimates.unavailable}


def fit_tree(fit: Fit) -> dict[str, Any]:
    """The fit as JSON-able values."""
    isoflop = fit.estimates.isoflop
    return {
        "source": fit.points.source,
        "num_runs": len(fit.points),
        "budgets": fit.points.budgets.tolist(),
        "flops_per_token": {"scale": fit.flops_law.scale, "power": fit.flops_law.power},
        "rely_on": None if fit.none_because else fit.approaches[0].key,
        "laws": {item.key: _law_tree(fit, item) for item in fit.approaches},
        "valleys": [_valley_tree(valley) for valley in isoflop.valleys] if isoflop else [],
        "unavailable": dict(fit.estimates.unavailable),
        "left_out": vars(fit.left_out) if fit.left_out else None,
        "holdouts": [
            {**vars(item), "predicted": _interval_tree(item.predicted), "error": item.error}
            for item in fit.holdouts
        ],
        "excluded": [vars(item) for item in fit.points.excluded],
        "warnings": list(fit.warnings),
        "notes": list(fit.points.notes),
        "bits_per_byte_of_a_nat": _finite(fit.points.bits_per_nat),
    }


def _law_tree(fit: Fit, approach: Approach) -> dict[str, Any]:
    """A law's numbers, and its optimum at the largest budget and beyond it."""
    optima = [
        {"flops": flops, **{name: _interval_tree(value) for name, value, _ in numbers}}
        for flops in (fit.largest, BEYOND * fit.largest)
        if (numbers := numbers_at(fit, approach, flops))
    ]
    law = law_intervals(fit, approach.key) if approach.key in ("parametric", "tied") else {}
    return {
        "optima": optima,
        "numbers": {name: _interval_tree(value) for name, value in law.items()},
        "doubt": fit.doubts.get(approach.key),
        "no_interval": approach.no_interval or None,
    }


def _valley_tree(valley: Valley) -> dict[str, Any]:
    """A budget's parabola; null where it has no lowest point."""
    numbers = {name: _finite(getattr(valley, name)) for name in ("parameters", "loss", "bend")}
    return {"budget": valley.budget, **numbers, "unused_because": valley.reason or None}


def _interval_tree(interval: Interval) -> dict[str, float | None]:
    """An interval with null for an end that there is not; JSON has no NaN and no infinity."""
    return {name: _finite(value) for name, value in vars(interval).items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def seed_spread(points: Points) -> float | None:
    """The relative standard deviation of losses over seeds; None if no run was repeated."""
    pairs = np.stack([points.parameters_P, points.tokens_P], axis=1)
    group_P = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
    count_M = np.bincount(group_P)
    free = len(points) - len(count_M)
    if not free:
        return None
    log_P = np.log(points.loss_P)
    rest_P = log_P - (np.bincount(group_P, log_P) / count_M)[group_P]
    return float(np.sqrt((rest_P**2).sum() / free))


MOST_ROWS = 60
FEW_ROWS = 12  # of costs or runs; a longer table is folded


def write_report(fit: Fit, runs: Path, directory: Path, title: str) -> Path:
    """Write report.html about the table `runs`, Markdown, JSON and figures; return the page's
    path.
    """
    directory.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, str] = {}
    shown_charts = charts_of(fit)
    for name, (chart, caption) in shown_charts.items():
        figure = chart(fit)
        drawn[name] = chart_html(figure, caption) + paragraph(caption + ".")
        save_figure(directory / f"{name}.png", figure)
    path = directory / "report.html"
    write_page(path, render(fit, title, drawn))
    pictures = [f"![{caption}]({name}.png)" for name, (_, caption) in shown_charts.items()]
    printed = "\n".join(["```", *fit_lines(fit, verbose=True), "```"])
    write_text(directory / "report.md", "\n\n".join([f"# {title}", printed, *pictures]) + "\n")
    write_json(directory / "fit.json", fit_tree(fit))
    return path


def provenance(source: Path | str) -> str:
    """The table, today's date and the code that reads it."""
    return f"{source}, {datetime.now(timezone.utc).date().isoformat()}, code {code_version()}"


def render(fit: Fit, title: str, drawn: dict[str, str]) -> str:
    """The whole page; `drawn` has the charts as HTML by name."""
    points = fit.points
    lead = (
        f"{provenance(points.source)}: {counted(len(points), 'run')} at "
        f"{counted(len(points.budgets), 'budget')} from {points.flops_P.min():.3g} to "
        f"{points.flops_P.max():.3g} training FLOPs. Brackets are {LEVEL}% intervals, losses in "
        "nats per token."
    )
    sections = [
        _warnings(fit),
        _laws(fit),
        _figures("Runs of equal FLOPs", drawn, "isoflop"),
        _figures("Compute-optimal frontier", drawn, "frontier", "sizes", "tokens"),
        _checks(fit),
        _figures("Errors and equal losses", drawn, "residuals", "contours"),
        _costs(fit),
        _left_out(fit),
        _runs(fit),
    ]
    footer = (
        "Written by 'pretrain scale report'. The same as text is in report.md, as numbers in "
        "fit.json; every figure is beside this page as PNG, SVG, PDF and CSV."
    )
    return page(
        title, "Scaling laws", lead, _cards(fit), [part for part in sections if part], footer
    )


def _figures(title: str, drawn: dict[str, str], *names: str) -> str:
    present = [drawn[name] for name in names if name in drawn]
    return section(title, *present) if present else ""


def _cards(fit: Fit) -> list[Card]:
    if fit.none_because:
        return [Card("none", choice_line(fit), "bad")]
    flops = BEYOND * fit.largest
    cards = []
    for name, interval, text in numbers_at(fit, fit.approaches[0], flops):
        ends = shown(interval, text).removeprefix(text(interval.value)).strip() or "no interval"
        where = "exponent of N* ~ C^a" if name == "a" else f"at {flops:.3g} FLOPs"
        cards.append(Card(f"{name} {text(interval.value)}", f"{ends}, {where}"))
    return cards


def _warnings(fit: Fit) -> str:
    parts = [paragraph(f"{choice_line(fit).capitalize()}.", "")]
    if fit.warnings:
        parts.append(table([], [[line] for line in fit.warnings], "words"))
    return section("Answer" if not fit.warnings else "Answer and warnings", *parts)


def _laws(fit: Fit) -> str:
    heads, *rows = law_table(fit, BEYOND * fit.largest, has_tokens=True)
    parts = [table(heads, [list(map(_whole, row)) for row in rows], "named ranges")]
    reasons = [f"{item.title}: {item.no_interval}" for item in fit.approaches if item.no_interval]
    parts += [paragraph(f"No interval by {line}.") for line in reasons]
    parts += [
        paragraph(f"{TITLES[key]} is not available: {why}.")
        for key, why in unavailable(fit).items()
    ]
    if band := near_optimal_band(fit, fit.largest, fit.approaches[0]):
        low, high = (as_size(size) for size in band)
        parts.append(
            paragraph(
                f"At {fit.largest:.3g} FLOPs every size from {low} to {high} loses at most "
                f"{BAND:.0%} by {fit.approaches[0].title}."
            )
        )
    numbers = [
        [TITLES[key], *(_whole(shown(value, as_factor)) for value in law.values())]
        for key in ("parametric", "tied")
        if (law := law_intervals(fit, key))
    ]
    if numbers:
        parts.append(paragraph("L(N, D) = E + A/N^alpha + B/D^beta:"))
        parts.append(table(["", "E", "A", "B", "alpha", "beta"], numbers, "named ranges"))
    parts += [paragraph(f"{note}.") for note in fit.points.notes]
    return section("Laws", *parts)


def _whole(cell: str) -> str:
    """The cell, whose lines on a narrow screen end before an interval and not inside of it."""
    return cell.replace(", ", ",\N{NO-BREAK SPACE}")


def _checks(fit: Fit) -> str:
    parts = []
    if fit.left_out:
        words = f"The optimum at {fit.left_out.budget:.3g} FLOPs, predicted without those runs:"
        heads, *rows = left_out_table(fit)
        parts += [paragraph(words), table(heads, rows, "named ranges")]
    if fit.holdouts:
        rows = [
            [item.name, amount(item.parameters), amount(item.tokens), as_loss(item.measured),
             _whole(shown(item.predicted, as_loss)), f"{item.error:+.2%}"]
            for item in fit.holdouts
        ]  # fmt: skip
        parts.append(paragraph("Held-out runs; the interval has no noise of a single run:"))
        heads = ["run", "N", "D", "measured", "predicted", "error"]
        parts.append(table(heads, rows, "named ranges"))
    errors = paragraph(f"{ERRORS[0].upper()}{ERRORS[1:]}.")
    return section("Validation", *parts, errors) if parts else ""


def _costs(fit: Fit) -> str:
    points, rows = fit.points, []
    for budget in points.budgets[:MOST_ROWS]:
        mine = points.take(points.budget_P == budget)
        sizes, tokens = (
            f"{amount(values.min())} to {amount(values.max())}"
            for values in (mine.parameters_P, mine.tokens_P)
        )
        flops = float(mine.flops_P.sum())
        share = f"{flops / points.flops_P.sum():.2g}"
        rows.append([f"{budget:.3g}", str(len(mine)), sizes, tokens, flops_text(flops), share])
    law = f"FLOPs per token of these runs: {fit.flops_law.scale:.4g} N^{fit.flops_law.power:.4g}."
    heads = ["budget", "runs", "parameters", "tokens", "FLOPs", "share"]
    total = flops_text(float(points.flops_P.sum()))
    heading = f"{counted(len(points.budgets), 'budget')}, {total} FLOPs"
    return section("Cost", paragraph(law), _table(heading, heads, rows, "named"))


def _left_out(fit: Fit) -> str:
    excluded = fit.points.excluded
    rows = [[item.name, item.reason] for item in excluded[:MOST_ROWS]]
    heading = _heading(len(rows), len(excluded))
    return section("Left out", _table(heading, ["run", "reason"], rows, "words")) if rows else ""


def _runs(fit: Fit) -> str:
    points = fit.points
    order = np.lexsort((points.parameters_P, points.budget_P))[:MOST_ROWS]
    rows = [
        [
            points.names[i],
            *(amount(float(values[i])) for values in (points.parameters_P, points.tokens_P)),
            flops_text(float(points.flops_P[i])),
            as_loss(float(points.loss_P[i])),
        ]
        for i in order
    ]
    heads = ["run", "N", "D", "C", "loss"]
    return section("Runs", _table(_heading(len(rows), len(points)), heads, rows, "named"))


def _heading(count: int, total: int) -> str:
    return f"The first {count} of {total}" if count < total else f"All {total}"


def _table(heading: str, heads: list[str], rows: list[list[str]], style: str) -> str:
    """The table, folded behind the heading where it is long."""
    shown = table(heads, rows, style)
    return folded(heading, shown) if len(rows) > FEW_ROWS else shown
