"""A fit and its forecasts, as human-readable lines and as a JSON tree."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pretrain.scaling.checks import beyond, disagreement, relative_error
from pretrain.scaling.estimates import TITLES, LeftOut
from pretrain.scaling.fit import Fit
from pretrain.scaling.frontier import Approach, Line, law_of
from pretrain.scaling.intervals import (
    ERRORS,
    LEVEL,
    Interval,
    as_exponent,
    as_factor,
    as_loss,
    as_size,
    shown,
)
from pretrain.scaling.isoflop import FEWEST_SIZES, Valley
from pretrain.scaling.law import NAMES
from pretrain.scaling.points import Array
from pretrain.scaling.predict import Forecast
from pretrain.scaling.ranking import ranking_line, ranking_table
from pretrain.scaling.seeds import seed_spread
from pretrain.terminal.text import counted, fitted_table, flops_text


def approach_table(fit: Fit) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: the approaches side by side, at the largest budget and beyond it."""
    largest = float(fit.points.budgets[-1])
    places = (largest, beyond(largest)[0])
    heads = ["approach", "a: N* ~ C^a", "b: D* ~ C^b"]
    for flops in places:
        heads += [f"{name} at {flops:.3g}" for name in ("N*", "D*", "loss")]
    rows = []
    for approach in fit.approaches:
        a, b = approach.powers(fit.flops_law)
        row = [approach.title, shown(a, as_exponent), shown(b, as_exponent)]
        for log_flops in np.log(places):
            row += [
                shown(approach.parameters(log_flops), as_size),
                shown(approach.tokens(log_flops, fit.flops_law), as_size),
                shown(approach.loss(log_flops), as_loss),
            ]
        rows.append(row)
    return heads, rows


def law_intervals(fit: Fit) -> dict[str, Interval]:
    """Approach 3's five numbers with their intervals; empty without approach 3."""
    law = fit.approach("parametric")
    if law is None:
        return {}

    def numbers(line: Line) -> list[Array]:
        *logs, alpha, beta = np.moveaxis(law_of(line).theta, -1, 0)
        return [*map(np.exp, logs), alpha, beta]

    return dict(zip(NAMES, law.intervals(numbers), strict=True))


def fit_lines(fit: Fit) -> list[str]:
    """The whole fit as lines for the terminal."""
    points = fit.points
    heads, rows = approach_table(fit)
    lines = [
        f"{counted(len(points), 'run')} at {counted(len(points.budgets), 'budget')}, "
        f"{points.flops_P.min():.3g} to "
        f"{points.flops_P.max():.3g} FLOPs; {LEVEL}% intervals",
        f"FLOPs per token: {fit.flops_law.scale:.4g} N^{fit.flops_law.power:.4g}"
        + (f", within {fit.flops_law.largest_error:.2%}" if fit.flops_law.largest_error else ""),
        *(f"note: {note}" for note in points.notes),
        "",
        fitted_table([heads, *rows]),
        *unavailable_lines(fit),
        *no_interval_lines(fit),
        *([f"approach 2: {isoflop.choice}"] if (isoflop := fit.estimates.isoflop) else []),
    ]
    if law := law_intervals(fit):
        assert fit.estimates.parametric
        numbers = "  ".join(f"{name} {shown(law[name], as_factor)}" for name in law)
        lines += ["", f"L(N, D) = E + A/N^alpha + B/D^beta: {numbers}"]
        lines.append(
            f"mean absolute error on the fitted runs {fit.estimates.parametric.mean_error:.3%}"
        )
    if (spread := seed_spread(points)) is not None:
        lines.append(f"standard deviation of losses that differ only by the seed: {spread:.3%}")
    lines += [*check_lines(fit), "", *ranking_lines(fit)]
    excluded = [f"left out: {item.name}: {item.reason}" for item in points.excluded]
    return lines + ([""] + excluded if excluded else []) + warning_lines(fit)


def unavailable_lines(fit: Fit) -> list[str]:
    """Why an approach is missing from the table."""
    return [
        f"{TITLES[key]} is not available: {reason}"
        for key, reason in fit.estimates.unavailable.items()
    ]


def no_interval_lines(fit: Fit) -> list[str]:
    """Why an approach has no intervals."""
    return [
        f"{item.title} has no intervals: {item.no_interval}"
        for item in fit.approaches
        if item.no_interval
    ]


def ranking_lines(fit: Fit) -> list[str]:
    """The approaches from the one to rely on, with their errors on what they had not seen."""
    return [fitted_table(ranking_table(fit.ranking)), ranking_line(fit.ranking)]


def check_lines(fit: Fit) -> list[str]:
    """Predictions of runs that the fit did not see."""
    lines = []
    if len(fit.approaches) > 1:
        flops, where = beyond(float(fit.points.budgets[-1]))
        ratio = disagreement(fit.approaches, float(np.log(flops)))
        lines += ["", f"at {where}, the largest N* of an approach is {ratio:.2f}x the smallest"]
    if left := fit.left_out:
        lines += [
            "",
            f"the largest budget ({left.budget:.3g} FLOPs) as a fit without it predicts it; "
            f"{ERRORS}",
        ]
        lines += [f"  {line}" for line in _left_out_lines(left)]
        lines += [f"  {line}" for line in lost_lines(fit)]
    if fit.holdouts:
        lines += [
            "",
            f"held-out runs; {ERRORS}" if not fit.left_out else "held-out runs; errors as above",
        ]
    for item in fit.holdouts:
        predicted = shown(item.predicted, as_loss)
        lines.append(
            f"  held out {item.name}: measured {as_loss(item.measured)}, predicted {predicted} "
            f"({item.error:+.2%})"
        )
    if fit.num_unpredicted:
        words = counted(fit.num_unpredicted, "held-out run")
        lines.append(f"{words} not predicted: only approach 3 can, and it is not available")
    return lines


