"""Heartbeats of ranks: step and phase, and stacks when a step takes too long. Torch-free.

    RUN/heartbeats/ranks-from-00008.jsonl    a line of SLOT_BYTES for each rank of one node

The ranks of a node have consecutive numbers and share a file. Each rank overwrites its own line, at
most once a second and at least every 5 seconds; that works on a full disk, too. The line is in the
node's page cache, where processes of the same host see it at once. Rank n of the node syncs the
file every 10 (n + 1) seconds, so a shared file system gets few requests per node.

A rank that exits cleanly blanks its line. A killed rank leaves the line behind; its `pid` shows
that the process is gone.
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
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from foundation.errors import DataError, os_error_text
from foundation.files import own_file, read_regular, read_together
from foundation.typed_values import from_json, json_text
from pretrain.rundir.watchdog import STACKS_SIGNAL, VARIABLE, Watchdog

logger = logging.getLogger(__name__)

Phase = Literal["launch", "start", "train", "evaluate", "save", "wait"]

# Phases before and after the rank reaches the rendezvous.
_STARTING: tuple[Phase, ...] = ("launch", "start")

DIRECTORY = "heartbeats"  # in the run directory
SLOT_BYTES = 512
WRITE_SECONDS = 1.0
REWRITE_SECONDS = 5.0  # without a beat, write again: `written - time` then tells how long
SYNC_SECONDS = 10.0
_LARGEST_BYTES = 1 << 16  # of the heartbeats of a node


@dataclass(frozen=True, kw_only=True)
class HeartbeatRecord:
    """The last report of a rank."""

    rank: int
    time: float  # when the rank last made progress, by its host's clock
    written: float  # when this record was written, by the same clock
    step: int
    phase: str
    hostname: str
    pid: int

    @property
    def is_alive(self) -> bool | None:
        """Whether the rank's process exists; None on other hosts, which cannot see it."""
        is_here = self.hostname == socket.gethostname()
        return Path(f"/proc/{self.pid}").exists() if is_here else None

    def seconds_without_progress(self, now: float) -> float:
        """Return how long the rank has made no progress; `now` is by this host's clock.

        For a rank on another host, whose clock may differ, count until its last record.
        """
        return (now if self.is_alive else self.written) - self.time

    @property
    def line(self) -> bytes:
        """The rank's line in the file of its node."""
        return json_text(asdict(self)).encode().ljust(SLOT_BYTES - 1) + b"\n"


def read_heartbeats(directory: Path) -> list[HeartbeatRecord]:
    """Return the ranks' latest heartbeats in rank order; damaged ones are skipped."""
    latest: dict[int, HeartbeatRecord] = {}
    for records in read_together(_records_in, list(directory.glob("ranks-from-*.jsonl"))):
        for record in records:
            known = latest.setdefault(record.rank, record)
            latest[record.rank] = max(known, record, key=lambda beat: beat.written)
    return [latest[rank] for rank in sorted(latest)]


def node_file(directory: Path, first_rank: int) -> Path:
    """Return the file of a node's ranks, named by the first one."""
    return directory / f"ranks-from-{first_rank:05d}.jsonl"


def _records_in(path: Path) -> list[HeartbeatRecord]:
    records = []
    with contextlib.suppress(OSError, ValueError):
        for line in read_regular(path, _LARGEST_BYTES).split(b"\n"):
            with contextlib.suppress(ValueError):
                # Lines of ranks that have not written yet are NUL bytes.
                records.append(from_json(HeartbeatRecord, line.strip(b"\0 ")))
    return records


