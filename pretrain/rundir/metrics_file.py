"""RUN/metrics.jsonl: the only reader of its lines; `pretrain/metrics/` writes them. Torch-free.

A line is damaged if it is not the measurement that a step or an evaluation writes: disks flip bits,
and people edit files. Damaged lines are skipped, and one warning has their numbers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_pipeline.files import atomic_write

logger = logging.getLogger(__name__)

_NUMBER = (int, float)
_NUMBER_OR_NULL = (int, float, type(None))  # null where a skipped step had none
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
# Of what only some lines have, what is summed up or shown.
_OPTIONAL = {
    **dict.fromkeys(("tokens_per_second", "seconds", "data_wait", "save_stall", "stall"), _NUMBER),
    **dict.fromkeys(("train_loss", "bits_per_byte", "loss_without_memory"), _NUMBER_OR_NULL),
}


def measurement_of(line: bytes) -> dict[str, Any] | None:
    """What a line measured; None if it is damaged or not whole yet."""
    try:
        tree = json.loads(line)
    except (ValueError, RecursionError):  # also text that is not UTF-8, or nested deeply
        return None
    kind = tree.get("kind") if isinstance(tree, dict) else None
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None or any(type(tree.get(name, ...)) not in fields[name] for name in fields):
        return None
    if any(type(tree[name]) not in _OPTIONAL[name] for name in _OPTIONAL.keys() & tree.keys()):
        return None
    return tree


def read_measurements(path: Path) -> list[dict[str, Any]]:
    """All measurements, oldest first; a line that a crash cut short is skipped, too."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    measured = [measurement_of(line) for line in lines]
    _warn_of_damaged(path, lines, measured)
    return [each for each in measured if each is not None]


def cut_measurements_after(path: Path, step: int) -> int:
    """Remove every measurement after `step` and what is not a measurement; returns how many."""
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    # A last line without its end belongs to a step that is repeated, however much of it is there.
    measured = [measurement_of(line) if line.endswith(b"\n") else None for line in lines]
    _warn_of_damaged(path, lines, measured)
    kept = [
        line
        for line, found in zip(lines, measured, strict=True)
        if found is not None and found["step"] <= step
    ]
    if len(kept) < len(lines):
        with atomic_write(path) as file:
            file.writelines(kept)
    return len(lines) - len(kept)


def _warn_of_damaged(
    path: Path, lines: Sequence[bytes], measured: Sequence[dict[str, Any] | None]
) -> None:
    damaged = [
        str(number)
        for number, (line, found) in enumerate(zip(lines, measured, strict=True), 1)
        if found is None and line.endswith(b"\n") and line.strip()
    ]
    if damaged:
        logger.warning("%s: skipped what is not a measurement in line %s", path, ", ".join(damaged))
