"""A run's measurements in a few numbers, from lines of metrics.jsonl one by one. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pretrain.rundir.latest_evaluation import latest_evaluation
from pretrain.rundir.metrics_file import (
    is_longer_than_its_end,
    is_number,
    latest_measurements,
)
from pretrain.rundir.speeds import RECENT_INTERVALS, recent_speed


@dataclass(frozen=True, kw_only=True)
class MetricsSummary:
    """What the measurements say in all; `losses` says what each loss is."""

    step: int = 0
    train_loss: float | None = None
    evaluation: Mapping[str, Any] | None = None  # the line of the latest one
    recent_tokens_per_second: float | None = None  # `speeds`
    seconds: float = 0.0  # in steps that count, without stalls
    data_seconds: float = 0.0  # of those, the seconds in which ranks waited for data
    evaluation_seconds: float = 0.0
    save_seconds: float = 0.0  # in which the loop waited for saves
    stall_seconds: float = 0.0
    time: float | None = None  # when the last interval ended


@dataclass(kw_only=True)
class TimeSums:
    """The sums of a summary. The last line of an interval has those of the run until then, as
    "totals"."""

    seconds: float = 0.0
    data_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    save_seconds: float = 0.0
    stall_seconds: float = 0.0

    def add(self, line: Mapping[str, Any]) -> None:
        """Count what a line has measured."""
        if line["kind"] == "evaluation":
            self.evaluation_seconds += line.get("seconds", 0.0)
        elif "tokens_per_second" in line:
            seconds = line.get("seconds", 0.0)
            self.seconds += seconds
            self.data_seconds += min(1.0, line.get("data_wait", 0.0)) * seconds
            self.save_seconds += line.get("save_stall", 0.0)
            self.stall_seconds += line.get("stall", 0.0)


def sums_of(summary: MetricsSummary) -> TimeSums:
    return TimeSums(**{each.name: getattr(summary, each.name) for each in fields(TimeSums)})


def summarize(measurements: Iterable[Mapping[str, Any]]) -> MetricsSummary:
    """Sum up measurements, oldest first; steps within intervals may be left out."""
    step, train_loss, evaluation, when = 0, None, None, None
    speeds, sums = deque[float](maxlen=RECENT_INTERVALS), TimeSums()
    for line in measurements:
        sums.add(line)
        if line["kind"] == "evaluation":
            evaluation = line
            continue
        step = line["step"]
        if "tokens_per_second" in line:
            speeds.append(line["tokens_per_second"])
            when = line.get("time", when)
            train_loss = train_loss if line.get("train_loss") is None else line["train_loss"]
    return MetricsSummary(
        step=step,
        train_loss=train_loss,
        evaluation=evaluation,
        recent_tokens_per_second=recent_speed(tuple(speeds)),
        **vars(sums),
        time=when,
    )


def summarize_file(path: Path) -> MetricsSummary:
    """Sum up a file that may have gigabytes, from its end."""
    latest_first: list[Mapping[str, Any]] = []
    num_intervals, has_loss = 0, False
    sums, is_whole = None, True
    for line in latest_measurements(path):
        if sums is None and (sums := _totals_in(line)):
            for later in reversed(latest_first):
                sums.add(later)
        latest_first.append(line)
        num_intervals += "tokens_per_second" in line
        has_loss = has_loss or line.get("train_loss") is not None
        if sums is not None and has_loss and num_intervals >= RECENT_INTERVALS:
            is_whole = False
            break
    summary = summarize(reversed(latest_first))
    if is_whole and not is_longer_than_its_end(path):
        return summary
    summary = replace(summary, **vars(sums or TimeSums()))
    if summary.evaluation is None and summary.evaluation_seconds:
        summary = replace(summary, evaluation=latest_evaluation(path, summary.evaluation_seconds))
    return summary


def _totals_in(line: Mapping[str, Any]) -> TimeSums | None:
    totals = line.get("totals")
    if not isinstance(totals, dict) or not totals:
        return None
    known = {each.name for each in fields(TimeSums)}
    is_usable = known >= totals.keys() and all(map(is_number, totals.values()))
    return TimeSums(**totals) if is_usable else None
