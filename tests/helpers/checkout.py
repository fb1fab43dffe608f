"""Where this checkout is, and that a test neither changes it nor sees what commands left in it."""

import contextlib
import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CACHES = {"__pycache__", ".hypothesis", ".pytest_cache", ".torch_extensions"}
OUTPUTS = {"runs", "data"}  # of make demo, of a user; not in the repository
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# Audited events besides open -> which arguments are paths that change.
CHANGES = {"os.mkdir": (0,), "os.remove": (0,), "os.rmdir": (0,), "os.truncate": (0,)}
CHANGES |= {"os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,), "os.utime": (0,)}
CHANGES |= {"os.chmod": (0,), "os.chown": (0,)}
READS = {"open", "os.listdir", "os.scandir"}


@contextlib.contextmanager
def empty_working_directory() -> Iterator[Path]:
    """Let relative paths mean a new directory in the block; it is removed with all in it."""
    before = os.open(".", os.O_PATH | os.O_DIRECTORY)
    with tempfile.TemporaryDirectory(prefix="working-directory-") as here:
        os.chdir(here)
        try:
            yield Path(here)
        finally:
            os.fchdir(before)
            os.close(before)


@contextlib.contextmanager
def unchanged_checkout() -> Iterator[None]:
    """Let this process find the checkout read-only and without outputs in the block."""
    is_active = True

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if not is_active or (event not in CHANGES and event not in READS):
            return
        changes = event in CHANGES or (event == "open" and arguments[2] & WRITING)
        for index in CHANGES.get(event, (0,)):
            parts = parts_below_root(arguments[index])
            if parts and changes and not CACHES & set(parts):
                raise OSError(errno.EROFS, "a test must not change the checkout", arguments[index])
            if parts and parts[0] in OUTPUTS:
                raise FileNotFoundError(errno.ENOENT, "no test sees outputs", arguments[index])

    sys.addaudithook(refuse)
    try:
        yield
    finally:
        is_active = False  # a hook stays


def parts_below_root(path: object) -> tuple[str, ...]:
    """Return the names on the way from ROOT to `path`; none if it is elsewhere."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        return ()
    absolute = os.path.abspath(os.fsdecode(path))
    below = absolute.removeprefix(f"{ROOT}{os.sep}")
    return () if below == absolute else tuple(below.split(os.sep))
