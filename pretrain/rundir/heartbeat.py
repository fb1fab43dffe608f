"""Heartbeats of ranks: a small file with step and phase, and the Python stacks when a step takes
too long.

    RUN/heartbeats/rank-00003.json    the fields of HeartbeatRecord, replaced at most once a second
                                      and at least every 5 seconds

The file is removed when a rank exits cleanly. A killed rank leaves it behind; `pid` tells whether
the rank lives.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from data_pipeline.errors import UserError, os_error_text
from data_pipeline.files import atomic_write, named_errors, read_json
from data_pipeline.typed_json import from_json
from pretrain.rundir.watchdog import STACKS_SIGNAL, Watchdog

logger = logging.getLogger(__name__)

Phase = Literal["start", "train", "evaluate", "save", "wait"]

WRITE_SECONDS = 1.0
REWRITE_SECONDS = 5.0  # without a beat: the host's own clock says for how long there was none
SECOND_LOOK_SECONDS = 6.0  # after which the file of a rank that runs has changed


@dataclass(frozen=True, kw_only=True)
class HeartbeatRecord:
    """The content of the file."""

    time: float  # when the rank last made progress
    written: float  # when the file was written; by the same clock, which may differ from others
    step: int
    phase: str  # one of Phase
    hostname: str
    pid: int

    @property
    def is_alive(self) -> bool | None:
        """Whether the rank's process exists; None where only its own host could tell."""
        is_here = self.hostname == socket.gethostname()
        return Path(f"/proc/{self.pid}").exists() if is_here else None

    def seconds_without_progress(self, now: float) -> float:
        """By the clock of the rank's host; `now` is this host's."""
        return (now if self.is_alive else self.written) - self.time


def read_heartbeats(directory: Path) -> list[HeartbeatRecord]:
    """The ranks' heartbeats in rank order.

    A file that is being replaced or is damaged is skipped.
    """
    records = []
    for path in sorted(directory.glob("rank-*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            records.append(from_json(HeartbeatRecord, read_json(path)))
    return records


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
    ) -> None:
        self._path = directory / f"rank-{rank:05d}.json"
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
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{self._path.parent}: cannot be created ({error.strerror}); "
                "make the run directory writable"
            ) from None
        faulthandler.register(STACKS_SIGNAL, file=sys.__stderr__ or sys.stderr, all_threads=True)
        if self._watchdog_timeout_seconds:
            self._watchdog = Watchdog(self._watchdog_timeout_seconds, self._last_words)
        self._writer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.set()
        self._writer.join()
        if self._watchdog is not None:
            self._watchdog.close()
        faulthandler.unregister(STACKS_SIGNAL)
        self._path.unlink(missing_ok=True)

    def _write_beats(self) -> None:
        known, written, failed = None, 0.0, False
        while True:
            beat = self._beat
            if beat != known and self._watchdog is not None:
                self._watchdog.feed()
            if beat != known or time.monotonic() - written >= REWRITE_SECONDS:
                known, written = beat, time.monotonic()
                failed = not self._write(*beat, is_known_to_fail=failed)
            if self._closing.wait(WRITE_SECONDS):
                return

    def _write(self, when: float, step: int, phase: Phase, is_known_to_fail: bool) -> bool:
        record = HeartbeatRecord(
            time=when,
            written=time.time(),
            step=step,
            phase=phase,
            hostname=socket.gethostname(),
            pid=os.getpid(),
        )
        try:
            # Not synced: after a power cut nobody asks whether a rank is alive.
            with named_errors(self._path), atomic_write(self._path, sync=False) as file:
                file.write(json.dumps(asdict(record)).encode())
        except OSError as error:
            # A full disk must not end a rank that still trains.
            if not is_known_to_fail:
                logger.warning("heartbeat not written: %s", os_error_text(error))
            return False
        return True
