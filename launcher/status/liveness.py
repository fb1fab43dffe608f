"""Signs a run leaves while it goes: who holds its locks, its ranks' heartbeats, its measurements."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import statistics
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECENT_INTERVALS = 5  # the speed told is the median of these
_LAST_LINES = (
    20  # where a loss is looked for: the very last may be cut short, or of a step without one
)


@dataclass(frozen=True, kw_only=True)
class Beat:
    """A rank's last sign of life: RUN/heartbeats/rank-00003.json."""

    time: float  # when the rank last got somewhere, seconds since 1970
    step: int
    phase: str
    host: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class Lock:
    """The last process that took one of the run's locks."""

    pid: int
    host: str
    since: float
    is_held: bool | None  # None where only its own host could tell


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What metrics.jsonl says in all."""

    step: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds: float = 0.0  # in the steps that count


def read_beats(directory: Path) -> list[Beat]:
    """The ranks' heartbeats in rank order; one that is being replaced or is not ours is passed over."""
    beats = []
    for path in sorted(directory.glob("rank-*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            beats.append(Beat(**json.loads(path.read_text())))
    return beats


def is_alive(beat: Beat) -> bool | None:
    """Whether the rank's process is there; None where only its own host could tell."""
    return Path(f"/proc/{beat.pid}").exists() if beat.host == socket.gethostname() else None


def read_lock(path: Path) -> Lock | None:
    """Who took the lock file last, and whether it is still held; None if nobody ever did.

    Asks the kernel's table instead of trying the lock: a run that starts at that moment would find it taken.
    """
    try:
        owner, status = re.match(r"process (\d+) .* on (\S+)", path.read_text()), path.stat()
    except FileNotFoundError:
        return None
    if not owner:  # it is being taken now
        return None
    held = None
    if owner[2] == socket.gethostname():
        entry = re.compile(rf"FLOCK +ADVISORY +WRITE +{owner[1]} \S+:{status.st_ino} ")
        held = entry.search(Path("/proc/locks").read_text()) is not None
    return Lock(pid=int(owner[1]), host=owner[2], since=status.st_mtime, is_held=held)


def read_measured(metrics: Path) -> Measured:
    """Sums over a file that may have a million lines: only those that end an interval are parsed, and the last."""
    seconds, speeds = 0.0, deque[float](maxlen=RECENT_INTERVALS)
    trained: deque[bytes] = deque(maxlen=_LAST_LINES)
    with contextlib.suppress(FileNotFoundError), open(metrics, "rb") as file:
        for line in file:
            if b'"kind": "train"' not in line:
                continue
            trained.append(line)
            if b'"tokens_per_second"' in line and (interval := _parsed(line)):
                seconds += interval["seconds"]
                speeds.append(interval["tokens_per_second"])
    newest_first = [found for line in reversed(trained) if (found := _parsed(line))]
    return Measured(
        step=newest_first[0]["step"] if newest_first else 0,
        loss=next((line["loss"] for line in newest_first if line["loss"] is not None), None),
        tokens_per_second=statistics.median(speeds) if speeds else None,
        seconds=seconds,
    )


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except ValueError:
        return None
