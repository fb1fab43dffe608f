"""Files that are either whole or absent: write beside, fsync, rename."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

HASH_BLOCK_BYTES = 1 << 20


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Give the OSErrors of the block `path` as their file where they name none, as those of a full disk do not."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of `path` when the block ends well; else nothing stays."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with named_errors(path):
            with open(beside, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    fsync_directory(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write `text` so that a crash leaves either the old file or the new one."""
    with atomic_write(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON with sorted keys, so that the same value gives the same bytes."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def fsync_directory(path: Path) -> None:
    """Make renames inside `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Make the contents of a file that something else wrote survive a power cut."""
    fsync_directory(path)  # the same calls: open read-only, fsync, close


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's contents as hexadecimal text."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
