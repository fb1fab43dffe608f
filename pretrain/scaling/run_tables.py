"""Tables of runs as rows of texts and numbers. A mistake is one DataError that says what to do.

Legend: P rows.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from data_pipeline.checked_fields import shown
from data_pipeline.csv_files import read_csv
from data_pipeline.errors import DataError
from data_pipeline.files import parse_json
from data_pipeline.yaml_files import did_you_mean
from pretrain.scaling.points import Array
from pretrain.terminal.text import counted

YES = ("1", "1.0", "true", "yes")
NO = ("", "0", "0.0", "false", "no")
SMALLEST, LARGEST = 1e-9, 1e40  # of any number in a table; powers of more overflow
Row = Mapping[str, Any]


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
        text = text_of(path, origin)
        first = text.partition("\n")[0]
        separator = next((mark for mark in ",;\t" if mark in first), ",")
        rows = list(enumerate(read_csv(text, separator), 2))
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


def rows_of(path: Path) -> list[Row]:
    """Read a file's rows, each with its number as `_line`; DataError for any other content."""
    origin = "expected a CSV or JSON file with one run per row"
    if path.suffix not in (".json", ".jsonl"):
        return [{**_stripped(row), "_line": number} for number, row in csv_rows(path, origin)]
    text = text_of(path, origin)
    try:
        lines = [line for line in text.splitlines() if line.strip()]
        tree = [*map(parse_json, lines)] if path.suffix == ".jsonl" else parse_json(text)
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    tree = tree.get("runs") if isinstance(tree, dict) else tree
    if not (isinstance(tree, list) and all(isinstance(row, dict) for row in tree)):
        raise DataError(
            f"{path}: expected a list of objects, one per run, or an object whose 'runs' is such "
            "a list"
        )
    return [{**_stripped(row), "_line": number} for number, row in enumerate(tree, 1)]


def matches(row: Row, condition: str, path: Path, name: str) -> bool:
    """Whether the row of the run `name` meets a condition COLUMN=VALUE; DataError if it is none.

    `name=VALUE` holds for the name that the run has in all output, also without such a column.
    """
    column, equals, value = condition.partition("=")
    if not equals:
        raise DataError(f"{condition!r} is not a condition; write COLUMN=VALUE")
    if column not in row and column != "name":
        raise DataError(f"{path}: no column {column!r}{did_you_mean(column, column_names(row))}")
    return str(row.get(column, name)) == value


def numbers(rows: Sequence[Row], column: str, role: str, path: Path) -> Array:
    """A column as positive finite numbers; DataError counts the bad rows and shows the first."""
    present = [name for name in column_names(rows[0]) if name is not None]
    if column not in present:
        raise DataError(
            f"{path}: no column {column!r} (found: {', '.join(present)}); name it with --column "
            f"{role}=NAME"
        )
    values = [number(row.get(column)) for row in rows]
    for is_bad, wish in (
        (lambda v: not math.isfinite(v), "a finite number"),
        (lambda v: v <= 0, "a positive number"),
        (lambda v: not SMALLEST <= v <= LARGEST, f"a number from {SMALLEST:g} to {LARGEST:g}"),
    ):
        refuse_where([is_bad(value) for value in values], rows, column, wish, path)
    return np.array(values)


def refuse_where(
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


def number(value: Any) -> float:
    """The value as a number; NaN if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def column_names(row: Row) -> list[str]:
    """The names of the columns in the file."""
    return [name for name in row if name != "_line"]