class Heartbeat:
    """The heartbeat of this rank, a context manager.

    While it is open, SIGQUIT writes every thread's Python stack to stderr, and the process
    continues. After `watchdog_timeout_seconds` without a beat (0: no timeout; a suspended process
    is not timed), the writer thread writes the stacks and calls `final_report`, and the watchdog
    ends the process by SIGALRM.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        watchdog_timeout_seconds: float,
        local_rank: int = 0,
        phase: Phase = "start",
    ) -> None:
        self._path = node_file(directory, rank - local_rank)
        self._rank, self._local_rank = rank, local_rank
        self._file: int | None = None  # stays open: NFS syncs a file whenever it is closed
        self._watchdog_timeout_seconds = watchdog_timeout_seconds
        self.final_report: Callable[[], object] = lambda: None  # called before the watchdog acts
        self._watchdog: Watchdog | None = None
        self._beat: tuple[float, int, Phase] = (time.time(), 0, phase)
        self._closing = threading.Event()
        self._writer = threading.Thread(target=self._write_beats, name="heartbeat", daemon=True)

    def beat(self, step: int, phase: Phase) -> None:
        """Report how many updates are done and what comes next. The writer thread writes it."""
        self._beat = (time.time(), step, phase)
        if self._watchdog is not None:
            self._watchdog.notify(self._watchdog_timeout_seconds)

    def allow(self, seconds: float) -> None:
        """Report progress, and set the timeout of the watchdog from now on."""
        self._watchdog_timeout_seconds = seconds
        self.beat(*self._beat[1:])

    def repeat(self) -> None:
        """Report that the rank waits for storage and does not hang."""
        self.beat(self._beat[1], "wait")

    def __enter__(self) -> Heartbeat:
        faulthandler.register(STACKS_SIGNAL, file=sys.__stderr__ or sys.stderr, all_threads=True)
        if self._watchdog_timeout_seconds or VARIABLE in os.environ:
            self._watchdog = Watchdog(self._watchdog_timeout_seconds)
        self._writer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        self._writer.join()
        if self._watchdog is not None:
            self._watchdog.close()
        faulthandler.unregister(STACKS_SIGNAL)
        with contextlib.suppress(OSError, DataError):
            # Blank only our own line: a rank of a newer attempt may have overwritten it.
            ours = (socket.gethostname(), os.getpid())
            beats = [beat for beat in _records_in(self._path) if beat.rank == self._rank]
            if all((beat.hostname, beat.pid) == ours for beat in beats):
                self._write(b" " * (SLOT_BYTES - 1) + b"\n")
        self._close()

    def _write_beats(self) -> None:
        known, written, synced, failed = None, 0.0, 0.0, False
        while True:
            if self._watchdog is not None and self._watchdog.has_expired():
                self._report_hang(self._watchdog)
            beat, now = self._beat, time.monotonic()
            if beat != known or now - written >= REWRITE_SECONDS:
                known, written = beat, now
                try:
                    when, step, phase = beat
                    record = HeartbeatRecord(
                        rank=self._rank, time=when, written=time.time(), step=step, phase=phase,
                        hostname=socket.gethostname(), pid=os.getpid(),
                    )  # fmt: skip
                    self._write(record.line)
                    failed = False
                    if now - synced >= SYNC_SECONDS * (1 + self._local_rank):
                        synced = now
                        os.fdatasync(self._file or -1)
                except (OSError, DataError) as error:
                    # A rank that still trains must not end for a full disk. And without a launcher
                    # the directory may not exist yet: rank 0 makes it during the start.
                    is_early = isinstance(error, FileNotFoundError) and beat[2] in _STARTING
                    if not failed and not is_early:
                        logger.warning("heartbeat not written: %s", os_error_text(error))
                    failed = failed or not is_early
            if self._closing.wait(WRITE_SECONDS):
                return

    def _report_hang(self, watchdog: Watchdog) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        with contextlib.suppress(OSError, ValueError):
            for ident, frame in sys._current_frames().items():
                stack = "".join(traceback.format_stack(frame))
                sys.stderr.write(f"Thread {names.get(ident, ident)}:\n{stack}")
            sys.stderr.flush()
            watchdog.wrote_stacks()
        with contextlib.suppress(OSError):
            self.final_report()
        watchdog.wrote_all()

    def _write(self, line: bytes) -> None:
        try:
            if self._file is None:
                self._path.parent.mkdir(exist_ok=True)
                self._file = own_file(self._path, os.O_WRONLY | os.O_CREAT)
            os.pwrite(self._file, line, self._local_rank * SLOT_BYTES)
        except OSError:  # for example a stale NFS handle: the next write opens the file again
            self._close()
            raise

    def _close(self) -> None:
        file, self._file = self._file, None
        with contextlib.suppress(OSError):
            if file is not None:
                os.close(file)
