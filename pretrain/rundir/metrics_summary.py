"""A run's measurements in a few numbers, from lines of metrics.jsonl one by one. Torch-free."""

from __future__ import annotations

import contextlib
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.rundir.metrics_file import measurement_of

RECENT_INTERVALS = 5  # the speed is their median
# The very last line may be cut short.
_LAST_LINES = 20


@dataclass(frozen=True, kw_only=True)
class MetricsSummary:
    """What the measurements say in all; `losses` says what each loss is."""

    step: int = 0
    train_loss: float | None = None
    evaluation: Mapping[str, Any] | None = None  # the line of the latest one
    tokens_per_second: float | None = None
    seconds: float = 0.0  # in steps that count, without stalls
    data_seconds: float = 0.0  # of those, the seconds in which ranks waited for data
    evaluation_seconds: float = 0.0
    save_seconds: float = 0.0  # in which the loop waited for saves
    stall_seconds: float = 0.0


def summarize(measurements: Iterable[Mapping[str, Any]]) -> MetricsSummary:
    """Sum up measurements, oldest first; steps within intervals may be left out."""
    step, train_loss, evaluation = 0, None, None
    speeds = deque[float](maxlen=RECENT_INTERVALS)
    trained = waited = evaluated = saved = stalled = 0.0
    for line in measurements:
        if line["kind"] == "evaluation":
            evaluation = line
            evaluated += line.get("seconds", 0.0)
            continue
        step = line["step"]
        if "tokens_per_second" not in line:
            continue
        seconds = line.get("seconds", 0.0)
        speeds.append(line["tokens_per_second"])
        train_loss = train_loss if line.get("train_loss") is None else line["train_loss"]
        trained += seconds
        waited += min(1.0, line.get("data_wait", 0.0)) * seconds
        saved += line.get("save_stall", 0.0)
        stalled += line.get("stall", 0.0)
    return MetricsSummary(
        step=step,
        train_loss=train_loss,
        evaluation=evaluation,
        tokens_per_second=statistics.median(speeds) if speeds else None,
        seconds=trained,
        data_seconds=waited,
        evaluation_seconds=evaluated,
        save_seconds=saved,
        stall_seconds=stalled,
    )


def summarize_file(path: Path) -> MetricsSummary:
    """Sum up a file that may have a million lines.

    Parses only evaluations, the ends of intervals and the last lines.
    """
    return summarize(_telling(path))


def _telling(path: Path) -> Iterable[Mapping[str, Any]]:
    latest: deque[bytes] = deque(maxlen=_LAST_LINES)
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            if b'"tokens_per_second"' in line or b'"evaluation"' in line:
                if found := measurement_of(line):
                    latest.clear()
                    yield found
            else:
                latest.append(line)
    # Of an interval that is not whole, or whose end is damaged.
    yield from (found for line in latest if (found := measurement_of(line)))
