"""A fit as one self-contained HTML page and as Markdown, with its figures and numbers as files."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from foundation.files import write_json, write_text
from pretrain.reporting.charts import PAGE, PRINT, chart_html, save_figure
from pretrain.reporting.html import Card, folded, page, paragraph, section, table
from pretrain.reporting.page_files import write_page
from pretrain.rundir.code_version import code_version
from pretrain.scaling.charts import charts_of
from pretrain.scaling.fit import BEYOND, TITLES, Fit
from pretrain.scaling.intervals import (
    ERRORS,
    LEVEL,
    amount,
    as_factor,
    as_loss,
    as_size,
    shown,
)
from pretrain.scaling.predict import BAND, near_optimal_band
from pretrain.scaling.summary import (
    choice_line,
    fit_lines,
    fit_tree,
    law_intervals,
    left_out_table,
    numbers_at,
    unavailable,
)
from pretrain.terminal.text import counted, flops_text

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
        drawn[name] = chart_html(chart(fit, PAGE), caption) + paragraph(caption + ".")
        save_figure(directory / f"{name}.png", chart(fit, PRINT))
    path = directory / "report.html"
    write_page(path, render(fit, title, drawn), [runs])
    pictures = [f"![{caption}]({name}.png)" for name, (_, caption) in shown_charts.items()]
    printed = "\n".join(["```", *fit_lines(fit, verbose=True), "```"])
    write_text(directory / "report.md", "\n\n".join([f"# {title}", printed, *pictures]) + "\n")
    write_json(directory / "fit.json", fit_tree(fit))
    return path


def render(fit: Fit, title: str, drawn: dict[str, str]) -> str:
    """The whole page; `drawn` has the charts as HTML by name."""
    points = fit.points
    today = datetime.now(timezone.utc).date().isoformat()
    lead = (
        f"{points.source}, {today}, code {code_version()}: {counted(len(points), 'run')} at "
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
    flops = BEYOND * fit.largest
    errors = fit.left_out.error if fit.left_out else {}
    heads = ["law", "left-out error", "N*", "D*", "loss", "a", "not relied on because"]
    rows = [
        [
            approach.title,
            f"{errors[approach.key]:.2%}" if approach.key in errors else "-",
            *(_whole(shown(value, text)) for _, value, text in numbers_at(fit, approach, flops)),
            fit.doubts.get(approach.key, ""),
        ]
        for approach in fit.approaches
    ]
    parts = [paragraph(f"Optima at {flops:.3g} FLOPs:"), table(heads, rows, "named ranges")]
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
