"""Files that are complete or absent, and what survives a power failure.

Runs, corpora and exports are written only through `atomic_write`, `append_whole`, `make_directory`
and `move`. With `sync`, each puts first contents on disk, then names, and then returns.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from foundation.errors import ConfigError, DataError
from foundation.paths import path_below
from foundation.typed_values import Count, Sha256, from_json, json_text, parse_json

HASH_BLOCK_BYTES = 1 << 20
LARGEST_READ_BYTES = 1 << 30  # binary data that is read at once
GIT_LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # starts a file not yet pulled
SMALL_FILE_BYTES = 1 << 20  # limit for texts and JSON, unless the reader names another
LARGEST_LIST_BYTES = 1 << 26  # limit for a list; one of 100,000 MDS shards has 30 MB
LARGEST_LINE_BYTES = 1 << 22  # longest line that is read of a file that a run appends to
TAIL_BYTES = 1 << 16  # read from the end of a log
YAML_SUFFIXES = (".yaml", ".yml")
SETTLED_NS = 100_000_000  # time after which another change gives a file other time stamps
_MOST_THREADS = 32  # `read_together` starts at most these
_FILES_WITHOUT_THREADS = 4  # for up to 4 files, threads cost more than they save
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between two looks for a file
_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")  # names that `atomic_write` gives
_HALF_LINE_BYTES = 1 << 16  # end of a file that is searched for a half line


T = TypeVar("T")


@contextlib.contextmanager
def named_errors(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Put `path` into OSErrors of the block that name no file, such as a full disk's.

    It also replaces a path that begins with `temporary`, since users do not know such names.
    """
    try:
        yield
    except OSError as error:
        is_temporary = temporary is not None and str(error.filename).startswith(str(temporary))
        if (error.filename is None or is_temporary) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextlib.contextmanager
