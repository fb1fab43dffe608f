"""Finds the latest evaluation in a metrics.jsonl that may have gigabytes. Torch-free.

The totals that every interval's line has count the seconds of all evaluations until then. They only
grow, so a binary search finds the two intervals between which the latest one is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from data_pipeline.files import LARGEST_LINE_BYTES
from pretrain.rundir.metrics_file import is_number, measurement_of, open_measurements

_NEAR_BYTES = 1 << 14  # which are read rather than searched
_ROUNDING = 2e-6  # of totals
_MOST_DAMAGED = 100  # evaluations in a row that are skipped


def latest_evaluation(path: Path, seconds: float) -> dict[str, Any] | None:
    """The latest evaluation, where all of them together took `seconds`.

    A damaged one is skipped. None if there is none, or no line has totals.
    """
    with open_measurements(path) as file:
        end = file.seek(0, os.SEEK_END)
        for _ in range(_MOST_DAMAGED):
            start, before, end = _window(file, end, seconds)
            evaluations = [
                line
                for line, _ in _lines_with(file, b'"evaluation"', start, end)
                if line["kind"] == "evaluation"
            ]
            if evaluations:
                return evaluations[-1]
            if before <= 0:
                return None
            end, seconds = start, before
    return None


def _window(file: BinaryIO, end: int, seconds: float) -> tuple[int, float, int]:
    """The end of the last interval whose total is below `seconds`, that total, and the end of the
    next interval, of those before `end`."""
    start, before, right = 0, 0.0, end
    while right - start > _NEAR_BYTES:
        middle = (start + right) // 2
        found = next(_totals(file, middle, end), None)
        if found is None:
            right = middle  # a long interval: its line is not in this half
        elif found[0] < seconds - _ROUNDING:
            before, start = found
        else:
            right, end = middle, found[1]
    for total, place in _totals(file, start, end):
        if total < seconds - _ROUNDING:
            before, start = total, place
    return start, before, end


def _totals(file: BinaryIO, start: int, end: int) -> Iterator[tuple[float, int]]:
    """Seconds of evaluations until each interval of this part, and where its line ends."""
    for line, place in _lines_with(file, b'"totals"', start, end):
        totals = line.get("totals")
        if isinstance(totals, dict) and is_number(total := totals.get("evaluation_seconds")):
            yield total, place


def _lines_with(
    file: BinaryIO, text: bytes, start: int, end: int
) -> Iterator[tuple[dict[str, Any], int]]:
    """The measurements that contain `text` and begin in this part, and where each line ends."""
    # From one byte before: a line that begins exactly at the start is whole.
    place = file.seek(max(0, start - 1))
    if start:
        place += len(file.readline(LARGEST_LINE_BYTES))
    while place < end and (content := file.readline(LARGEST_LINE_BYTES)):
        if len(content) == LARGEST_LINE_BYTES:
            return  # no line of a run: what follows is not searched
        place += len(content)
        if text in content and (line := measurement_of(content)):
            yield line, place
