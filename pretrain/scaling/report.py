"""A fit as one self-contained HTML page and as Markdown, with charts as PNG and numbers as JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from data_pipeline.files import write_json, write_text
from pretrain.reporting.charts import PAGE, PRINT, chart_html, save_png
from pretrain.reporting.html import Card, folded, page, paragraph, section, table
from pretrain.reporting.page_files import write_page
from pretrain.scaling.checks import beyond, disagreement, relative_error
from pretrain.scaling.estimates import TITLES
from pretrain.scaling.fit import Fit
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
from pretrain.scaling.predict import BAND, near_optimal_band, preferred
from pretrain.scaling.ranking import ranking_line, ranking_table
from pretrain.scaling.report_charts import charts_of
from pretrain.scaling.summary import (
    approach_table,
    fit_lines,
    fit_tree,
    law_intervals,
    lost_lines,
    no_interval_lines,
    unavailable_lines,
    warnings_by_subject,
)
from pretrain.terminal.text import counted, flops_text

MOST_ROWS = 60
FEW_WARNINGS = 3  # about one subject; more are folded
FEW_ROWS = 12  # of costs or runs; a longer table is folded


def write_report(fit: Fit, runs: Path, directory: Path, title: str) -> Path:
    """Write report.html about the table `runs`, Markdown, JSON and PNGs; return the page's path."""
    directory.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, str] = {}
    shown_charts = charts_of(fit)
    for name, (chart, caption) in shown_charts.items():
        drawn[name] = chart_html(chart(fit, PAGE), caption) + paragraph(caption + ".")
        save_png(directory / f"{name}.png", chart(fit, PRINT))
    path = directory / "report.html"
    write_page(path, render(fit, title, drawn), [runs])
    pictures = [f"![{caption}]({name}.png)" for name, (_, caption) in shown_charts.items()]
    printed = "\n".join(["```", *fit_lines(fit), "```"])
    write_text(directory / "report.md", "\n\n".join([f"# {title}", printed, *pictures]) + "\n")
    write_json(directory / "fit.json", fit_tree(fit))
    return path


def render(fit: Fit, title: str, drawn: dict[str, str]) -> str:
    """The whole page; `drawn` has the charts as HTML by name."""
    points = fit.points
    lead = (
        f"{counted(len(points), 'run')} at {counted(len(points.budgets), 'budget')} from "
        f"{points.flops_P.min():.3g} to "
        f"{points.flops_P.max():.3g} training FLOPs. Intervals are {LEVEL}% profile intervals, "
        "losses in nats per token."
    )
    sections = [
        _approaches(fit),
        _chart_section("Runs of equal FLOPs", drawn, "isoflop"),
        _chart_section("Compute-optimal frontier", drawn, "frontier", "sizes", "tokens"),
        _law(fit, drawn),
        _checks(fit),
        _chart_section("Resampled budgets", drawn, "exponents", "optimum"),
        _chart_section("Approach 1's curves", drawn, "envelope"),
        _costs(fit),
        _warnings(fit),
        _left_out(fit),
        _runs(fit),
    ]
    footer = (
        "Written by 'pretrain scale report'. The same as text is in report.md, as numbers in "
        "fit.json."
    )
    return page(
        title, "Scaling laws", lead, _cards(fit), [part for part in sections if part], footer
    )


def _chart_section(title: str, drawn: dict[str, str], *names: str) -> str:
    present = [drawn[name] for name in names if name in drawn]
    return section(title, *present) if present else ""


def _cards(fit: Fit) -> list[Card]:
    approach = preferred(fit)
    flops, where = beyond(float(fit.points.budgets[-1]))
    log_flops = float(np.log(flops))
    a, _ = approach.powers(fit.flops_law)
    size, tokens = approach.parameters(log_flops), approach.tokens(log_flops, fit.flops_law)
    cards = [
        Card(
            as_size(size.value),
            f"parameters ({_ends(size, as_size)}) over {as_size(tokens.value)} tokens are optimal "
            f"at {where}, by approach {approach.title}",
        ),
        Card(as_exponent(a.value), f"exponent a of N* ~ C^a ({_ends(a, as_exponent)})"),
    ]
    if fit.left_out and fit.left_out.law_error is not None:
        words = "mean absolute error of the law of the smaller budgets on the runs at "
        words += f"{fit.left_out.budget:.3g} FLOPs"
        cards.append(Card(f"{fit.left_out.law_error:.2%}", words))
    if len(fit.holdouts) == 1:
        (item,) = fit.holdouts
        words = f"error of the predicted loss of the run held out at {item.flops:.3g} FLOPs "
        cards.append(Card(f"{item.error:+.2%}", words + "(+: predicted too high)"))
    elif fit.holdouts:
        error = np.mean([abs(item.error) for item in fit.holdouts])
        words = f"mean absolute error of the predicted losses of {len(fit.holdouts)} held-out runs"
        cards.append(Card(f"{error:.2%}", words))
    return cards


def _ends(interval: Interval, text: Callable[[float], str]) -> str:
    if np.isnan(interval.low) and np.isnan(interval.high):
        return "no interval"
    return f"{text(interval.low)} to {text(interval.high)}"


