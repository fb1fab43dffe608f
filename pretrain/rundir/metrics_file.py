"""RUN/metrics.jsonl: the only reader of its lines; `pretrain/metrics/` writes them. Torch-free.

A line is damaged if it is not the measurement that a step or an evaluation writes: disks flip bits,
and people edit files. Damaged lines are skipped, and one warning has their numbers.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from data_pipeline.errors import DataError
from data_pipeline.files import atomic_write, lines_of, open_regular

logger = logging.getLogger(__name__)

_NUMBER = (int, float)
_NUMBER_OR_NULL = (int, float, type(None))  # null where a skipped step had none
_BLOCK_BYTES, _TAIL_BYTES = 1 << 16, 1 << 22  # how much is read from the end, at once and in all
# kind -> what every line of the kind has, and the types of it
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
# Every other field is a number, too, or has none; but these have one, in a smaller range.
_NEVER_NULL = ("seconds", "tokens_per_second", "time", "data_wait", "save_stall", "stall")
_LARGEST = {
    "step": 1e15,
    "tokens": 1e18,
    "tokens_per_second": 1e15,
    "time": 1e11,
    **dict.fromkeys(("seconds", "data_wait", "save_stall", "stall"), 1e12),
}
_RANGES = {name: (0.0, most) for name, most in _LARGEST.items()}
_ANY_NUMBER = (-1e50, 1e50)  # more than float32 holds, less than sums and charts overflow at
# NaN, which JSON does not have, is no measurement. One decoder for all lines: to make one takes
# longer than to use it.
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)


def measurement_of(line: bytes) -> dict[str, Any] | None:
    """What a line measured; None if it is damaged or not whole yet."""
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
    """Whether this can be the value of that field: JSON has numbers that no run measures."""
    if type(value) in (float, int, bool):
        least, most = _RANGES.get(name, _ANY_NUMBER)
        return least <= value <= most
    if name == "totals":
        return isinstance(value, dict) and all(
            _is_measured("seconds", each) for each in value.values()
        )
    return value is None and name not in _NEVER_NULL


def is_number(value: object) -> TypeGuard[float]:
    """Whether a measurement that a line may have is one."""
    return type(value) in _NUMBER


def latest_measurements(path: Path) -> Iterator[dict[str, Any]]:
    """Measurements, latest first, of the last few megabytes of a file that may have gigabytes."""
    with open_measurements(path) as file:
        start = file.seek(0, os.SEEK_END)
        end, rest = max(0, start - _TAIL_BYTES), b""
        while start > end:
            size = min(_BLOCK_BYTES, start - end)
            start -= size
            file.seek(start)
            rest, *lines = (file.read(size) + rest).split(b"\n")  # `rest` begins further ahead
            yield from filter(None, map(measurement_of, reversed(lines)))
        if start == 0 and (first := measurement_of(rest)):
            yield first


def open_measurements(path: Path) -> BinaryIO:
    """The file, or an empty one if there is none; DataError if it is no regular file."""
    try:
        return open_regular(path)
    except FileNotFoundError:
        return io.BytesIO()
    except ValueError as error:
        raise DataError(f"{path} cannot be read ({error}); remove it") from None


def is_longer_than_its_end(path: Path) -> bool:
    """Whether `latest_measurements` leaves out the file's first part."""
    return path.exists() and path.stat().st_size > _TAIL_BYTES


def has_evaluation(path: Path, step: int) -> bool:
    """Whether an evaluation after `step`, one of the latest, is in the file."""
    for line in latest_measurements(path):
        if line["step"] < step:
            return False
        if line["kind"] == "evaluation" and line["step"] == step:
            return True
    return False


def read_measurements(path: Path) -> list[dict[str, Any]]:
    """All measurements, oldest first."""
    return list(measurements_of(path))


def measurements_of(path: Path) -> Iterator[dict[str, Any]]:
    """The measurements, oldest first, one after the other; a line that a crash cut short is
    skipped, too."""
    damaged: list[int] = []
    for number, line in enumerate(lines_of(path), start=1):
        if found := measurement_of(line):
            yield found
        elif _is_damaged(line):
            damaged.append(number)
    _warn_of_damaged(path, damaged)


def cut_measurements_after(path: Path, step: int) -> int:
    """Remove every measurement after `step` and what is not a measurement; returns how many."""
    # A last line without its end belongs to a step that is repeated, however much of it is there.
    lines = [
        (line, measurement_of(line) if line.endswith(b"\n") else None) for line in lines_of(path)
    ]
    whole = [found is not None or not _is_damaged(line) for line, found in lines]
    _warn_of_damaged(path, [number for number, is_whole in enumerate(whole, 1) if not is_whole])
    kept = [(line, found["step"]) for line, found in lines if found and found["step"] <= step]
    last = kept[-1][1] if kept else 0
    if last < step:
        logger.warning("%s ends at step %d, expected %d; the rest is lost", path, last, step)
    if len(kept) < len(lines):
        with atomic_write(path) as file:
            file.writelines(line for line, _ in kept)
    return len(lines) - len(kept)


def _is_damaged(line: bytes) -> bool:
    """Of a line that is not a measurement: whether it is more than what a crash cut short."""
    return line.endswith(b"\n") and bool(line.strip())


def _warn_of_damaged(path: Path, numbers: Sequence[int]) -> None:
    if numbers:
        found = ", ".join(map(str, numbers))
        logger.warning("%s: skipped what is not a measurement in line %s", path, found)
