"""Shards fetched before they are needed, so that reading does not wait for the network."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable

from data_pipeline.corpora.manifest import ShardInfo

THREADS = 4


class ReadAhead:
    """Calls `fetch` for the shards asked for, in their order, some at a time.

    Failures are kept quiet: whoever needs the shard tries again and says what is wrong.
    """

    def __init__(self, fetch: Callable[[ShardInfo], None], num_threads: int = THREADS) -> None:
        self._fetch = fetch
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._waiting: deque[ShardInfo] = deque()
        self._pending: set[str] = set()  # asked for and not done
        self._running = 0

    def ask_for(self, shards: Iterable[ShardInfo]) -> None:
        """Return at once; shards already asked for are not asked for twice."""
        with self._lock:
            for info in shards:
                if info.sha256 in self._pending:
                    continue
                self._pending.add(info.sha256)
                self._waiting.append(info)
                if self._running < self._num_threads:
                    self._running += 1
                    threading.Thread(target=self._work, name="read-ahead", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running -= 1
                    return
                info = self._waiting.popleft()
            with contextlib.suppress(Exception):
                self._fetch(info)
            with self._lock:
                self._pending.discard(info.sha256)
