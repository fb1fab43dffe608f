"""The file operations of this process below a directory, in order.

Audit hooks tell when a name or a file is about to change. The directory is read at each of these
moments, and what is new since the last one is recorded: so data is seen whatever wrote it.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = 0  # the number of the directory itself
_NAME_EVENTS = {
    *("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate")
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Names:
    """Entries of directories that changed at once: (directory, name) -> file or None."""

    entries: dict[tuple[int, str], int | None]


@dataclass(frozen=True)
class Data:
    """What a file contains from now on."""

    file: int
    content: bytes


@dataclass(frozen=True)
class Sync:
    """An fsync of a file or directory."""

    file: int


@dataclass(frozen=True)
class Told:
    """Something that the process has told, and that has to be true from then on."""

    what: Any


Operation = Names | Data | Sync | Told


@dataclass
class Recording:
    """All operations, and which numbers are directories."""

    operations: list[Operation] = field(default_factory=list)
    directories: set[int] = field(default_factory=lambda: {ROOT})


class Recorder:
    """Records what changes below `root`, which is empty, while `recording` lasts."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self.recording = Recording()
        self._lock = threading.RLock()
        self._inside = threading.local()
        self._numbers: dict[int, int] = {os.stat(root).st_ino: ROOT}  # by inode
        self._next = 1
        self._names: dict[tuple[int, str], int] = {}
        self._contents: dict[int, bytes] = {}
        self._states: dict[int, tuple[int, int]] = {}
        self._is_on = False

    @contextlib.contextmanager
    def on(self) -> Iterator[Recording]:
        """Record during the block. An audit hook stays as long as its process."""
        sys.addaudithook(self._hook)
        self._is_on = True
        try:
            with mock.patch.object(os, "fsync", self._sync):
                yield self.recording
                self.look()
        finally:
            self._is_on = False

    def tell(self, what: Any) -> None:
        with self._lock:
            self.look()
            self.recording.operations.append(Told(what))

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on or getattr(self._inside, "value", False):
            return
        if event == "open":
            path, _, flags = arguments
            if (
                flags & _WRITES
                and isinstance(path, str | bytes | os.PathLike)
                and self._is_below(path)
            ):
                self.look()
        elif event in _NAME_EVENTS:
            self.look()

    def _is_below(self, path: Any) -> bool:
        return os.path.abspath(os.fsdecode(path)).startswith(self._root)

    def _sync(self, descriptor: int) -> None:
        with self._lock:
            self.look()
            number = self._numbers.get(os.fstat(descriptor).st_ino)
            if number is not None:
                self.recording.operations.append(Sync(number))

    def look(self) -> None:
        """Record what has changed since the last look."""
        with self._lock:
            self._inside.value = True
            try:
                self._look()
            finally:
                self._inside.value = False

    def _look(self) -> None:
        names: dict[tuple[int, str], int] = {}
        inodes: dict[int, int] = {os.stat(self._root).st_ino: ROOT}
        data: list[Data] = []
        todo = [(self._root, ROOT)]
        while todo:
            path, directory = todo.pop()
            try:
                entries = list(os.scandir(path))
            except OSError:
                continue  # removed by another thread at this moment
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                number = inodes.get(status.st_ino) or self._numbers.get(status.st_ino)
                if number is None:
                    number, self._next = self._next, self._next + 1
                inodes[status.st_ino] = number
                names[directory, entry.name] = number
                if entry.is_dir(follow_symlinks=False):
                    self.recording.directories.add(number)
                    todo.append((entry.path, number))
                elif entry.is_file(follow_symlinks=False):
                    self._read(entry.path, number, status, data)
        changed = {
            key: names.get(key)
            for key in {**self._names, **names}
            if self._names.get(key) != names.get(key)
        }
        if changed:
            self.recording.operations.append(Names(changed))
        self.recording.operations += data
        self._names, self._numbers = names, inodes

    def _read(self, path: str, number: int, status: os.stat_result, data: list[Data]) -> None:
        state = (status.st_size, status.st_mtime_ns)
        is_old = time.time_ns() - status.st_mtime_ns > 100_000_000  # of a clock that ticks
        if is_old and self._states.get(number) == state:
            return
        try:
            content = Path(path).read_bytes()
        except OSError:
            return
        self._states[number] = state
        if self._contents.get(number, b"") != content:
            self._contents[number] = content
            data.append(Data(number, content))
