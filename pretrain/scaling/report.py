"""A fit as text, the answer first, as a JSON tree, and as one self-contained HTML page with its
figures and numbers as files.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foundation.files import make_directory, write_json
from foundation.typed_values import to_tree, with_nulls
from pretrain.reporting.charts import chart_html, save_figure
from pretrain.reporting.html import (
    Card,
    folded,
    page,
    paragraph,
    preformatted,
    section,
    table,
    write_page,
)
from pretrain.reporting.members import write_table
from pretrain.rundir.code_version import code_version
from pretrain.scaling.backtest import Backtest
from pretrain.scaling.fit import (
    TITLES,
    Fit,
    doubts,
    law_of_runs,
    loss_disagreement,
    loss_interval,
)
from pretrain.scaling.fit_charts import frontier_chart, residuals_chart, sizes_chart, valleys_chart
from pretrain.scaling.frontier import Approach, law_of
from pretrain.scaling.intervals import (
    LEVEL,
    MOST_GROUPS,
    Interval,
    Text,
    as_exponent,
    as_factor,
    as_loss,
    as_size,
    shown,
)
from pretrain.scaling.law import NAMES, LawLine
from pretrain.terminal.text import counted, text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, PRE_WIDTH = 100, 84  # of the terminal and of text on a page
MOST_WARNINGS, WARNING_LINES = 5, 2
Numbers = list[tuple[str, Interval, Text]]


def numbers_at(fit: Fit, approach: Approach, flops: float) -> Numbers:
    """What a law says of the optimum at C FLOPs: name, interval, and how it is written."""
    size, tokens, loss = fit.optimum(approach, flops)
    return [
        ("N*", size, as_size),
        ("D*", tokens, as_size),
        ("loss", loss, as_loss),
        ("a", approach.power(), as_exponent),
    ]


def fit_lines(
    fit: Fit,
    flops: float | None = None,
    verbose: bool = False,
    asked: Approach | None = None,
    is_forced: bool = False,
) -> list[str]:
    """The answer at C FLOPs (or 10 times the largest budget) on one screen; or all there is. It is
    that of the law to rely on, or of the one that is asked.
    """
    flops = flops or fit.beyond
    points = fit.points
    excluded = f", {counted(len(points.excluded), 'run')} excluded" if points.excluded else ""
    lines = [
        f"{points.source}: {counted(len(points), 'run')} at "
        f"{counted(len(points.budgets), 'budget')}, {points.flops_P.min():.3g} to "
        f"{points.flops_P.max():.3g} FLOPs{excluded}",
        *warning_lines(fit, verbose),
        choice_line(fit),
        *(answer_lines(fit, flops, asked) if not fit.none_because or asked or is_forced else []),
        "",
        text_table(narrow([[*row[:3], *row[4:]] for row in law_table(fit, flops)])),  # without D*
        *(f"{TITLES[key]} is not relied on: {why}" for key, why in fit.doubts.items()),
    ]
    return [*lines, "", *_details(fit)] if verbose else lines + _holdouts(fit)[-1:]


def answer_lines(fit: Fit, flops: float, asked: Approach | None = None) -> list[str]:
    """The optimum at C FLOPs by the law to rely on, or by the one that is asked."""
    law, times = asked or fit.approaches[0], flops / fit.largest
    by = f"by {law.title}, as asked, " if asked else ""
    far = f"{times:.3g} times the largest budget"
    lines = [f"{by}at {flops:.3g} FLOPs, {far} ({LEVEL}% intervals):"]
    numbers = numbers_at(fit, law, flops)
    lines += [f"  {name:5} {shown(interval, text)}" for name, interval, text in numbers]
    lines += [f"  {line}" for line in remarks(fit, law, flops)]
    lines += [f"doubt: {why}" for why in doubts(fit, flops, law)]
    return [part for line in lines for part in textwrap.wrap(line, WIDTH, subsequent_indent="    ")]


def remarks(fit: Fit, law: Approach, flops: float) -> list[str]:
    """What the answer of a law at C FLOPs rests on."""
    lines, times = [], flops / fit.largest
    if times > 1 and not law.no_interval:
        size_off, loss_off = fit.missed(flops)
        lines.append(
            f"published sweeps at this distance missed N* by {math.exp(size_off):.2f}x, the loss "
            f"by {loss_off:.1%}: included"
        )
    if why := law.no_interval or (law.without_interval if times <= 1 else ""):
        lines.append(f"without an interval: {why}")
    free = fit.approach("parametric")
    if law.key == "tied" and free and not free.no_interval:
        size, _, loss = fit.optimum(free, flops)
        lines.append(
            f"{free.title}, which lets the exponents differ: N* {shown(size, as_size)}, loss "
            f"{shown(loss, as_loss)}"
        )
    if differing := loss_disagreement(fit, flops):
        lines.append(differing)
    return lines + backtest_lines(fit.backtests.get(law.key, ()))


def ratio_line(fit: Fit, flops: float, ratio: float) -> str:
    """The run of C FLOPs with D/N = `ratio`, and how much higher than the optimum's its loss is."""
    law = law_of_runs(fit)
    power, scale = fit.flops_law.power, fit.flops_law.scale
    size = (flops / (scale * ratio)) ** (1 / (1 + power))
    loss = fit.beyond_runs(loss_interval(law, size, ratio * size), flops)
    least = law.loss(float(np.log(flops))).value
    return (
        f"with D/N = {ratio:g}: N {as_size(size)}, D {as_size(ratio * size)}, loss "
        f"{shown(loss, as_loss)} by {law.title}, {loss.value / least - 1:+.2%} over the optimum's"
    )


