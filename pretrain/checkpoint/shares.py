"""Who hashes what of a checkpoint: every byte once over the ranks, and rank 0 shows how far it is.

Torch-free.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from pretrain.terminal.text import counted

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 10.0


def share_of_rank(files: Mapping[str, Any], rank: int, world_size: int) -> list[str]:
    """Return the files of the index that a rank hashes: consecutive ranks' files, of equal bytes.

    With as many ranks as saved it, a rank hashes about what it will read, so that its node has that
    in memory by then. A file is hashed by one rank: with more ranks than files, some have nothing.
    """
    total = sum(entry["bytes"] for entry in files.values()) or 1
    share, before = [], 0
    for name in sorted(files, key=lambda name: (name.partition("-")[2].partition(".")[0], name)):
        size = files[name]["bytes"]
        middle = min(before + size / 2, total - 0.5)
        if int(middle * world_size / total) == rank:
            share.append(name)
        before += size
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
