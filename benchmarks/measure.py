"""What all benchmarks share: work timed in turns, measurements with goals, one report."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from foundation.errors import UserError

TOLERANCE = 0.15  # fraction by which a goal may be missed: machines and their load differ


@dataclass(frozen=True)
class Measurement:
    """One row of the report: a value for each round, and the goal for their median."""

    name: str
    values: Sequence[float]
    unit: str = "x"
    at_least: float | None = None
    at_most: float | None = None
    tolerance: float = TOLERANCE
    detail: str = ""

    def __str__(self) -> str:
        goal = f" (goal: {self.goal})" if self.goal else ""
        return f"{self.name}: {self._shown(self.median)}{goal}"

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def goal(self) -> str:
        """Return the goal as text, "" if there is none."""
        bounds = {"at least": self.at_least, "at most": self.at_most}
        return ", ".join(f"{word} {self._shown(b)}" for word, b in bounds.items() if b is not None)

    @property
    def passes(self) -> bool:
        """Whether the median reaches the goal, or misses it by no more than the tolerance."""
        return self._reaches_goal(self.tolerance)

    @property
    def result(self) -> str:
        if not self.goal:
            return ""
        if self._reaches_goal(tolerance=0.0):
            return "ok"
        return "close" if self.passes else "MISSED"

    def row(self) -> list[str]:
        """Return the cells of this measurement's row in the report."""
        ends = map(_digits, (min(self.values), max(self.values)))
        spread = " to ".join(ends) if len(self.values) > 1 else ""
        return [self.name, self._shown(self.median), spread, self.goal, self.result, self.detail]

    def _reaches_goal(self, tolerance: float) -> bool:
        # A NaN compares as false, so it fails.
        enough = self.at_least is None or self.median >= (1 - tolerance) * self.at_least
        return enough and (self.at_most is None or self.median <= (1 + tolerance) * self.at_most)

    def _shown(self, value: float) -> str:
        return _digits(value) + (self.unit if self.unit in ("", "x") else f" {self.unit}")


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def in_turns(cases: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return what each case measured in each round.

    One more round comes first and does not count: it fills caches and memories. The order of the
    cases alternates, so that no case always runs after the same other one.
    """
    measured: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for number in range(rounds + 1):
        for name in names[::-1] if number % 2 else names:
            value = cases[name]()
            if number:
                measured[name].append(value)
    return measured


def timed(
    work: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> Callable[[], float]:
    """Return a function that does the work and returns the seconds that it took."""

    def seconds() -> float:
        start = clock()
        work()
        return clock() - start

    return seconds


@dataclass(frozen=True)
class Section:
    """A benchmark of one or more measurements; it may write into the empty directory it gets."""

    name: str
    measure: Callable[[Path], Iterable[Measurement]]


@dataclass(frozen=True)
class Comparison:
    """A benchmark in which `candidate` should be `goal` times as fast as `baseline`.

    Each call does the whole work once and returns the seconds that count.
    """

    name: str
    goal: float
    baseline: Callable[[], float]
    candidate: Callable[[], float]
    rounds: int
    floor_seconds: float = 0.0  # least time of the candidate's matrix products; 0: not known
    candidate_work: float = 1.0  # work of one call of the candidate, relative to the baseline's

    def measure(self, _: Path | None = None) -> list[Measurement]:
        """Return one measurement: how many times as fast the candidate was in each round."""
        seconds = in_turns({"baseline": self.baseline, "ours": self.candidate}, self.rounds)
        pairs = zip(seconds["baseline"], seconds["ours"], strict=True)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        if self.floor_seconds:
            medians["floor"] = self.floor_seconds
        detail = ", ".join(f"{name} {1e3 * value:,.1f} ms" for name, value in medians.items())
        ratios = [self.candidate_work * baseline / ours for baseline, ours in pairs]
        return [Measurement(self.name, ratios, at_least=self.goal, detail=detail)]


Benchmark = Section | Comparison


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that all benchmarks share."""
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="run only benchmarks whose name contains TEXT"
    )
    parser.add_argument(
        "--append", type=Path, metavar="FILE", help="append the report to this Markdown file"
    )


def run_benchmarks(
    arguments: argparse.Namespace, heading: str, benchmarks: Sequence[Benchmark], notes: str = ""
) -> int:
    """Report the selected benchmarks; return 0 if every goal is reached within its tolerance."""
    selected = [each for each in benchmarks if arguments.only in each.name]
    if not selected:
        names = "; ".join(each.name for each in benchmarks)
        raise UserError(
            f"--only {arguments.only}: no benchmark has this in its name; there are: {names}"
        )
    print(heading, file=sys.stderr, flush=True)
    measurements: list[Measurement] = []
    for benchmark in selected:
        with tempfile.TemporaryDirectory(prefix="bench-") as directory:
            for measurement in benchmark.measure(Path(directory)):
                print(measurement, file=sys.stderr, flush=True)
                measurements.append(measurement)
    report = "\n\n".join(filter(None, [f"{heading}.", report_table(measurements), notes]))
    print(report, flush=True)
    if arguments.append is not None:
        with arguments.append.open("a") as file:
            file.write(f"\n## {datetime.date.today().isoformat()}\n\n{report}\n")
    return 0 if all(each.passes for each in measurements) else 1


def report_table(measurements: Iterable[Measurement]) -> str:
    """Return the measurements as a Markdown table."""
    header = ["measurement", "median", "range", "goal", "result", "details"]
    return markdown_table([header, *(each.row() for each in measurements)])


def machine(threads: int) -> str:
    """Return what the numbers are measured on, in one line without a hostname."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{_processor()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB; threads: {threads}; "
        f"Python {platform.python_version()}, torch {version('torch')}"
    )


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, heads first, as a Markdown table that is also aligned as plain text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