def _approaches(fit: Fit) -> str:
    heads, rows = approach_table(fit)
    transposed = [[head, *(row[index] for row in rows)] for index, head in enumerate(heads)]
    parts = [table(transposed[0], [_whole(row) for row in transposed[1:]], "named ranges")]
    lines = (*unavailable_lines(fit), *no_interval_lines(fit))
    parts += [paragraph(f"Approach {line}.") for line in lines]
    largest = float(fit.points.budgets[-1])
    if len(fit.approaches) > 1:
        flops, where = beyond(largest)
        ratio = disagreement(fit.approaches, float(np.log(flops)))
        parts.append(
            paragraph(
                f"At {where}, the largest of these optimal sizes is {ratio:.2f}x the smallest."
            )
        )
    if band := near_optimal_band(fit, largest, preferred(fit)):
        low, high = (as_size(size) for size in band)
        parts.append(
            paragraph(
                f"At {largest:.3g} FLOPs every size from {low} to {high} loses at most {BAND:.0%} "
                f"by approach {preferred(fit).title}."
            )
        )
    return section("Three approaches side by side", *parts)


def _whole(row: list[str]) -> list[str]:
    """The cells, whose lines on a narrow screen end before an interval and not inside of it."""
    return [cell.replace(", ", ",\N{NO-BREAK SPACE}") for cell in row]


def _law(fit: Fit, drawn: dict[str, str]) -> str:
    law = law_intervals(fit)
    if not law:
        return ""
    assert fit.estimates.parametric
    error = f"mean absolute error on its own runs {fit.estimates.parametric.mean_error:.3%}"
    words = f"L(N, D) = E + A/N^alpha + B/D^beta; {error}."
    rows = [
        [name, *map(as_factor, (value.value, value.low, value.high))] for name, value in law.items()
    ]
    return section(
        "Approach 3's law",
        paragraph(words),
        table(["", "estimate", "low", "high"], rows, "named"),
        drawn["residuals"],
        drawn["contours"],
    )


def _checks(fit: Fit) -> str:
    parts = []
    if (left := fit.left_out) and left.measured:
        size, loss = left.measured
        rows = [["measured", as_size(size), as_loss(loss), "", ""]]
        rows += [
            [TITLES[key], as_size(n), as_loss(least), f"{relative_error(n, size):+.0%}",
             f"{relative_error(least, loss):+.2%}"]
            for key, (n, least) in left.optimum.items()
        ]  # fmt: skip
        parts.append(
            paragraph(
                f"The optimum at {left.budget:.3g} FLOPs, predicted without the runs of that "
                "budget:"
            )
        )
        heads = ["", "N*", "loss", "error of N*", "error of the loss"]
        parts.append(table(heads, rows, "named ranges"))
        parts += [paragraph(f"{line}.") for line in lost_lines(fit)]
    if fit.holdouts:
        rows = [
            [item.name, amount(item.parameters), amount(item.tokens), as_loss(item.measured),
             shown(item.predicted, as_loss), f"{item.error:+.2%}"]
            for item in fit.holdouts
        ]  # fmt: skip
        parts.append(
            paragraph(
                "Held-out runs; the interval is the law's and does not include the noise of a "
                "single run:"
            )
        )
        heads = ["run", "N", "D", "measured", "predicted", "error"]
        parts.append(table(heads, [_whole(row) for row in rows], "named ranges"))
    heads, *rows = ranking_table(fit.ranking)
    parts.append(paragraph(f"{ranking_line(fit.ranking).capitalize()}."))
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
        share = mine.flops_P.sum() / points.flops_P.sum()
        rows.append(
            [
                f"{budget:.3g}",
                str(len(mine)),
                sizes,
                tokens,
                flops_text(float(mine.flops_P.sum())),
                f"{share:.0%}",
            ]
        )
    tokens = amount(points.tokens_P.sum())
    rows.append(
        [
            "all",
            str(len(points)),
            "",
            f"{tokens} in all",
            flops_text(float(points.flops_P.sum())),
            "100%",
        ]
    )
    law = f"FLOPs per token of these runs: {fit.flops_law.scale:.4g} N^{fit.flops_law.power:.4g}."
    heads = ["budget", "runs", "parameters", "tokens", "FLOPs", "share"]
    heading = f"{counted(len(points.budgets), 'budget')}, {rows[-1][4]} FLOPs"
    return section("Cost", paragraph(law), _table(heading, heads, rows, "named"))


def _warnings(fit: Fit) -> str:
    rows, more = [], []
    for subject, lines in warnings_by_subject(fit).items():
        rows += [[subject, line] for line in lines[:FEW_WARNINGS]]
        if rest := [[subject, line] for line in lines[FEW_WARNINGS:]]:
            heading = f"{counted(len(rest), 'more warning')}: {subject}"
            more.append(folded(heading, table([], rest, "words")))
    parts = [table(["about", "warning"], rows, "words")] if rows else []
    parts += [*more, *(paragraph(f"{note}.") for note in fit.points.notes)]
    return section("Warnings" if rows else "Notes", *parts) if parts else ""


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
