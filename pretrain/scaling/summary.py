"""A fit as text, the answer first, and as a JSON tree."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np

from pretrain.scaling.fit import BEYOND, TITLES, Fit, relative_error
from pretrain.scaling.frontier import Approach, Line, Valley, law_of
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
from pretrain.scaling.law import NAMES
from pretrain.scaling.table import Array, Points
from pretrain.terminal.text import counted, text_table

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
        text_table(law_table(fit, flops), left=(0, -1))
        if fit.doubts
        else text_table(law_table(fit, flops)),
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


def law_table(fit: Fit, flops: float) -> list[list[str]]:
    """Heads and a line per law, from the one to rely on."""
    rows = [["law", "left-out error", "a", f"N* at {flops:.3g}", "loss", "not relied on:"]]
    errors = fit.left_out.error if fit.left_out else {}
    for approach in fit.approaches:
        size, _, loss, a = (
            shown(interval, text) for _, interval, text in numbers_at(fit, approach, flops)
        )
        error = f"{errors[approach.key]:.2%}" if approach.key in errors else "-"
        rows.append([approach.title, error, a, size, loss, fit.doubts.get(approach.key, "")])
    if not fit.doubts:
        rows = [row[:-1] for row in rows]
    if max(map(len, text_table(rows).splitlines())) > WIDTH:
        rows = [[cell.split(" [")[0] for cell in row] for row in rows]
    return rows


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

    return dict(zip(NAMES, law.intervals(numbers), strict=True))


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
