"""Owners of files and directories: what this user executes or trusts must be their own."""

import os
import stat
from pathlib import Path

from foundation.errors import DataError
from foundation.files import make_directory

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0


def private_directory(path: Path) -> Path:
    """Create a directory that only this user can use, or check that an existing one is safe.

    DataError if it is a link, belongs to another user, or if others may write into it or rename it:
    they could replace a file after this process has checked it.
    """
    refuse_open_parents(path)
    make_directory(path, 0o700)
    check_private(path)
    return path


def check_private(path: Path) -> None:
    """Raise DataError as `private_directory` does, for a directory that exists."""
    if not stat.S_ISDIR(_checked(path, (os.geteuid(),), f"chmod 700 {path}").st_mode):
        raise DataError(f"{path} is not a directory, expected one of this user; remove it")


def refuse_foreign(path: Path, with_contents: bool = True) -> None:
    """Raise DataError unless only this user and root can have written `path` and all below it.

    For files that this process executes or trusts. A path that does not exist is accepted.
    """
    try:
        status = _checked(path, (_ROOT, os.geteuid()), f"chmod -R go-w {path}")
    except (FileNotFoundError, NotADirectoryError):
        return
    if with_contents and stat.S_ISDIR(status.st_mode) and status.st_mode & 0o077:
        for name in sorted(os.listdir(path)):
            refuse_foreign(path / name)


def _checked(path: Path, owners: tuple[int, ...], remedy: str) -> os.stat_result:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise DataError(f"{path} is a link, expected a file or directory of its own; remove it")
    if status.st_uid not in owners:
        raise DataError(
            f"{path} belongs to the user with number {status.st_uid}, expected {os.geteuid()}, "
            "because its contents are trusted; leave it to its owner, and choose another path"
        )
    if status.st_mode & _OTHERS_WRITE:
        raise DataError(
            f"{path} can be written by other users (mode {status.st_mode & 0o777:o}), and its "
            f"contents are trusted; make sure that it is unchanged, then `{remedy}`"
        )
    return status


def is_of_another_user(path: Path) -> bool:
    """Whether a user other than this one and root owns the file."""
    return path.stat().st_uid not in (_ROOT, os.geteuid())


def refuse_open_parents(path: Path) -> None:
    """Raise DataError if every user can rename `path` or a folder above it."""
    for parent in filter(Path.exists, path.resolve().parents):
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise DataError(
                f"{path} is below {parent}, where every user can replace it (mode "
                f"{mode & 0o7777:o}); `chmod o-w {parent}`, or choose another directory"
            )
