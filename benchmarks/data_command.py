"""`python -m benchmarks data`: costs of the data pipeline, each held against a goal."""

from __future__ import annotations

import argparse
import datetime
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.data_measure import Row, table

SECTIONS = ("reading", "scale", "storage", "encoding")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    command.add_argument("--only", choices=SECTIONS, help="this part alone")
    command.add_argument("--append", type=Path, metavar="FILE", help="add the table to this file")


def run(options: argparse.Namespace) -> int:
    """0 if every cost is within its goal or 15 % above it, else 1."""
    rows = []
    for section in SECTIONS:
        if options.only in (None, section):
            with tempfile.TemporaryDirectory() as directory:
                rows += _measure_of(section)(Path(directory))
    report = table(rows)
    print(report)
    if options.append is not None:
        with options.append.open("a") as file:
            file.write(f"\n## {datetime.date.today().isoformat()}\n\n{report}\n")
    return 0 if all(row.passes for row in rows) else 1


def _measure_of(section: str) -> Callable[[Path], list[Row]]:
    if section == "reading":
        from benchmarks.data_reading import ReadingSize, reading_rows

        return lambda directory: reading_rows(directory, ReadingSize())
    if section == "scale":
        from benchmarks.data_scale import ScaleSize, scale_rows

        return lambda directory: scale_rows(directory, ScaleSize())
    if section == "storage":
        from benchmarks.data_storage import StorageSize, storage_rows

        return lambda directory: storage_rows(directory, StorageSize())
    from benchmarks.data_encoding import EncodingSize, encoding_rows

    return lambda directory: encoding_rows(directory, EncodingSize())