def atomic_write(path: Path, mode: int = 0o666, sync: bool = True) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` if the block succeeds; otherwise it is removed.

    `mode` is the file's permissions, less the user's umask. Without `sync`, a power failure may
    leave an empty file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        temporary.unlink()  # left by a killed process that had our number

    def opener(name: str, flags: int) -> int:
        # Create a new file: fail at a file or link that another user has put there.
        return os.open(name, flags | os.O_EXCL | os.O_NOFOLLOW, mode)

    try:
        with named_errors(path, temporary):
            with open(temporary, "wb", opener=opener) as file:
                yield file
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if sync:
        fsync_directory(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Remove killed processes' temporary files; no other process may write in `folder` now."""
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if _TEMPORARY.fullmatch(path.name):
                path.unlink()


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Write `text` so that a crash leaves either the old file or the new one."""
    with atomic_write(path, mode) as file:
        file.write(text.encode())


def write_new(path: Path, text: str) -> None:
    """Write a file for the user to edit; ConfigError if there is one already."""
    refuse_overwrite(path)
    make_directory(path.parent)
    write_text(path, text)


def refuse_overwrite(path: Path) -> None:
    """Raise ConfigError if something is at the path."""
    if path.is_symlink() or path.exists():
        raise ConfigError(f"{path} exists already; choose another name, or remove it first")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON with sorted keys: equal values give equal bytes."""
    write_text(path, json_text(value, indent=1, sort_keys=True) + "\n")


def await_text(path: Path, seconds: float) -> str:
    """Return the text of a file that another process writes; TimeoutError after `seconds`.

    The file is opened only after its directory lists the name: a network file system that was
    asked for a missing name may repeat that answer for a minute. Pauses between two looks grow,
    since many processes may wait in one directory.
    """
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while path.name not in os.listdir(path.parent):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{path} was not written within {seconds:g} s")
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
    return read_text(path)


def own_file(path: str | Path, flags: int) -> int:
    """Open a file to write, as an `opener` for `open`; DataError for a link, pipe or device."""
    try:
        # O_NONBLOCK: opening a pipe would wait for a reader.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
    else:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    raise DataError(f"{path} is a link, a pipe or a device, expected a file to write; remove it")


def append_whole(path: Path, content: bytes, sync: bool = False) -> None:
    """Append all lines in `content`, or none: on a full disk, a part of them is removed again.

    With `sync`, the file and its name are on disk when this returns; else after `sync_file`. A half
    line that a power failure left at the end is cut away first.
    """
    with named_errors(path):
        descriptor = own_file(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            # A writer holds this lock, so that no process cuts away a line while it is written.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            if not _cut_half_line(descriptor):
                content = b"\n" + content  # the half line stays, and must not join this one
            _append_to(descriptor, content, sync)
        finally:
            os.close(descriptor)
    if sync:  # every time: the process that created the file may have been killed before its sync
        fsync_directory(path.parent)


def _cut_half_line(descriptor: int) -> bool:
    """Cut away a half line at the end if no process is writing it; return whether none is left."""
    if _end_of_lines(descriptor) == os.fstat(descriptor).st_size:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        while (end := _end_of_lines(descriptor)) < os.fstat(descriptor).st_size:
            os.ftruncate(descriptor, end)
        return True
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)


def _end_of_lines(descriptor: int) -> int:
    """Return where the last whole line ends; last lines with zero bytes are not whole.

    A block that a power failure kept from the disk is read as zeros.
    """
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, _HALF_LINE_BYTES, max(0, size - _HALF_LINE_BYTES))
    *lines, half = tail.split(b"\n")
    while lines and b"\0" in lines[-1]:
        half = lines.pop() + b"\n" + half
    return size - len(half)


def _append_to(descriptor: int, content: bytes, sync: bool) -> None:
    size = os.fstat(descriptor).st_size
    written = 0
    try:
        while written < len(content):
            written += os.write(descriptor, content[written:])
        if sync:
            os.fsync(descriptor)
    except OSError:
        # If another process has appended since, truncating would remove its lines, too.
        if written and os.fstat(descriptor).st_size == size + written:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size)
        raise


def fsync_directory(path: Path) -> None:
    """Make renames inside `path` survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make a file's contents and name survive a power failure; a missing file is no error."""
    with contextlib.suppress(FileNotFoundError):
        fsync_file(path)
        fsync_directory(path.parent)


def fsync_file(path: Path) -> None:
    """Make the contents of a file that other code wrote survive a power failure."""
    fsync_directory(path)  # the same calls: open read-only, fsync, close


def sync_tree(root: Path) -> None:
    """Make everything below a directory survive a power failure, whatever wrote it."""
    paths = [path for path in root.rglob("*") if not path.is_symlink()]
    read_together(fsync_file, [*paths, root])


def make_directory(path: Path, mode: int = 0o777) -> Path:
    """Create a directory and its parents unless they exist; a power failure does not undo it.

    `mode` is the permissions of `path` itself, less the user's umask.
    """
    # Sync `path` also if it exists: the process that made it may have been killed before.
    made = [path, *(parent for parent in path.parents if not parent.exists())]
    path.mkdir(parents=True, exist_ok=True, mode=mode)
    for directory in made:
        with contextlib.suppress(PermissionError):  # a parent that cannot be listed
            fsync_directory(directory.parent)
    return path


def move(source: Path, target: Path, sync: bool = True) -> None:
    """Rename a file or directory whose contents are synced; a power failure does not undo it.

    Without `sync`, the caller syncs the target's directory, once after many moves.
    """
    os.rename(source, target)
    if sync:
        fsync_directory(target.parent)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's contents as hexadecimal text."""
    with open(path, "rb") as file:
        return sha256_of_file(file)


def sha256_of_file(file: BinaryIO) -> str:
    """Return the SHA-256 of an opened file, even if another file has its name by now."""
    digest = hashlib.sha256()
    file.seek(0)
    while block := file.read(HASH_BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class Content:
    """What a file has to contain."""

    bytes: Count
    sha256: Sha256

    def mismatch(self, path: Path) -> str | None:
        """Return how the file differs; None if it does not."""
        if (size := path.stat().st_size) != self.bytes:
            return f"{size} bytes arrived, expected {self.bytes}"
        return self.hash_mismatch(sha256_of(path))

    def hash_mismatch(self, sha256: str) -> str | None:
        """Return how a hash differs; None if it does not."""
        if sha256 == self.sha256:
            return None
        return f"its SHA-256 is {sha256[:16]}..., expected {self.sha256[:16]}..."


def content_of(path: Path) -> Content:
    """Return what the file contains now."""
    return Content(path.stat().st_size, sha256_of(path))


def read_text(path: Path, limit: int = SMALL_FILE_BYTES) -> str:
    """Return the text of a file; ValueError if it is not UTF-8, or as `read_regular` raises it."""
    return read_regular(path, limit).decode()


def end_of(path: Path, most: int = TAIL_BYTES) -> str:
    """Return the end of a log of any size; "" if it is missing or no regular file."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return file.read(most).decode(errors="replace")
    except (FileNotFoundError, ValueError):
        return ""


def read_regular(path: Path, limit: int) -> bytes:
    """Return a file's contents; ValueError if it is not regular or is larger than `limit`."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > limit:
            raise ValueError(f"it has {size:,} bytes, expected at most {limit:,}")
        # Reading `limit` bytes would allocate them; reading none would not show a failing disk.
        return file.read(max(size, 1))


def open_regular(path: Path) -> BinaryIO:
    """Open a file that others may have written.

    ValueError if it is not a regular one, such as a pipe, which could block its reader forever.
    """
    try:
        # O_NONBLOCK: opening a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:  # `open` never opens a socket
            raise ValueError("it is a socket") from None
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise ValueError("it is a pipe, socket or device")


def read_json(path: Path, limit: int = SMALL_FILE_BYTES) -> Any:
    """Return the value in a JSON file that others may have written.

    ValueError has the reason: not JSON, no regular file, or more bytes than `limit`. In memory,
    JSON may take 30 times its size.
    """
    return parse_json(read_regular(path, limit))


def read_value(kind: Any, path: Path, limit: int = SMALL_FILE_BYTES, **options: bool) -> Any:
    """Return a JSON file's value, checked by `from_json` to be of a type; errors as `read_json`."""
    return from_json(kind, read_regular(path, limit), **options)


def lines_of(path: Path, longest: int = LARGEST_LINE_BYTES, start: int = 0) -> Iterator[bytes]:
    """Yield the lines, with their ends, of a file that others may have written.

    Reading begins at the byte `start`. Only the first `longest` bytes of a line are yielded. A
    missing file has no lines; DataError if it is not a regular file.
    """
    with contextlib.suppress(FileNotFoundError), open_appended(path) as file:
        file.seek(start)
        while line := file.readline(longest):
            yield line
            while len(line) == longest and not line.endswith(b"\n"):
                _skip_hole(file)
                line = file.readline(longest)


def open_appended(path: Path) -> BinaryIO:
    """Open a file that a run appends to; DataError if it is not a regular one."""
    try:
        return open_regular(path)
    except ValueError as error:
        raise DataError(f"{path} cannot be read ({error}); move it away") from None


def _skip_hole(file: BinaryIO) -> None:
    """Move to the file's next data: a hole of terabytes takes no disk, but hours to read."""
    try:
        file.seek(os.lseek(file.fileno(), file.tell(), os.SEEK_DATA))
    except OSError as error:
        if error.errno == errno.ENXIO:  # no data follows
            file.seek(0, os.SEEK_END)


@functools.cache
def warn_of_lines(logger: logging.Logger, path: Path, what: str, *numbers: int) -> None:
    """Warn once that lines were skipped, as they are not `what`; name the first of `numbers`."""
    if numbers:
        shown = [*map(str, numbers[:9]), *([f"{len(numbers) - 9} more"] if numbers[9:] else [])]
        logger.warning("%s: skipped what is not %s in line %s", path, what, ", ".join(shown))


def folder_below(root: Path, name: str) -> Path:
    """Create the folder `name` below `root` unless it exists; DataError if a part is a link."""
    return make_directory(path_below(root, f"{name}/any").parent)


def settled_state(path: Path) -> tuple[int, ...] | None:
    """Return a file's inode, size and times, which change with its contents.

    None if it has changed a moment ago: after a second change it might have the same times.
    """
    status = path.stat()
    if time.time_ns() - status.st_ctime_ns <= SETTLED_NS:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def read_together(read: Callable[[Path], T], paths: Sequence[Path]) -> list[T]:
    """Return `read(path)` for each path, in order; up to 32 files are read at a time."""
    if len(paths) <= _FILES_WITHOUT_THREADS:
        return [read(path) for path in paths]
    with ThreadPoolExecutor(min(_MOST_THREADS, len(paths))) as pool:
        return list(pool.map(read, paths))