def backtest_lines(tests: Sequence[Backtest]) -> list[str]:
    """How far the law was off at the largest budget, fitted without it and those near it."""
    return [
        f"backtest: fitted up to 1/{test.times:.3g} of the largest budget, it predicts there "
        + (f"N* {test.size:.2f} times the measured one, " if math.isfinite(test.size) else "")
        + f"the loss {test.loss:+.2%} off"
        for test in tests
    ]


def choice_line(fit: Fit) -> str:
    """Which law to rely on, and why."""
    if fit.none_because:
        return f"none of these laws describes these runs: {fit.none_because}"
    first = fit.approaches[0]
    if first.key not in fit.left_out:
        return f"rely on {first.title}, which nothing checks"
    return (
        f"rely on {first.title}: without the largest budgets it predicts the loss of "
        f"{counted(fit.num_left_out[first.key], 'run')} there within {fit.left_out[first.key]:.2%}"
    )


def law_table(fit: Fit, flops: float) -> list[list[str]]:
    """Heads and a row per law, from the one to rely on."""
    errors = fit.left_out
    rows = [["law", "left-out error", f"N* at {flops:.3g}", "D*", "loss", "a"]]
    for approach in fit.approaches:
        error = f"{errors[approach.key]:.2%}" if approach.key in errors else "-"
        numbers = (shown(value, text) for _, value, text in numbers_at(fit, approach, flops))
        rows.append([approach.title, error, *numbers])
    return rows


def narrow(rows: list[list[str]]) -> list[list[str]]:
    """The rows, without intervals where they would be wider than WIDTH."""
    if max(map(len, text_table(rows).splitlines())) <= WIDTH:
        return rows
    return [[cell.split(" [")[0] for cell in row] for row in rows]


def warning_lines(fit: Fit, verbose: bool = False) -> list[str]:
    """The warnings; without `verbose` MOST_WARNINGS at most, of WARNING_LINES lines each."""
    wrap = textwrap.TextWrapper(
        WIDTH,
        subsequent_indent="  ",
        max_lines=None if verbose else WARNING_LINES,
        placeholder=" ... (--verbose)",
    )
    most = len(fit.warnings) if verbose else MOST_WARNINGS
    lines = [line for warning in fit.warnings[:most] for line in wrap.wrap(f"warning: {warning}")]
    more = len(fit.warnings) - most
    return lines + [f"{more} more: --verbose"] * (more > 0)


def law_intervals(fit: Fit, key: str = "parametric") -> dict[str, Interval]:
    """The five numbers of a law of approach 3 with their intervals; empty without it."""
    law = fit.approach(key)
    if law is None or not isinstance(law.line, LawLine):
        return {}
    return {
        name: law.interval(lambda line, name=name: getattr(law_of(line).law, name), is_linear=True)
        for name in NAMES
    }


def _holdouts(fit: Fit) -> list[str]:
    """The predictions of runs that were not fitted; the intervals have no noise of single runs."""
    return [
        f"held out {item.name}: measured {as_loss(item.measured)}, predicted "
        f"{shown(item.predicted, as_loss)} ({item.error:+.2%})"
        for item in fit.holdouts
    ]


