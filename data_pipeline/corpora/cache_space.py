"""The size limit of a directory of files that may be removed, shared by all processes of a node.

CACHE/FILES/NAME      a file; the time of its last access tells the last use
CACHE/FILES.space     bytes that count as used, and how much of FILES.oldest is done with
CACHE/FILES.oldest    the files that were used least recently when all were last listed

Making space reads two short files and looks at as many files as it removes. All are listed when
the used bytes are unknown, when FILES.oldest is done with, and when they do not suffice: once per
LISTED_SHARE of all files. What is killed, removed by hand or given up halfway leaves the used
bytes too high, never too low, and the next listing corrects them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from data_pipeline.files import atomic_write

LISTED_SHARE = 4
FEWEST_LISTED = 64
_STATE = re.compile(rb"([0-9]{1,18}) ([0-9]{1,18})\n")
_ENTRY = re.compile(rb"([0-9]{1,20}) ([0-9]{1,18}) ([0-9a-f]{64})\n")
_FILE_NAME = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    size: int
    used_ns: int
    end: int = 0  # of its line in FILES.oldest


class CacheSpace:
    """At most `limit` bytes of files and of what `reserved` counts.

    `evict` removes a file and returns whether it could. Callers of one directory take turns, by a
    lock.
    """

    def __init__(
        self,
        files: Path,
        limit: int,
        evict: Callable[[Path], bool],
        reserved: Callable[[], int] = lambda: 0,
    ) -> None:
        self._files, self._limit, self._evict_file, self._reserved = files, limit, evict, reserved
        self._state = files.with_name(f"{files.name}.space")
        self._oldest = files.with_name(f"{files.name}.oldest")

    def make(self, size: int) -> bool:
        """Remove what was used least recently until `size` bytes fit.

        Whether they do; then they count as used.
        """
        used, done = self._read_state()
        if used is not None and used + size > self._limit:
            used, done = self._evict(self._listed(done), used, size, done)
        if used is None or used + size > self._limit:
            used, done = self._list_and_evict(size)
        fits = used + size <= self._limit
        with atomic_write(self._state, sync=False) as file:
            file.write(b"%d %d\n" % (used + size if fits else used, done))
        return fits

    def _list_and_evict(self, size: int) -> tuple[int, int]:
        found = sorted(self._entries(), key=lambda entry: entry.used_ns)
        used = sum(entry.size for entry in found) + self._reserved()
        candidates = iter(found)
        used, _ = self._evict(candidates, used, size, 0)
        count = max(FEWEST_LISTED, len(found) // LISTED_SHARE)
        with atomic_write(self._oldest, sync=False) as file:
            for entry in islice(candidates, count):
                file.write(b"%d %d %s\n" % (entry.used_ns, entry.size, entry.name.encode()))
        return used, 0

    def _evict(
        self, candidates: Iterator[_Entry], used: int, size: int, done: int
    ) -> tuple[int, int]:
        """Remove candidates until `size` bytes fit; return the used bytes and the last one's end.

        One that was used since it was listed stays, and so does one that is in use.
        """
        while used + size > self._limit:
            if (entry := next(candidates, None)) is None:
                break
            path, done = self._files / entry.name, entry.end
            try:
                if path.stat().st_atime_ns == entry.used_ns and self._evict_file(path):
                    used -= entry.size
            except FileNotFoundError:  # removed by hand
                continue
        return used, done

    def _read_state(self) -> tuple[int | None, int]:
        try:
            match = _STATE.fullmatch(self._state.read_bytes())
        except FileNotFoundError:
            match = None
        return (int(match[1]), int(match[2])) if match else (None, 0)

    def _listed(self, done: int) -> Iterator[_Entry]:
        """Yield what FILES.oldest lists after its first `done` bytes."""
        try:
            with open(self._oldest, "rb") as file:
                file.seek(done)
                while match := _ENTRY.fullmatch(file.readline()):
                    name = match[3].decode()
                    yield _Entry(name, int(match[2]), int(match[1]), file.tell())
        except FileNotFoundError:
            return

    def _entries(self) -> Iterator[_Entry]:
        with os.scandir(self._files) as entries:
            for entry in entries:
                if _FILE_NAME.fullmatch(entry.name):
                    status = entry.stat()
                    yield _Entry(entry.name, status.st_size, status.st_atime_ns)
