"""Reading tables that people and spreadsheets have had in their hands."""

from __future__ import annotations

import csv
from pathlib import Path

from data_pipeline.errors import DataError

YES = ("1", "1.0", "true", "yes")
NO = ("", "0", "0.0", "false", "no")


def text_of(path: Path, origin: str) -> str:
    """The file's text; DataError, with `origin` for an absent one, unless it is there and in UTF-8."""
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
    """What a cell says that is to hold yes or no (true or false, 1 or 0, nothing for no); None for anything else."""
    word = "" if value is None else str(value).strip().lower()
    return True if word in YES else False if word in NO else None


def csv_rows(path: Path, origin: str) -> list[tuple[int, dict[str, str]]]:
    """Each row with its line number; DataError as `text_of`, and for a row with more cells than the header."""
    rows = []
    for number, row in enumerate(csv.DictReader(text_of(path, origin).splitlines()), 2):
        if None in row:
            raise DataError(
                f"{path}: row {number} has more cells than the header names; is there a stray comma?"
            )
        rows.append((number, row))
    return rows
