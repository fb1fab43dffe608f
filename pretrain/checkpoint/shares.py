"""Who hashes what of a checkpoint: every byte once over the ranks, and rank 0 shows how far it is.

Torch-free.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pretrain.checkpoint.directory import rank_file
from pretrain.terminal.text import counted

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 10.0


class Part(NamedTuple):
    """What one rank has written of a file: the bytes from `start` on. `engine_rank`: of pieces."""

    name: str
    start: int
    bytes: int
    sha256: str
    engine_rank: int | None = None


def parts_in(index: Mapping[str, Any]) -> list[Part]:
    """Return all parts that an index lists, those of each rank together; IndexError or KeyError
    if a rank has none."""
    found = []
    ends: dict[str, tuple[int, int]] = {}
    for rank, report in enumerate(index["ranks"]):
        for kind, name in ("engine", rank_file("engine", rank)), ("state", report["state"]):
            number, start = ends.get(name, (0, 0))
            part = index["files"][name][number]
            engine_rank = rank if kind == "engine" else None
            found.append(Part(name, start, part["bytes"], part["sha256"], engine_rank))
            ends[name] = (number + 1, start + part["bytes"])
    return found


def share_of_rank(parts: Sequence[Part], rank: int, world_size: int) -> list[Part]:
    """Return the parts that a rank hashes: those of consecutive ranks, of equal bytes.

    With as many ranks as saved it, a rank hashes about what it will read, so that its node has that
    in memory by then. A part is hashed by one rank: with more ranks than parts, some have nothing.
    """
    total = sum(part.bytes for part in parts) or 1
    share, before = [], 0
    for part in parts:
        middle = min(before + part.bytes / 2, total - 0.5)
        if int(middle * world_size / total) == rank:
            share.append(part)
        before += part.bytes
    return share


class Progress:
    """How much of a rank's share is hashed; a line at most every few seconds if it `is_shown`.

    The rank hashes `own_bytes` of the checkpoint's `num_bytes`.
    """

    def __init__(
        self, step: int, num_bytes: int, world_size: int, own_bytes: int, is_shown: bool
    ) -> None:
        self._what = f"{num_bytes / 2**30:,.1f} GiB by {counted(world_size, 'rank')}"
        self._step, self._is_shown = step, is_shown
        self._own_bytes, self._done = own_bytes, 0
        self._started = self._shown = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Note that so many bytes more are hashed."""
        self._done += num_bytes
        now = time.monotonic()
        if not self._is_shown or now < self._shown + SECONDS_BETWEEN_LINES:
            return
        self._shown = now
        part = self._done / max(self._own_bytes, self._done)
        left = (now - self._started) * (1 - part) / part
        what = "verifying step %d: %.0f%% of %s, about %.0f s left"
        logger.info(what, self._step, 100 * part, self._what, left)