def _details(fit: Fit) -> list[str]:
    """All else: notes, why what is missing is, the laws' numbers, excluded runs."""
    lines = [*(f"note: {note}" for note in fit.points.notes), *_missing(fit)]
    lines += [
        f"intervals of {item.title} rest on {count} "
        f"{'budgets' if count <= MOST_GROUPS else 'groups of runs'}"
        for item in fit.approaches
        if (count := len(item.left_out))
    ]
    lines.append(
        f"FLOPs per token: {fit.flops_law.scale:.4g} N^{fit.flops_law.power:.4g}, within "
        f"{fit.flops_law.largest_error:.2%}"
    )
    for key in ("parametric", "tied"):
        if law := law_intervals(fit, key):
            numbers = "  ".join(f"{name} {shown(law[name], as_factor)}" for name in law)
            lines.append(f"{TITLES[key]}, E + A/N^alpha + B/D^beta: {numbers}")
    lines += _holdouts(fit)
    return lines + [f"left out: {item.name}: {item.reason}" for item in fit.points.excluded]


def _missing(fit: Fit) -> list[str]:
    """Why there is no such law, or no interval of it."""
    return [
        *(f"{TITLES[key]} is not available: {why}" for key, why in fit.unavailable.items()),
        *(f"{i.title} has no intervals: {i.no_interval}" for i in fit.approaches if i.no_interval),
    ]


def fit_tree(fit: Fit, flops: float | None = None) -> dict[str, Any]:
    """The fit as values of JSON, with the optima of the largest budget and of C FLOPs (or 10 times
    that budget); null for a number that there is not.
    """
    laws = {
        item.key: {
            "optima": [
                {"flops": at, **{name: value for name, value, _ in numbers_at(fit, item, at)}}
                for at in (fit.largest, flops or fit.beyond)
            ],
            "numbers": law_intervals(fit, item.key),
            "doubt": fit.doubts.get(item.key),
            "no_interval": item.no_interval or None,
        }
        for item in fit.approaches
    }
    tree = {
        "source": fit.points.source,
        "num_runs": len(fit.points),
        "budgets": fit.points.budgets.tolist(),
        "flops_per_token": fit.flops_law,
        "rely_on": None if fit.none_because else fit.approaches[0].key,
        "laws": laws,
        "holdouts": [{**vars(item), "error": item.error} for item in fit.holdouts],
        "excluded": fit.points.excluded,
        "notes": fit.points.notes,
    }
    more = ("valleys", "unavailable", "left_out", "num_left_out", "backtests", "warnings")
    return with_nulls(to_tree(tree | {name: getattr(fit, name) for name in more}))


@dataclass(frozen=True, kw_only=True)
class Part:
    """A section of a page: figures by file name, a table with its heads, and lines on them."""

    title: str
    above: Sequence[str] = ()  # lines above the table
    rows: Sequence[Sequence[str]] = ()
    tex: Sequence[Sequence[str]] = ()  # the table in LaTeX, if it is another one
    numbers: Sequence[Mapping[str, Any]] = ()  # the table as CSV, if it is another one
    lines: Sequence[str] = ()
    figures: Mapping[str, tuple[Callable[[], Figure], str]] = field(default_factory=dict)
    details: Sequence[str] = ()  # that a click shows
    style: str = "faint"  # of the lines

    def html(self, directory: Path, about: str) -> str:
        """What the page shows; the figures are also files in all forms, of the table `about`."""
        parts = []
        for name, (draw, caption) in self.figures.items():
            figure = draw()
            save_figure(directory / f"{name}.png", figure, f"{caption} ({about})")
            parts.append(chart_html(figure, caption) + sentence(caption))
        if self.rows:
            heads, *rows = self.rows
            name = f"table-{self.title.lower().replace(' ', '-')}"
            notes = [*self.above, *self.lines]
            write_table(directory / name, self.tex or self.rows, self.numbers, notes)
            parts += [sentence(line, self.style) for line in self.above]
            # a line of a table on a narrow screen ends before an interval or its second number
            gaps = re.compile(r"(?<=,) | (?=to )")
            cells = [[gaps.sub("\N{NO-BREAK SPACE}", cell) for cell in row] for row in rows]
            parts.append(table(heads, cells, "named ranges"))
        parts += [sentence(line, self.style) for line in self.lines]
        if self.details:
            lines = "\n".join(self.details).splitlines()
            text = [textwrap.fill(line, PRE_WIDTH, subsequent_indent="  ") for line in lines]
            parts.append(folded("as text", preformatted("\n".join(text))))
        return section(self.title, *parts)


