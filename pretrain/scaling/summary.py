"""A fit and its forecasts as lines for people and as a tree for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pretrain.console import si
from pretrain.scaling.checks import seed_spread
from pretrain.scaling.fit import BEYOND, Fit, disagreement
from pretrain.scaling.law import NAMES
from pretrain.scaling.lines import LEVEL, Interval, LawLine, interval
from pretrain.scaling.predict import Forecast


def shown(value: Interval, digits: int = 3, prefix: bool = False) -> str:
    """An interval as `value [low, high]`."""
    texts = [number(item, digits, prefix) for item in (value.value, value.low, value.high)]
    return f"{texts[0]} [{texts[1]}, {texts[2]}]"


def number(value: float, digits: int = 3, prefix: bool = False) -> str:
    """A number with so many significant digits, with k, M, G, T where asked for; `-` for none."""
    if not math.isfinite(value):
        return "-"
    return si(value).replace(" ", "") if prefix and 1e3 <= value < 1e15 else f"{value:.{digits}g}"


def aligned(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines, columns as wide as their widest entry."""
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (heads, *rows)
    ]


def approach_table(fit: Fit) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: the approaches side by side, at the largest budget and beyond it."""
    largest = float(np.log(fit.points.budgets[-1]))
    heads = ["approach", "a: N* ~ C^a", "b: D* ~ C^b"]
    for log_flops in (largest, largest + math.log(BEYOND)):
        flops = f"{math.exp(log_flops):.2g}"
        heads += [f"N* at {flops}", f"D* at {flops}", f"loss at {flops}"]
    rows = []
    for approach in fit.approaches:
        a, b = approach.powers(fit.flops_law)
        row = [approach.title, shown(a), shown(b)]
        for log_flops in (largest, largest + math.log(BEYOND)):
            row += [
                shown(approach.parameters(log_flops), prefix=True),
                shown(approach.tokens(log_flops, fit.flops_law), prefix=True),
                shown(approach.loss(log_flops), 4),
            ]
        rows.append(row)
    return heads, rows


def law_intervals(fit: Fit) -> dict[str, Interval]:
    """Approach 3's five numbers with their intervals; empty without approach 3."""
    law = fit.approach("parametric")
    if law is None or not (isinstance(law.line, LawLine) and isinstance(law.draws, LawLine)):
        return {}
    values, draws = (
        np.concatenate([np.exp(x.theta[..., :3]), x.theta[..., 3:]], axis=-1) for x in (law.line, law.draws)
    )
    return {name: interval(values[index], draws[:, index]) for index, name in enumerate(NAMES)}


def fit_lines(fit: Fit) -> list[str]:
    """Everything a fit found, for the terminal."""
    points = fit.points
    lines = [
        f"{len(points)} runs at {len(points.budgets)} budgets, {points.flops_P.min():.3g} to "
        f"{points.flops_P.max():.3g} FLOPs; intervals {LEVEL} % of {fit.num_draws} bootstrap draws",
        f"FLOPs per token: {fit.flops_law.scale:.4g} N^{fit.flops_law.power:.4g}"
        + (f", within {fit.flops_law.largest_error:.2%}" if fit.flops_law.largest_error else ""),
        *(f"note: {note}" for note in points.notes),
        "",
        *aligned(*approach_table(fit)),
        *(f"{key} is not available: {reason}" for key, reason in fit.estimates.unavailable.items()),
    ]
    if law := law_intervals(fit):
        assert fit.estimates.parametric
        lines += [
            "",
            "L(N, D) = E + A/N^alpha + B/D^beta: " + "  ".join(f"{name} {shown(law[name], 4)}" for name in law),
        ]
        lines.append(f"mean error on the fitted runs {fit.estimates.parametric.mean_error:.3%}")
    if (spread := seed_spread(points)) is not None:
        lines.append(f"losses that differ only by the seed spread by {spread:.3%} (standard deviation)")
    lines += check_lines(fit)
    excluded = [f"left out: {item.name}: {item.reason}" for item in points.excluded]
    return lines + ([""] + excluded if excluded else []) + warning_lines(fit)


def check_lines(fit: Fit) -> list[str]:
    """What the fit says of runs it did not see."""
    lines = ["", f"disagreement of N* at {BEYOND:.0f} times the largest budget: {_disagreement(fit):.2f}x"]
    if left := fit.left_out:
        lines.append(f"without the largest budget ({left.budget:.3g}):")
        if left.law_error is not None:
            lines.append(f"  approach 3 misses its runs by {left.law_error:.2%} on average")
        for key, (size, loss) in left.optimum.items() if left.measured else ():
            assert left.measured
            size_error, loss_error = size / left.measured[0] - 1, loss / left.measured[1] - 1
            lines.append(
                f"  {key}: N* {number(size, prefix=True)} ({size_error:+.0%}), loss {loss:.4f} ({loss_error:+.2%})"
            )
    for item in fit.holdouts:
        predicted = shown(item.predicted, 5)
        lines.append(f"held out {item.name}: measured {item.measured:.4f}, predicted {predicted} ({item.error:+.2%})")
    return lines


def warning_lines(fit: Fit) -> list[str]:
    """All warnings, each with the approach it is about."""
    own = [f"approach {approach.title}: {warning}" for approach in fit.approaches for warning in approach.warnings]
    return [f"warning: {warning}" for warning in (*fit.warnings, *own)]


def fit_tree(fit: Fit) -> dict[str, Any]:
    """The fit as JSON-able values."""
    largest = float(np.log(fit.points.budgets[-1]))
    return {
        "source": fit.points.source,
        "num_runs": len(fit.points),
        "budgets": fit.points.budgets.tolist(),
        "num_draws": fit.num_draws,
        "seed": fit.seed,
        "flops_per_token": {"scale": fit.flops_law.scale, "power": fit.flops_law.power},
        "law": {name: vars(value) for name, value in law_intervals(fit).items()},
        "approaches": {
            approach.key: {
                "a": vars(approach.powers(fit.flops_law)[0]),
                "b": vars(approach.powers(fit.flops_law)[1]),
                "parameters_at_largest_budget": vars(approach.parameters(largest)),
                "loss_at_largest_budget": vars(approach.loss(largest)),
            }
            for approach in fit.approaches
        },
        "unavailable": fit.estimates.unavailable,
        "left_out": vars(fit.left_out) if fit.left_out else None,
        "holdouts": [{**vars(item), "predicted": vars(item.predicted), "error": item.error} for item in fit.holdouts],
        "excluded": [vars(item) for item in fit.points.excluded],
        "warnings": warning_lines(fit),
    }


def forecast_table(forecasts: Sequence[Forecast]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of an optimum by every approach."""
    heads = ["approach", "C", "N*", "D*", "loss"]
    rows = [
        [
            item.approach,
            shown(item.flops),
            shown(item.parameters, prefix=True),
            shown(item.tokens, prefix=True),
            shown(item.loss, 4),
        ]
        for item in forecasts
    ]
    return heads, rows


def _disagreement(fit: Fit) -> float:
    return disagreement(fit.approaches, float(np.log(fit.points.budgets[-1])) + math.log(BEYOND))
