"""Heartbeats of ranks: step and phase, and the Python stacks when a step takes too long.

A rank writes its record at most once a second and at least every 5 seconds,
and removes it when it exits cleanly. A killed rank leaves it behind; `pid` tells whether the rank
lives.

The files of heartbeats: one per rank in its node's RAM, one per node in the run. Torch-free.

    /dev/shm/xl-pretrain-UID/KEY-8/rank-00012.json    a HeartbeatRecord
    RUN/heartbeats/ranks-from-00008.jsonl             a line per rank of one node

The node's file is written by whichever of its ranks first finds it older than NODE_SECONDS, so no
rank depends on another one, and a shared file system sees one small file per node, not one per rank
and second. The ranks of a node have consecutive numbers. On their own host readers look at the
slots, which are newer than the file.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from foundation.errors import DataError, UserError, os_error_text
from foundation.files import (
    atomic_write,
    check_private,
    named_errors,
    parse_json,
    private_directory,
    read_regular,
    read_together,
)
from foundation.records import from_json
from pretrain.rundir.watchdog import STACKS_SIGNAL, Watchdog

DIRECTORY = "heartbeats"  # in that of the run
NODE_SECONDS = 10.0
_NAME = re.compile(r"ranks-from-\d+\.jsonl")
_RAM = Path("/dev/shm")
_PUBLISHED = "published"  # an empty file beside the slots: when the node's file was written last
_LARGEST_BYTES = 1 << 16  # of the heartbeats of a node
_FORGOTTEN_SECONDS = 86400.0  # after which the slots of killed ranks are removed


@dataclass(frozen=True, kw_only=True)
class HeartbeatRecord:
    """What a rank said last."""

    rank: int
    time: float  # when the rank last made progress
    written: float  # when this was written; by the same clock, which may differ from others
    step: int
    phase: str  # one of heartbeat.Phase
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


class NodeHeartbeats:
    """The heartbeats of the ranks of this node, the first of which is `first_rank`.

    `directory` is that of the run's heartbeats. The constructor touches nothing.
    """

    def __init__(self, directory: Path, first_rank: int) -> None:
        self.path = directory / f"ranks-from-{first_rank:05d}.jsonl"
        self._key = f"{_key_of(directory)}-{first_rank}"

    def write(self, record: HeartbeatRecord) -> None:
        """Replace a rank's slot."""
        path = self._slot(self._make_slots(), record.rank)
        # Not synced: after a power cut nobody asks whether a rank is alive.
        with atomic_write(path, sync=False) as file:
            file.write(_line(record))

    def remove(self, rank: int) -> None:
        """Remove a rank's slot; with the last one go the node's file and directory."""
        files = self._slot_files()
        if (own := self._slot(self._slots, rank)) in files:
            own.unlink(missing_ok=True)
        if not self._slot_files():
            self.path.unlink(missing_ok=True)
            if files:
                shutil.rmtree(self._slots, ignore_errors=True)

    def read(self) -> list[HeartbeatRecord]:
        """What the ranks of this node said last, in rank order; empty on other hosts."""
        return [record for path in self._slot_files() for record in _records_in(path)]

    def is_due(self) -> bool:
        """Whether the node's file has become old; the caller then has to `publish`."""
        try:
            age = time.time() - (self._slots / _PUBLISHED).stat().st_mtime
        except FileNotFoundError:
            return True
        return not 0 <= age < NODE_SECONDS  # clocks are also set back

    def publish(self) -> None:
        """Replace the node's file."""
        # First of all, so that the node's other ranks leave it to this one.
        (self._make_slots() / _PUBLISHED).touch()
        with named_errors(self.path), atomic_write(self.path, sync=False) as file:
            file.writelines(map(_line, self.read()))

    @property
    def _slots(self) -> Path:
        return slots_of_user() / self._key

    def _slot(self, slots: Path, rank: int) -> Path:
        return slots / f"rank-{rank:05d}.json"

    def _make_slots(self) -> Path:
        """Create the directory, also again: systemd empties /dev/shm when a user logs out."""
        of_user = private_directory(slots_of_user())
        if not self._slots.exists():
            _remove_forgotten(of_user)
        return private_directory(self._slots)

    def _slot_files(self) -> list[Path]:
        """The slots of this node's ranks; none in a directory that others could have filled."""
        with contextlib.suppress(OSError, DataError):
            check_private(slots_of_user())
            check_private(self._slots)
            return sorted(self._slots.glob("rank-*.json"))
        return []


def read_heartbeats(directory: Path) -> list[HeartbeatRecord]:
    """The ranks' heartbeats in rank order.

    What is being replaced or is damaged is skipped.
    """
    paths = [path for path in directory.glob("ranks-from-*.jsonl") if _NAME.fullmatch(path.name)]
    found: dict[int, HeartbeatRecord] = {}
    for path, records in zip(paths, read_together(_records_in, paths), strict=True):
        if any(record.hostname == socket.gethostname() for record in records):
            records = NodeHeartbeats(directory, int(path.stem.rpartition("-")[2])).read() or records
        for record in records:
            known = found.setdefault(record.rank, record)
            found[record.rank] = max(known, record, key=lambda each: each.written)
    return [found[rank] for rank in sorted(found)]


def _records_in(path: Path) -> list[HeartbeatRecord]:
    records = []
    with contextlib.suppress(OSError, ValueError):
        for line in read_regular(path, _LARGEST_BYTES).splitlines():
            with contextlib.suppress(ValueError, TypeError):
                records.append(from_json(HeartbeatRecord, parse_json(line)))
    return records


def _line(record: HeartbeatRecord) -> bytes:
    return json.dumps(asdict(record)).encode() + b"\n"


def _key_of(directory: Path) -> str:
    """Names the run on this host: hosts that are namespaces of one machine may share its RAM."""
    where = f"{socket.gethostname()}\0{directory.resolve()}"
    return hashlib.sha256(os.fsencode(where)).hexdigest()[:16]


def slots_of_user() -> Path:
    """This host's directory of the slots of all runs of this user."""
    root = _RAM if os.access(_RAM, os.W_OK) else Path(tempfile.gettempdir())
    return root / f"xl-pretrain-{os.geteuid()}"


def _remove_forgotten(slots_of_user: Path) -> None:
    """Remove what killed ranks left long ago."""
    for slots in slots_of_user.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - slots.stat().st_mtime > _FORGOTTEN_SECONDS:
                shutil.rmtree(slots, ignore_errors=True)


logger = logging.getLogger(__name__)

Phase = Literal["start", "train", "evaluate", "save", "wait"]

WRITE_SECONDS = 1.0
REWRITE_SECONDS = 5.0  # without a beat: the host's own clock says for how long there was none


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