def sentence(line: str, style: str = "faint") -> str:
    """A line of the terminal as a paragraph."""
    return paragraph(f"{line[0].upper()}{line[1:]}.", style)


def write_parts(
    parts: Sequence[Part], runs: Path, directory: Path, title: str, lead: str, cards: Sequence[Card]
) -> Path:
    """Write report.html about the table `runs`, with its date and code, and return it."""
    make_directory(directory)
    name = "/".join(runs.parts[-2:])
    about = f"{name}, {datetime.now(timezone.utc).date().isoformat()}, code {code_version()}"
    sections = [part.html(directory, about) for part in parts]
    footer = (
        "Written by 'pretrain scale report'. Losses are in nats per token; every figure is beside "
        "this page as PNG, SVG, PDF and CSV."
    )
    path = directory / "report.html"
    write_page(path, page(title or f"Scaling laws: {name}", about, lead, cards, sections, footer))
    return path


def write_fit_page(fit: Fit, runs: Path, directory: Path, title: str) -> Path:
    """Write report.html about the table `runs`, fit.json and the figures; return the page."""
    points = fit.points
    lead = (
        f"{counted(len(points), 'run')} at {counted(len(points.budgets), 'budget')} from "
        f"{points.flops_P.min():.3g} to {points.flops_P.max():.3g} training FLOPs. Brackets are "
        f"{LEVEL}% intervals. All numbers are in fit.json."
    )
    path = write_parts(fit_parts(fit), runs, directory, title, lead, _cards(fit))
    write_json(directory / "fit.json", fit_tree(fit))
    return path


def fit_parts(fit: Fit) -> list[Part]:
    """The page of a fit, the answer first."""
    distrusted = [f"{TITLES[key]} is not relied on: {why}" for key, why in fit.doubts.items()]
    answer = [*(f"warning: {line}" for line in fit.warnings), choice_line(fit)]
    if not fit.none_because:
        law = fit.approaches[0]
        answer += remarks(fit, law, fit.beyond)
        answer += [f"doubt: {why}" for why in doubts(fit, fit.beyond, law)]
    bands = f"Bands are {LEVEL}% intervals; right of the dashed line is extrapolation"
    held = ""
    if fit.holdouts and fit.law:
        held = f". A diamond is a run that was held out, a dash what {fit.law.title} predicts of it"
        held += "" if fit.law.no_interval else ", with its interval"
    isoflop = (
        "Final loss over parameters N, a color and a marker per budget of training FLOPs: a mark "
        "is a run, a curve approach 2's parabola in ln N, a star its lowest point if that is "
        "inside the sizes"
    )
    least = f"The least loss that C training FLOPs can buy, by each law. {bands}{held}"
    optimum = f"The compute-optimal number of parameters N* at C FLOPs. {bands}"
    frontiers = {
        "frontier": (partial(frontier_chart, fit), least),
        "sizes": (partial(sizes_chart, fit), optimum),
    }
    errors = {}
    if fit.drawn.key != "lowest":
        caption = (
            f"Prediction of {fit.drawn.title} minus measured loss of every fitted run, in "
            "percent of the measured loss. A trend with FLOPs or color is an effect that the law "
            "does not describe"
        )
        errors["residuals"] = (partial(residuals_chart, fit), caption)
    valleys = {"isoflop": (partial(valleys_chart, fit), isoflop)}
    rows = law_table(fit, fit.beyond)
    return [
        Part(title="Answer", lines=answer, style=""),
        Part(title="Laws", rows=rows, lines=[*distrusted, *_missing(fit)]),
        Part(title="Runs of equal FLOPs", figures=valleys),
        Part(title="Compute-optimal frontier", figures=frontiers),
        *([Part(title="Errors of the law", figures=errors)] if errors else []),
        Part(title="All numbers", details=_details(fit)),
    ]


def _cards(fit: Fit) -> list[Card]:
    if fit.none_because:
        return [Card("none", choice_line(fit), "bad")]
    flops = fit.beyond
    cards = []
    for name, interval, text in numbers_at(fit, fit.approaches[0], flops):
        value, _, ends = shown(interval, text).partition(" ")
        if value == "-":
            continue
        where = "exponent of N* ~ C^a" if name == "a" else f"{name} at {flops:.3g} FLOPs"
        ends = ends.replace(" ", "\N{NO-BREAK SPACE}")  # a line does not end inside the interval
        cards.append(Card(value, f"{where}, {ends or 'no interval'}"))
    return cards
