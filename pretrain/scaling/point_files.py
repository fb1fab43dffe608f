"""Files of runs (CSV or JSON) as points. A mistake in a file is one DataError that says what to do.

Legend: P points.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from data_pipeline.checked_fields import shown
from data_pipeline.csv_files import read_csv
from data_pipeline.errors import DataError
from data_pipeline.files import parse_json
from data_pipeline.yaml_files import did_you_mean
from pretrain.scaling.points import Array, Exclusion, Points, grouped_budgets, without_repeats
from pretrain.scaling.units import (
    flops_note,
    is_perplexity,
    refuse_perplexities,
    scaled,
    tokens_note,
)
from pretrain.terminal.text import counted

YES = ("1", "1.0", "true", "yes")
NO = ("", "0", "0.0", "false", "no")
SMALLEST, LARGEST = 1e-9, 1e40  # of any number in a table; powers of more overflow


def text_of(path: Path, origin: str) -> str:
    """Read a text file in UTF-8; DataError if it is absent or has another encoding."""
    if path.is_dir():
        raise DataError(f"{path} is a directory; name a file: {origin}")
    if not path.is_file():
        raise DataError(f"{path} does not exist; {origin}")
    try:
        return path.read_text(encoding="utf-8-sig")  # spreadsheets put a byte-order mark in front
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text ({error}); save it as CSV or JSON in UTF-8"
        ) from None


def flag(value: object) -> bool | None:
    """Parse a yes-or-no cell (true or false, 1 or 0, nothing for no); None for anything else."""
    word = "" if value is None else str(value).strip().lower()
    return True if word in YES else False if word in NO else None


def csv_rows(path: Path, origin: str) -> list[tuple[int, dict[str, str]]]:
    """Return each row with its line number; DataError for a row longer than the header."""
    try:
        rows = list(enumerate(read_csv(text_of(path, origin)), 2))
    except csv.Error as error:
        raise DataError(f"{path} is not a CSV file ({error}); {origin}") from None
    for number, row in rows:
        if None in row:
            raise DataError(
                f"{path}: row {number} has more cells than the header names; check for a stray "
                "comma"
            )
    return cast("list[tuple[int, dict[str, str]]]", rows)


def _stripped(row: Mapping[str, Any]) -> dict[str, Any]:
    """Without blanks around names and values, which hand-written tables are padded with."""
    return {
        name.strip(): value.strip() if isinstance(value, str) else value
        for name, value in row.items()
    }


Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Column names in a file of runs. Required: parameters, loss, and tokens or FLOPs."""

    parameters: str = "N"
    tokens: str = "D"
    loss: str = "loss"
    flops: str = "C"  # training FLOPs of the whole run; absent: 6 N D
    # the FLOPs a group of runs was planned for; absent: runs of about equal FLOPs are grouped
    budget: str = "budget"
    name: str = "name"
    progress: str = (
        "progress"  # fraction of the learning-rate schedule that was done; absent: all of it
    )
    holdout: str = "holdout"  # true: predicted, never fitted
    error: str = "loss_error"  # standard error of the loss, such as of an average; absent: 0
    excluded: str = "excluded"  # not empty: why the run takes no part


def read_points(
    path: Path,
    columns: Columns | None = None,
    *,
    where: Sequence[str] = (),
    exclude: Sequence[str] = (),
    holdout: Sequence[str] = (),
    units: Mapping[str, float] | None = None,
) -> Points:
    """Read the runs of a CSV or JSON file. `where` keeps rows (column=value); `exclude` drops some
    (column=value: reason).

    `holdout` (column=value) marks rows to be predicted and never fitted, in addition to those that
    the file marks; `units` are factors of roles. Raises DataError, one line per kind of mistake:
    missing column, not a number, not positive, no rows left.
    """
    columns = columns or Columns()
    rows = _rows_of(Path(path))
    _refuse_absent(rows, columns, path)
    rows = [row for row in rows if all(_matches(row, condition, path) for condition in where)]
    if not rows:
        raise DataError(
            f"{path} contains no runs{' that match ' + ' and '.join(where) if where else ''}; "
            "check the file"
        )
    kept: list[Row] = []
    excluded: list[Exclusion] = []
    for row in rows:
        own = _reason_in(row, columns.excluded)
        reasons = [own] if own else []
        reasons += [
            item.partition(":")[2].strip()
            for item in exclude
            if _matches(row, item.partition(":")[0], path)
        ]
        if reasons:
            excluded.append(Exclusion(_name(row, columns), reasons[0] or "excluded by hand"))
        else:
            kept.append(row)
    held = [
        {**row, columns.holdout: "yes"}
        if any(_matches(row, item, path) for item in holdout)
        else row
        for row in kept
    ]
    points = _from_rows(held, columns, path, units or {})
    return without_repeats(replace(points, excluded=tuple(excluded)))


