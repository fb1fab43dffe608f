"""`python -m benchmarks scale`: what grows with the number of ranks, on a few simulated ones.

Every row is real code at three or four sizes, the growth law that fits them, and its value at 64,
512 and 4,096 ranks. Counts of files, opens and bytes, and CPU seconds, are the same on a busy
machine; elapsed seconds are not.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import machine
from benchmarks.scale.attempts import attempt_costs
from benchmarks.scale.checkpoints import checkpoint_costs
from benchmarks.scale.costs import Cost, Subject, table_of
from benchmarks.scale.failure_table import failure_table, hour_of_kills
from benchmarks.scale.processes import process_costs
from benchmarks.scale.status import status_costs
from foundation.errors import UserError
from foundation.files import write_text

SUBJECTS = (
    Subject("processes", process_costs),
    Subject("status", status_costs),
    Subject("attempts", attempt_costs),
    Subject("checkpoints", checkpoint_costs),
)
START, END = "<!-- python -m benchmarks scale -->\n", "<!-- end -->\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="measure only subjects whose name contains TEXT"
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="replace the tables of this page (docs/scale.md)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and report; return 0 if every goal is reached."""
    subjects = [each for each in SUBJECTS if arguments.only in each.name]
    with_failures = arguments.only in "failures"
    if not subjects and not with_failures:
        names = ", ".join([*(each.name for each in SUBJECTS), "failures"])
        raise UserError(f"--only {arguments.only}: found no such subject, expected one of {names}")
    if arguments.page is not None:
        tables_of(arguments.page)  # UserError before the work
    rows: list[Cost] = []
    for subject in subjects:
        print(subject.name, file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="scale-") as directory:
            rows += subject.measure(Path(directory))
    parts = [f"{datetime.date.today().isoformat()}, {machine(threads=1)}."]
    if rows:
        parts.append(table_of(rows))
    if with_failures:
        parts += ["## Failures", hour_of_kills(), failure_table()]
    report = "\n\n".join(parts)
    print(report)
    if arguments.page is not None:
        write_page(arguments.page, report)
    return 0 if all(row.is_met for row in rows) else 1


def tables_of(page: Path) -> re.Match[str]:
    """Return what is between the marks START and END of the page; UserError if they are missing."""
    marked = re.compile(re.escape(START) + ".*?" + re.escape(END), re.DOTALL)
    if not (found := marked.search(page.read_text())):
        raise UserError(f"{page}: found no line {START.strip()}, expected one before the tables")
    return found


def write_page(page: Path, report: str) -> None:
    """Replace what is between the marks START and END of the page."""
    found = tables_of(page)
    before, after = found.string[: found.start()], found.string[found.end() :]
    write_text(page, f"{before}{START}\n{report}\n\n{END}{after}")
