"""What steps find: a line per finding, written at once, and one line per step in results.jsonl."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from foundation.errors import DataError
from foundation.files import append_whole, lines_of, parse_json

RESULTS_NAME = "results.jsonl"
# "missed": it ran, and something it checks does not hold. "failed": it did not reach its end.
Status = Literal["ok", "missed", "failed", "timed out"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of results.jsonl."""

    step: str
    status: Status
    seconds: float
    device: str  # "cuda", or "cpu" in a dry run
    found: dict[str, dict[str, Any]] = field(default_factory=dict)  # by part of the step
    error: str = ""  # the last line of the log of a step that failed


class Report:
    """The findings of one step in progress; `path` has them even if the step is killed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, part: str, **values: Any) -> None:
        """Record a finding of the step."""
        line = json.dumps({"part": part, **_finite(values)}, default=str)
        with self._path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def check(self, part: str, passed: bool, **values: Any) -> None:
        """Record a finding that has to hold; the step is "missed" if one does not."""
        self.add(part, passed=bool(passed), **values)


def findings_in(path: Path) -> dict[str, dict[str, Any]]:
    """Return what a step has found so far, by part; a line cut short is left out."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        found[values.pop("part")] = values
    return found


def status_of(exit_status: int | None, found: dict[str, dict[str, Any]]) -> Status:
    """Return the status of a step by how its process ended, None: it was killed at its limit."""
    if exit_status is None:
        return "timed out"
    if exit_status:
        return "failed"
    return "ok" if all(values.get("passed", True) for values in found.values()) else "missed"


def append_result(out: Path, result: Result) -> None:
    """Add the line of a step, or nothing."""
    append_whole(out / RESULTS_NAME, (json.dumps(asdict(result)) + "\n").encode(), sync=True)


def results_in(out: Path, is_dry: bool = False) -> dict[str, Result]:
    """Return the latest result of each step that has one, of dry runs or of those on a GPU.

    DataError for a line that is no result: another one would be appended to a line cut short.
    """
    path, found = out / RESULTS_NAME, {}
    for number, line in enumerate(lines_of(path), start=1):
        try:
            result = Result(**parse_json(line))
        except (ValueError, TypeError):
            raise DataError(
                f"{path}: line {number} is damaged, expected the result of a step; remove the line "
                "and run the same command again"
            ) from None
        if (result.device == "cpu") == is_dry:
            found[result.step] = result
    return found


def _finite(value: Any) -> Any:
    """Return the value as JSON can hold it: NaN and infinity as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
