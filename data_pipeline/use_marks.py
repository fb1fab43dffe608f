"""Which files processes have open, for file systems whose `flock` cannot tell.

    MARKS/NAME.TOKEN.owner    exists while a process has NAME open or mapped

A mark is an owner file, see `owner_file.py`: one that a dead process has left is recognized, on
another machine after a silence. Whoever marks a file and whoever asks hold the same lock.
"""

from __future__ import annotations

import io
import mmap
import os
import secrets
import weakref
from pathlib import Path
from typing import BinaryIO

from data_pipeline.owner_file import OwnerFile

_ENDING = ".owner"


class _Mark:
    """The mark of one opening; it goes with the last reference to this object."""

    def __init__(self, marks: Path, name: str) -> None:
        owner = OwnerFile(marks / f"{name}.{secrets.token_hex(8)}")
        is_made = owner.try_acquire()
        assert is_made, "nobody else has this name"
        weakref.finalize(self, owner.release)


class _MarkedFile(io.BufferedReader):
    mark: _Mark | None = None

    def close(self) -> None:
        super().close()
        self.mark = None


class _Mapping(mmap.mmap):
    mark: _Mark | None = None


def open_marked(path: Path, marks: Path) -> BinaryIO:
    """Open a file for reading, marked until it is closed and what `mapped` made of it is gone."""
    mark = _Mark(marks, path.name)
    see_changes(path.parent)
    file = _MarkedFile(io.FileIO(path))
    file.mark = mark
    return file


def mapped(file: BinaryIO) -> mmap.mmap:
    """Map the whole file for reading; if it is marked, its mark stays until it is unmapped."""
    memory = _Mapping(file.fileno(), 0, access=mmap.ACCESS_READ)
    if isinstance(file, _MarkedFile):
        memory.mark = file.mark
    return memory


def is_in_use(marks: Path, name: str) -> bool:
    """Whether a process that may be alive has the file open; removes the marks of dead ones."""
    see_changes(marks)
    ours = [each for each in os.listdir(marks) if each.startswith(f"{name}.")]
    owners = (OwnerFile(marks / each.removesuffix(_ENDING)) for each in ours)
    return not all(owner.remove_left() for owner in owners)


def see_changes(directory: Path) -> None:
    """See which names other machines have made or removed there.

    A client of NFS answers from its cache for up to a minute. A change of its own makes it compare
    the directory with the server's.
    """
    probe = directory / f".{secrets.token_hex(8)}.tmp"
    probe.touch()
    probe.unlink()