def values_by_name(path: Path, column: str, columns: Columns | None = None) -> dict[str, float]:
    """Return a column of finite numbers by the names of the runs, without rows that lack one.

    DataError if there is no such column, or if two runs of one name differ in it.
    """
    rows = _rows_of(Path(path))
    present = _column_names(rows[0]) if rows else []
    if not any(column in row for row in rows):
        raise DataError(f"{path}: no column {column!r}{did_you_mean(column, present)}")
    found: dict[str, float] = {}
    for row in rows:
        name, value = _name(row, columns or Columns()), _number(row.get(column))
        if math.isfinite(value) and found.setdefault(name, value) != value:
            raise DataError(
                f"{path}: row {row['_line']}: another run is named {name!r}, too, with another "
                f"{column}; give each run its own name"
            )
    return found


def _from_rows(
    rows: Sequence[Row], columns: Columns, path: Path, units: Mapping[str, float]
) -> Points:
    if not rows:
        raise DataError(f"{path}: every run is excluded; a fit needs some")
    names = tuple(_name(row, columns) for row in rows)
    loss_P, notes = _losses(rows, columns.loss, path, units)
    error_P = scaled(_errors(rows, columns.error, path), units, "loss")
    if is_perplexity(columns.loss):
        error_P = error_P / np.exp(loss_P)  # those of the logarithms
    parameters_P, tokens_P, flops_P, assumed = _sizes(rows, columns, path, units)
    notes += assumed
    has_budget = any(row.get(columns.budget) not in (None, "") for row in rows)
    budget_P = (
        _numbers(rows, columns.budget, "budget", path) if has_budget else grouped_budgets(flops_P)
    )
    return Points(
        names=names,
        parameters_P=parameters_P,
        tokens_P=tokens_P,
        flops_P=flops_P,
        loss_P=loss_P,
        budget_P=budget_P,
        progress_P=_progress(rows, columns.progress, path),
        holdout_P=_holdout(rows, columns.holdout, path),
        error_P=error_P,
        notes=tuple(notes),
        source=str(path),
    )


def _losses(
    rows: Sequence[Row], column: str, path: Path, units: Mapping[str, float]
) -> tuple[Array, list[str]]:
    """Losses in nats per token, and a note if they are the logarithms of perplexities."""
    values_P = scaled(_numbers(rows, column, "loss", path), units, "loss")
    if not is_perplexity(column):
        if "loss" not in units:
            refuse_perplexities(values_P, column, path)
        return values_P, []
    _refuse_where((values_P <= 1).tolist(), rows, column, "a perplexity above 1", path)
    return np.log(values_P), [f"loss = ln {column}"]


def _sizes(
    rows: Sequence[Row], columns: Columns, path: Path, units: Mapping[str, float]
) -> tuple[Array, Array, Array, list[str]]:
    """N, D and C, one of which may follow from the others, and notes on that."""
    has = {
        role: any(row.get(getattr(columns, role)) not in (None, "") for row in rows)
        for role in ("parameters", "tokens", "flops")
    }
    # A column that is there but empty is an error of its rows, not an assumption.
    has["tokens"] |= columns.tokens in rows[0]
    has["parameters"] |= columns.parameters in rows[0]
    needed = ["parameters", "tokens"] if not has["flops"] else []
    if has["flops"]:
        needed = [role for role in ("parameters", "tokens") if has[role]] or ["parameters"]
    found = {
        role: scaled(_numbers(rows, getattr(columns, role), role, path), units, role)
        for role in (*needed, *(["flops"] if has["flops"] else []))
    }
    if "flops" not in found:
        flops_P = 6 * found["parameters"] * found["tokens"]
        notes = [f"no column {columns.flops!r}: C = 6ND"]
        unusual = tokens_note(found["parameters"], found["tokens"])
        return found["parameters"], found["tokens"], flops_P, notes + [unusual] * bool(unusual)
    flops_P = found["flops"]
    if "tokens" not in found:
        tokens_P = flops_P / (6 * found["parameters"])
        return found["parameters"], tokens_P, flops_P, [f"no column {columns.tokens!r}: D = C / 6N"]
    if "parameters" not in found:
        notes = [f"no column {columns.parameters!r}: N = C / 6D"]
        return flops_P / (6 * found["tokens"]), found["tokens"], flops_P, notes
    unusual = flops_note(found["parameters"], found["tokens"], flops_P, path)
    return found["parameters"], found["tokens"], flops_P, [unusual] if unusual else []


