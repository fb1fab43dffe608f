"""Metrics of lm-eval's tasks in the line of an evaluation: `tasks/TASK/METRIC`. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

_TASKS = "tasks/"
_NO_FILTER = "none"


def task_values(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the fields of tasks from the harness's results; None for NaN and inf."""
    found: dict[str, float | None] = {}
    for task, metrics in results.items():
        for key, value in metrics.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            name = metric if chosen == _NO_FILTER else f"{metric}/{chosen}"
            found[f"{_TASKS}{task}/{name}"] = float(value) if math.isfinite(value) else None
    return found


def task_metrics(evaluation: Mapping[str, Any] | None) -> dict[str, float]:
    """Return "TASK METRIC" -> value from the line of an evaluation."""
    return {
        " ".join(name.removeprefix(_TASKS).rsplit("/", 1)): value
        for name, value in (evaluation or {}).items()
        if name.startswith(_TASKS) and value is not None
    }


def task_columns(evaluation: Mapping[str, Any] | None) -> dict[str, float]:
    """Return `tasks/TASK/METRIC` -> value from the line of an evaluation."""
    return {
        name: value
        for name, value in (evaluation or {}).items()
        if name.startswith(_TASKS) and value is not None
    }


def latest_with_tasks(evaluations: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the latest line with metrics of tasks, which not every evaluation has."""
    return next((line for line in reversed(list(evaluations)) if task_metrics(line)), None)
