"""Batches read in advance, in one thread.

Each batch carries its own lane cursor, so prefetched batches do not affect a checkpoint.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
CLOSE_SECONDS = 2.0  # longest wait for the thread to end


class Prefetcher(Generic[T]):
    """The items of `stream` in their order, up to `depth` of them read in advance.

    An error of the stream is raised by the call that would have returned the item. `wait_seconds`
    is the total time that callers have waited.
    """

    def __init__(self, stream: Iterable[T], depth: int = 2) -> None:
        self.wait_seconds = 0.0
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(max(depth, 1))
        self._stop = threading.Event()
        self._ended: BaseException | None = None
        self._thread = threading.Thread(
            target=self._read, args=(iter(stream),), name="prefetch", daemon=True
        )
        self._thread.start()

    def _read(self, stream: Iterator[T]) -> None:
        while not self._stop.is_set():
            try:
                outcome: tuple[T | None, BaseException | None] = (next(stream), None)
            except BaseException as error:  # raised again in __next__
                outcome = (None, error)
            self._put(outcome)
            if outcome[1] is not None:
                return

    def _put(self, outcome: tuple[T | None, BaseException | None]) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(outcome, timeout=0.1)  # so that close() is noticed
                break
            except queue.Full:
                continue

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._ended is not None:
            raise self._ended
        started = time.perf_counter()
        item, error = self._ready.get()
        self.wait_seconds += time.perf_counter() - started
        if error is not None:
            self._ended = error
            raise error
        return item  # type: ignore[return-value]  (None only with an error)

    def close(self) -> None:
        """Stop reading; `next` then raises StopIteration.

        A thread that is blocked by a slow store is not waited for: it ends later, or with the
        process.
        """
        self._stop.set()
        self._thread.join(CLOSE_SECONDS)
        self._ended = self._ended or StopIteration()

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