def _left_out_lines(left: LeftOut) -> list[str]:
    lines = []
    if left.law_error is not None:
        lines.append(
            f"approach 3: mean absolute error {left.law_error:.2%} on the runs of that budget"
        )
    if left.measured:
        size, loss = left.measured
        lines.append(f"measured: N* {as_size(size)}, loss {as_loss(loss)}")
        lines += [
            f"{TITLES[key]}: N* {as_size(predicted_size)} "
            f"({relative_error(predicted_size, size):+.0%}), "
            f"loss {as_loss(predicted_loss)} ({relative_error(predicted_loss, loss):+.2%})"
            for key, (predicted_size, predicted_loss) in left.optimum.items()
        ]
    else:
        lines.append(
            f"N* and its loss cannot be compared: fewer than {FEWEST_SIZES} sizes at that budget"
        )
    return lines


def lost_lines(fit: Fit) -> list[str]:
    """Why an approach that fits all runs does not fit those below the largest budget."""
    reasons = fit.left_out.unavailable if fit.left_out else {}
    lost = {TITLES[key]: why for key, why in reasons.items() if fit.approach(key)}
    return [f"{title}: not available without that budget: {why}" for title, why in lost.items()]


def warnings_by_subject(fit: Fit) -> dict[str, tuple[str, ...]]:
    """All warnings by what they are about: the runs, or one approach."""
    found = {"the runs": fit.warnings}
    found |= {f"approach {approach.title}": approach.warnings for approach in fit.approaches}
    return {subject: lines for subject, lines in found.items() if lines}


def warning_lines(fit: Fit) -> list[str]:
    """All warnings, each with the approach it is about."""
    return [
        f"warning: {line}" if subject == "the runs" else f"warning: {subject}: {line}"
        for subject, lines in warnings_by_subject(fit).items()
        for line in lines
    ]


def fit_tree(fit: Fit) -> dict[str, Any]:
    """The fit as JSON-able values."""
    return {
        "source": fit.points.source,
        "num_runs": len(fit.points),
        "budgets": fit.points.budgets.tolist(),
        "flops_per_token": {"scale": fit.flops_law.scale, "power": fit.flops_law.power},
        "law": {name: _interval_tree(value) for name, value in law_intervals(fit).items()},
        "law_error": law.mean_error if (law := fit.estimates.parametric) else None,
        "approaches": {item.key: _approach_tree(fit, item) for item in fit.approaches},
        "valleys": [_valley_tree(valley) for valley in isoflop.valleys]
        if (isoflop := fit.estimates.isoflop)
        else [],
        "unavailable": fit.estimates.unavailable,
        "no_interval": {item.key: item.no_interval for item in fit.approaches if item.no_interval},
        "left_out": vars(fit.left_out) if fit.left_out else None,
        "ranking": [item.tree() for item in fit.ranking.standings],
        "holdouts": [
            {**vars(item), "predicted": _interval_tree(item.predicted), "error": item.error}
            for item in fit.holdouts
        ],
        "excluded": [vars(item) for item in fit.points.excluded],
        "warnings": {subject: list(lines) for subject, lines in warnings_by_subject(fit).items()},
        "notes": list(fit.points.notes),
        "bits_per_byte_of_a_nat": _finite(fit.points.bits_per_nat),
    }


def _approach_tree(fit: Fit, approach: Approach) -> dict[str, Any]:
    """The numbers of the table: exponents, and the optimum at the largest budget and beyond it."""
    a, b = approach.powers(fit.flops_law)
    largest = float(fit.points.budgets[-1])
    optima = []
    for flops in (largest, beyond(largest)[0]):
        log_flops = float(np.log(flops))
        numbers = {
            "parameters": approach.parameters(log_flops),
            "tokens": approach.tokens(log_flops, fit.flops_law),
            "loss": approach.loss(log_flops),
        }
        trees = {name: _interval_tree(value) for name, value in numbers.items()}
        optima.append({"flops": flops, **trees})
    return {"a": _interval_tree(a), "b": _interval_tree(b), "optima": optima}


def _valley_tree(valley: Valley) -> dict[str, Any]:
    """A budget's parabola; null where it has no lowest point."""
    numbers = {name: _finite(getattr(valley, name)) for name in ("parameters", "loss", "bend")}
    return {"budget": valley.budget, **numbers, "unused_because": valley.reason or None}


def _interval_tree(interval: Interval) -> dict[str, float | None]:
    """An interval with null for an end that there is not; JSON has no NaN and no infinity."""
    return {name: _finite(value) for name, value in vars(interval).items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def forecast_table(forecasts: Sequence[Forecast], asked: str) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of an optimum by every approach, without the column that was `asked` for."""
    columns: dict[str, tuple[str, Callable[[float], str]]] = {
        "parameters": ("N*", as_size),
        "tokens": ("D*", as_size),
        "flops": ("C", flops_text),
        "loss": ("loss", as_loss),
    }
    del columns[asked]
    rows = [
        [item.approach, *(shown(getattr(item, name), text) for name, (_, text) in columns.items())]
        for item in forecasts
    ]
    return ["approach", *(head for head, _ in columns.values())], rows
