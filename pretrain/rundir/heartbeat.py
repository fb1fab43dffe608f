"""Heartbeats of ranks: step and phase, and the Python stacks when a step takes too long.

A rank writes its record (`heartbeat_files.py`) at most once a second and at least every 5 seconds,
and removes it when it exits cleanly. A killed rank leaves it behind; `pid` tells whether the rank
lives.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from data_pipeline.errors import DataError, UserError, os_error_text
from pretrain.rundir.heartbeat_files import NODE_SECONDS, HeartbeatRecord, NodeHeartbeats
from pretrain.rundir.watchdog import STACKS_SIGNAL, Watchdog

logger = logging.getLogger(__name__)

Phase = Literal["start", "train", "evaluate", "save", "wait"]

WRITE_SECONDS = 1.0
REWRITE_SECONDS = 5.0  # without a beat: the host's own clock says for how long there was none
# After which the file of a node that runs has changed.
SECOND_LOOK_SECONDS = NODE_SECONDS + WRITE_SECONDS + 1.0


class Heartbeat:
    """Use as a context manager.

    While it is open, SIGQUIT writes every thread's Python stack to stderr and the process
    continues. After `watchdog_timeout_seconds` without a beat, in which the process was not
    suspended, the stacks are also written, `last_words` is called in another thread, and SIGALRM
    ends it. 0: no timeout.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        watchdog_timeout_seconds: float,
        last_words: Callable[[], object] = lambda: None,
        local_rank: int = 0,
    ) -> None:
        self._rank = rank
        self._node = NodeHeartbeats(directory, rank - local_rank)
        self._watchdog_timeout_seconds = watchdog_timeout_seconds
        self._last_words = last_words
        self._watchdog: Watchdog | None = None
        self._beat: tuple[float, int, Phase] = (time.time(), 0, "start")
        self._closing = threading.Event()
        self._writer = threading.Thread(target=self._write_beats, name="heartbeat", daemon=True)

    def beat(self, step: int, phase: Phase) -> None:
        """Report that `step` updates are done and what comes next.

        Cheap: another thread writes the file.
        """
        self._beat = (time.time(), step, phase)

    def repeat(self) -> None:
        """Report that the rank waits for storage to work again: it does not hang."""
        self._beat = (time.time(), self._beat[1], "wait")

    def __enter__(self) -> Heartbeat:
        try:
            self._node.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{self._node.path.parent}: cannot be created ({error.strerror}); "
                "make the run directory writable"
            ) from None
        faulthandler.register(STACKS_SIGNAL, file=sys.__stderr__ or sys.stderr, all_threads=True)
        if self._watchdog_timeout_seconds:
            self._watchdog = Watchdog(self._watchdog_timeout_seconds, self._end)
        self._writer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.set()
        self._writer.join()
        if self._watchdog is not None:
            self._watchdog.close()
        faulthandler.unregister(STACKS_SIGNAL)
        self._node.remove(self._rank)

    def _end(self) -> None:
        """Write what others need to know when this rank is gone."""
        try:
            self._last_words()
        finally:
            with contextlib.suppress(OSError, DataError):
                self._node.publish()

    def _write_beats(self) -> None:
        known, written, failed = None, 0.0, False
        must_publish = not self._node.path.exists()
        while True:
            beat = self._beat
            if beat != known and self._watchdog is not None:
                self._watchdog.feed()
            try:
                if beat != known or time.monotonic() - written >= REWRITE_SECONDS:
                    known, written = beat, time.monotonic()
                    self._node.write(self._record(*beat))
                if must_publish or self._node.is_due():
                    must_publish = False
                    self._node.publish()
                    failed = False
            except (OSError, DataError) as error:
                # A full disk must not end a rank that still trains.
                if not failed:
                    text = os_error_text(error) if isinstance(error, OSError) else str(error)
                    logger.warning("heartbeat not written: %s", text)
                failed = True
            if self._closing.wait(WRITE_SECONDS):
                return

    def _record(self, when: float, step: int, phase: Phase) -> HeartbeatRecord:
        return HeartbeatRecord(
            rank=self._rank,
            time=when,
            written=time.time(),
            step=step,
            phase=phase,
            hostname=socket.gethostname(),
            pid=os.getpid(),
        )