def _refuse_absent(rows: Sequence[Row], columns: Columns, path: Path) -> None:
    """Raise DataError for a missing column that was named by hand, not ignore it silently."""
    present = _column_names(rows[0]) if rows else []
    for field in fields(columns):
        column = getattr(columns, field.name)
        if rows and column != field.default and not any(column in row for row in rows):
            raise DataError(
                f"{path}: no column {column!r} for --column "
                f"{field.name}={column}{did_you_mean(column, present)}"
            )


def _rows_of(path: Path) -> list[Row]:
    origin = "expected a CSV or JSON file with one run per row"
    if path.suffix != ".json":
        return [{**_stripped(row), "_line": number} for number, row in csv_rows(path, origin)]
    text = text_of(path, origin)
    try:
        tree = parse_json(text)
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    tree = tree.get("runs") if isinstance(tree, dict) else tree
    if not (isinstance(tree, list) and all(isinstance(row, dict) for row in tree)):
        raise DataError(
            f"{path}: expected a list of objects, one per run, or an object whose 'runs' is such "
            "a list"
        )
    return [{**_stripped(row), "_line": number} for number, row in enumerate(tree, 1)]


def _matches(row: Row, condition: str, path: Path) -> bool:
    column, equals, value = condition.partition("=")
    if not equals:
        raise DataError(f"{condition!r} is not a condition; write COLUMN=VALUE")
    if column not in row:
        raise DataError(f"{path}: no column {column!r}{did_you_mean(column, _column_names(row))}")
    return str(row[column]) == value


def _numbers(rows: Sequence[Row], column: str, role: str, path: Path) -> Array:
    """A column as positive finite numbers; DataError counts the bad rows and shows the first."""
    present = [name for name in _column_names(rows[0]) if name is not None]
    if column not in present:
        raise DataError(
            f"{path}: no column {column!r} (found: {', '.join(present)}); name it with --column "
            f"{role}=NAME"
        )
    values = [_number(row.get(column)) for row in rows]
    for is_bad, wish in (
        (lambda v: not math.isfinite(v), "a finite number"),
        (lambda v: v <= 0, "a positive number"),
        (lambda v: not SMALLEST <= v <= LARGEST, f"a number from {SMALLEST:g} to {LARGEST:g}"),
    ):
        _refuse_where([is_bad(value) for value in values], rows, column, wish, path)
    return np.array(values)


def _refuse_where(
    is_bad_P: Sequence[bool], rows: Sequence[Row], column: str, wish: str, path: Path
) -> None:
    """Raise DataError that counts the bad rows and shows the first, if there are any."""
    bad = [row for row, is_bad in zip(rows, is_bad_P, strict=True) if is_bad]
    if bad:
        others = f" (and {counted(len(bad) - 1, 'more such row')})" if len(bad) > 1 else ""
        raise DataError(
            f"{path}: row {bad[0]['_line']}: {column}={shown(bad[0].get(column))}{others}, "
            f"expected {wish}; "
            "correct it or exclude it with --exclude 'COLUMN=VALUE: reason'"
        )


def _progress(rows: Sequence[Row], column: str, path: Path) -> Array:
    values = [1.0 if row.get(column) in (None, "") else _number(row[column]) for row in rows]
    _refuse_where(
        [not 0 <= value <= 1 for value in values],
        rows,
        column,
        "a fraction of the schedule from 0 to 1 (0.4 for 40%), or nothing for all of it",
        path,
    )
    return np.array(values)


def _errors(rows: Sequence[Row], column: str, path: Path) -> Array:
    values = [0.0 if row.get(column) in (None, "") else _number(row[column]) for row in rows]
    wish = "a standard error of the loss from 0 on, or nothing"
    _refuse_where([not 0 <= value < LARGEST for value in values], rows, column, wish, path)
    return np.array(values)


def _holdout(rows: Sequence[Row], column: str, path: Path) -> Array:
    values = [flag(row.get(column)) for row in rows]
    _refuse_where(
        [value is None for value in values],
        rows,
        column,
        "1, true or yes for a run to predict, 0, false, no or nothing for one to fit",
        path,
    )
    return np.array(values, bool)


def _reason_in(row: Row, column: str) -> str:
    """The reason that the file gives for excluding the row; empty if there is none."""
    said = flag(row.get(column))
    return str(row[column]) if said is None else "excluded in the file" if said else ""


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _column_names(row: Row) -> list[str]:
    return [name for name in row if name != "_line"]


def _name(row: Row, columns: Columns) -> str:
    return str(row.get(columns.name) or row.get("run") or f"row {row['_line']}")
