"""Whose a file is: what this user executes or obeys must not be another's.

Root and this user are trusted. What a directory that only its owner may enter holds is out of
everybody else's reach.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from data_pipeline.errors import DataError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0


def private_directory(path: Path) -> Path:
    """Create a directory that only this user can use, or check that an existing one is no trap.

    DataError if it is a link, belongs to another user, or others may write into it, or rename it
    from above: they could replace what this process has checked.
    """
    refuse_open_parents(path)
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_private(path)
    return path


def check_private(path: Path) -> None:
    """Raise DataError as `private_directory` does, for a directory that exists."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise DataError(f"{path} is a link, expected a directory of this user; remove it")
    if status.st_uid != os.geteuid():
        raise DataError(f"{_of_another_user(path, status)}; choose another directory")
    if status.st_mode & _OTHERS_WRITE:
        raise DataError(
            f"{_writable_by_others(path, status)}, expected 700; make sure that its contents are "
            f"yours, then `chmod 700 {path}`"
        )


def refuse_foreign(path: Path, with_contents: bool = True) -> None:
    """Raise DataError unless only this user and root can have written `path` and all below it.

    For what is executed or obeyed. A path that does not exist is nobody's.
    """
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISLNK(status.st_mode):
        raise DataError(f"{path} is a link, expected a file or directory of its own; remove it")
    if not _is_trusted(status):
        raise DataError(
            f"{_of_another_user(path, status)}, because what it says is executed as this user; "
            "leave it to its owner, or start a run of your own"
        )
    if status.st_mode & _OTHERS_WRITE:
        raise DataError(
            f"{_writable_by_others(path, status)}, and what it says is executed as this user; "
            f"make sure that it is unchanged, then `chmod -R go-w {path}`"
        )
    if with_contents and stat.S_ISDIR(status.st_mode) and status.st_mode & 0o077:
        for name in sorted(os.listdir(path)):
            refuse_foreign(path / name)


def is_of_another_user(path: Path) -> bool:
    """Whether another user than root owns the file."""
    return not _is_trusted(path.stat())


def _is_trusted(status: os.stat_result) -> bool:
    return status.st_uid in (_ROOT, os.geteuid())


def refuse_open_parents(path: Path) -> None:
    """Raise DataError if every user can replace `path` from above."""
    for parent in filter(Path.exists, path.resolve().parents):
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise DataError(
                f"{path} is below {parent}, where every user can replace it (mode "
                f"{mode & 0o7777:o}); `chmod o-w {parent}`, or choose another directory"
            )


def _of_another_user(path: Path, status: os.stat_result) -> str:
    return f"{path} belongs to the user with number {status.st_uid}, expected {os.geteuid()}"


def _writable_by_others(path: Path, status: os.stat_result) -> str:
    return f"{path} can be written by other users (mode {status.st_mode & 0o777:o})"
