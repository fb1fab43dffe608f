"""Reading RUN/metrics.jsonl, and a run's measurements in a few numbers. Torch-free.

`pretrain/metrics/` writes the file. A line is damaged if it is not the measurement that a step or
an evaluation writes: disks flip bits, and people edit files. Damaged lines are skipped, and one
warning has their numbers.
"""

import json
import logging
import os
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from foundation.errors import DataError
from foundation.files import LARGEST_LINE_BYTES, atomic_write, lines_of, open_regular, warn_of_lines
from foundation.typed_values import json_text
from pretrain.rundir.evaluated_text import PARTS, is_parts
from pretrain.terminal.text import counted

logger = logging.getLogger(__name__)

_NUMBER = (int, float)
_NUMBER_OR_NULL = (int, float, type(None))  # null: a skipped step has no such number
_NO_JSON = (b"NaN", b"Infinity")
_BLOCK_BYTES, _TAIL_BYTES = 1 << 16, 1 << 22  # how much is read from the end, at once and in all
# kind -> the fields that every line of the kind has -> their types
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "train": {
        "step": (int,),
        "tokens": (int,),
        "loss": _NUMBER_OR_NULL,
        "learning_rate": _NUMBER,
        "grad_norm": _NUMBER_OR_NULL,
        "skipped": (bool,),
    },
    "evaluation": {"step": (int,), "loss": _NUMBER_OR_NULL},
}
# Every other field is a number or null. These are never null, and from 0 to the number here.
_LARGEST = {
    "step": 1e15,
    "tokens": 1e18,
    "tokens_per_second": 1e15,
    "time": 1e11,
    **dict.fromkeys(("seconds", "data_wait", "save_stall", "stall"), 1e12),
}
_ANY_NUMBER = (-1e50, 1e50)  # more than float32 holds, less than sums and charts overflow at
# JSON has no NaN, so it is read as null. There is one decoder for all lines, because to make one
# takes longer than to use it.
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)
RECENT_INTERVALS = 5  # the median of their speeds is the recent speed


def parse_measurement(line: bytes) -> dict[str, Any] | None:
    """Return what a line measured; None if it is damaged or not whole yet."""
    try:
        tree = _DECODER.decode(line.decode())
    except (ValueError, RecursionError):  # also text that is not UTF-8, or nested deeply
        return None
    kind = tree.get("kind") if isinstance(tree, dict) else None
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        return None
    for name, types in fields.items():  # plain loops: a file may have a million lines
        if type(tree.get(name, ...)) not in types:
            return None
    for name, value in tree.items():
        if name != "kind" and not _is_measured(name, value):
            return None
    return tree


def _is_measured(name: str, value: Any) -> bool:
    """Return whether a run can measure this value: JSON allows numbers that no run measures."""
    if name == "totals":
        return isinstance(value, dict) and all(
            _is_measured("seconds", seconds) for seconds in value.values()
        )
    if name in (PARTS, "attempt"):
        return is_parts(value) if name == PARTS else isinstance(value, str)
    if type(value) in (float, int, bool):
        least, most = (0.0, _LARGEST[name]) if name in _LARGEST else _ANY_NUMBER
        return least <= value <= most
    return value is None and name not in _LARGEST


def latest_measurements(
    path: Path, most: int = _TAIL_BYTES, containing: bytes = b""
) -> Iterator[dict[str, Any]]:
    """Yield measurements, latest first, from the last megabytes of a file that may have gigabytes.

    With `containing`, only from lines with these bytes. A line that is too long ends the search.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    except ValueError as error:
        raise DataError(f"{path} cannot be read ({error}); remove it") from None
    with file:
        start = file.seek(0, os.SEEK_END)
        end, rest = max(0, start - most), b""
        while start > end and len(rest) <= LARGEST_LINE_BYTES:
            size = min(_BLOCK_BYTES, start - end)
            start -= size
            file.seek(start)
            rest, *lines = (file.read(size) + rest).split(b"\n")  # `rest`: a line that began before
            matching = (line for line in reversed(lines) if containing in line)
            yield from filter(None, map(parse_measurement, matching))
        if start == 0 and containing in rest and (first := parse_measurement(rest)):
            yield first


def has_evaluation(path: Path, step: int) -> bool:
    """Return whether the end of the file has an evaluation after `step`, with a loss."""
    lines = takewhile(lambda line: line["step"] >= step, latest_measurements(path))
    evaluations = (line for line in lines if line["kind"] == "evaluation")
    return any(line["step"] == step and line["loss"] is not None for line in evaluations)


def read_measurements(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the measurements, oldest first."""
    return (measurement for _, measurement in _read(path) if measurement)


def cut_measurements_after(path: Path, step: int) -> int:
    """Remove every measurement after `step` and every damaged line; return how many lines.

    A resumed run makes these steps again, so in the end each is measured once.
    """
    lines = list(_read(path))
    kept = [(line, read) for line, read in lines if read and read["step"] <= step]
    last = kept[-1][1]["step"] if kept else 0
    if last < step:
        logger.warning("%s ends at step %d, expected %d; the rest is lost", path, last, step)
    # Older versions wrote NaN, which JSON does not have.
    texts = [
        f"{json_text(read)}\n".encode() if any(map(line.__contains__, _NO_JSON)) else line
        for line, read in kept
    ]
    if texts != [line for line, _ in lines]:
        with atomic_write(path) as file:
            file.writelines(texts)
    return len(lines) - len(kept)


