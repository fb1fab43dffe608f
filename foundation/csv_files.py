"""Tables as CSV, which people open in spreadsheets: text stays text, whoever wrote it.

A spreadsheet runs a cell that begins with `=` and the like as a formula. Such text gets an
apostrophe in front, which spreadsheets take for the mark of text, and readers here remove it.
"""

from __future__ import annotations

import csv
import io
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foundation.errors import ConfigError
from foundation.files import read_regular, write_text
from foundation.yaml_files import YAML_SUFFIXES

_log = logging.getLogger(__name__)
_NUMBER = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?", re.IGNORECASE)
# Where a cell begins: at the start, and, for a spreadsheet whose locale separates by semicolons, at
# each of these, quoted or not.
_BEGIN = r"(?:^|(?<=[;\t\r\n]))"
# Also after blanks and what shows nothing, such as a byte-order mark, and in the wide forms that
# some locales accept.
_FORMULA = (
    r"(?=['\" \x00-\x08\x0b\x0c\x0e-\x1f\x7f-\xa0"
    r"\u2000-\u200f\u2028-\u202f\u2060-\u206f\u3000\ufeff]*"
    r"[=+\-@\t\r\uff1d\uff0b\uff0d\uff20])"
)
MOST_NAMES = 3  # of a message
_UNMARKED, _MARKED = re.compile(_BEGIN + _FORMULA), re.compile(f"{_BEGIN}'{_FORMULA}")


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a row per mapping, whole or not at all; values that it does not have are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([marked(column) for column in columns])
    writer.writerows([marked(row.get(column, "")) for column in columns] for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text.getvalue())


def check_table_path(path: Path, names: Iterable[str]) -> None:
    """Warn if a table about to be replaced has other rows than these, by their first cells.

    ConfigError for the name of a YAML or JSON file: nobody wants a table there, least of all in
    place of an experiment.
    """
    if path.suffix in (*YAML_SUFFIXES, ".json"):
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise ConfigError(f"{path} has the name of a {kind} file, expected that of a table, x.csv")
    try:
        rows = read_csv(read_regular(path).decode())
    except (OSError, ValueError, csv.Error):  # there is none, or it is none
        return
    if others := sorted({str(next(iter(row.values()))) for row in rows} - {*names}):
        _log.warning("%s: replaced a table that also had %s", path, shown_names(others))


def shown_names(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def read_csv(text: str, separator: str = ",") -> list[dict[str | None, Any]]:
    """Return a row per line, as `write_csv` or a spreadsheet wrote them; csv.Error if it is none.

    The cells that the header does not name are under None.
    """
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    header = [unmarked(name) for name in next(lines, [])]
    return [_row(header, cells) for cells in lines if cells]


def marked(value: Any) -> Any:
    """The value, marked as text if a spreadsheet would run it as a formula."""
    is_text = isinstance(value, str) and not _NUMBER.fullmatch(value)
    return _UNMARKED.sub("'", value) if is_text else value


def unmarked(cell: str) -> str:
    """The text that `marked` got."""
    return _MARKED.sub("", cell)


def _row(header: Sequence[str], cells: Sequence[str]) -> dict[str | None, Any]:
    row: dict[str | None, Any] = dict.fromkeys(header)
    row.update(zip(header, map(unmarked, cells), strict=False))
    if len(cells) > len(header):
        row[None] = cells[len(header) :]
    return row