def _read(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield each line with its measurement; at the end, warn of damaged lines by their numbers."""
    damaged: list[int] = []
    for number, line in enumerate(lines_of(path), start=1):
        # A last line without its line end belongs to a step that is repeated, so skip it.
        is_whole = line.endswith(b"\n")
        measurement = parse_measurement(line) if is_whole else None
        if measurement is None and is_whole and line.strip():
            damaged.append(number)
        yield line, measurement
    warn_of_lines(logger, path, "a measurement", *damaged)


@dataclass(kw_only=True)
class TimeSpent:
    """Seconds of a run, by what they went into; "totals" in the last line of an interval."""

    training: float = 0.0  # steps that count, without what follows
    waiting_for_data: float = 0.0
    evaluation: float = 0.0
    saving: float = 0.0  # waiting for saves; most of a save is written while training continues
    stalls: float = 0.0  # steps that took far longer than usual
    # All else: starts and stops, waiting after failures, steps made again, and what is not measured
    # yet, such as an evaluation in progress. Not known from measurements alone.
    restarts: float = 0.0

    def add(self, line: Mapping[str, Any]) -> None:
        """Count what a line has measured."""
        seconds = line.get("seconds", 0.0)
        if line["kind"] == "evaluation":
            self.evaluation += seconds
            self.stalls += line.get("stall", 0.0)
        elif "tokens_per_second" in line:
            waited = min(1.0, line.get("data_wait", 0.0)) * seconds
            self.training += seconds - waited
            self.waiting_for_data += waited
            self.saving += line.get("save_stall", 0.0)
            self.stalls += line.get("stall", 0.0)

    @property
    def steps(self) -> float:
        """The seconds of steps that count, without stalls."""
        return self.training + self.waiting_for_data

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    @property
    def goodput(self) -> float:
        """The fraction that went into training."""
        return self.training / self.total

    @property
    def description(self) -> str:
        """The parts that took any time, largest first."""
        parts = {name.replace("_", " "): value for name, value in vars(self).items()}
        shown = sorted(parts.items(), key=lambda part: -part[1])
        return ", ".join(
            f"{name} {value / self.total:.1%}" for name, value in shown if value / self.total > 5e-4
        )


def parse_totals(line: Mapping[str, Any]) -> TimeSpent | None:
    """Return the run's sums until this line; None if it has none, or has another version's."""
    totals = line.get("totals", {})
    known = totals and totals.keys() <= TimeSpent.__dataclass_fields__.keys()
    return TimeSpent(**totals) if known else None


@dataclass(kw_only=True)
class MetricsSummary:
    """A run's measurements in a few numbers; `metric_names` explains the losses and speeds."""

    step: int = 0
    train_loss: float | None = None
    evaluation: Mapping[str, Any] | None = None  # the line of the latest
    num_skipped_last: int = 0  # updates in a row up to the last one
    recent_tokens_per_second: float | None = None
    spent: TimeSpent = field(default_factory=TimeSpent)
    time: float = 0.0  # at the end of the last interval

    @property
    def failure(self) -> str:
        """Why the last measurements are no result of training; '' if they are one."""
        evaluation = self.evaluation or {}
        if evaluation.get("step") == self.step and evaluation.get("loss") is None:
            return f"its validation loss after step {self.step:,} is not finite"
        count = self.num_skipped_last
        return f"its last {counted(count, 'update')} had to be skipped" if count else ""


def summarize(measurements: Iterable[Mapping[str, Any]]) -> MetricsSummary:
    """Sum up measurements, oldest first; steps within intervals may be missing."""
    step, train_loss, evaluation, num_skipped = 0, None, None, 0
    speeds, spent, time = deque[float](maxlen=RECENT_INTERVALS), TimeSpent(), 0.0
    for line in measurements:
        spent.add(line)
        time = line.get("time", time)
        if line["kind"] == "evaluation":
            evaluation = line
            continue
        step = line["step"]
        num_skipped = num_skipped + 1 if line["skipped"] and not line.get("overflowed") else 0
        if "tokens_per_second" in line:
            speeds.append(line["tokens_per_second"])
            train_loss = train_loss if line.get("train_loss") is None else line["train_loss"]
    return MetricsSummary(
        step=step,
        train_loss=train_loss,
        evaluation=evaluation,
        num_skipped_last=num_skipped,
        recent_tokens_per_second=statistics.median(speeds) if speeds else None,
        spent=spent,
        time=time,
    )


def summarize_file(path: Path) -> MetricsSummary:
    """Sum up a file that may have gigabytes, from its end."""
    latest_first: list[Mapping[str, Any]] = []
    num_intervals, has_loss, spent = 0, False, None
    for line in latest_measurements(path):
        if spent is None and (spent := parse_totals(line)):
            for later in reversed(latest_first):
                spent.add(later)
        latest_first.append(line)
        num_intervals += "tokens_per_second" in line
        has_loss = has_loss or line.get("train_loss") is not None
        if spent is not None and has_loss and num_intervals >= RECENT_INTERVALS:
            break
    summary = summarize(reversed(latest_first))
    summary.spent = spent or summary.spent
    if summary.evaluation is None and summary.spent.evaluation:  # it is further from the end
        lines = latest_measurements(path, most=1 << 62, containing=b'"evaluation"')
        summary.evaluation = next((line for line in lines if line["kind"] == "evaluation"), None)
    return summary
