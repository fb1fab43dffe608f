"""Tar archives as a stream of members: ustar headers, with the long names and sizes of pax and GNU.

Every invalid block is an error. Python's tarfile and others take an invalid header for the end of
the archive and lose the members after it silently, which is why this reader exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from mmap import mmap
from typing import BinaryIO

BLOCK_BYTES = 512
NAME_FIELD, SIZE_FIELD, CHECKSUM_FIELD, PREFIX_FIELD = (
    slice(0, 100),
    slice(124, 135),
    slice(148, 156),
    slice(345, 500),
)
TYPE_OFFSET = 156
MAGIC_FIELD, MAGIC = slice(257, 262), b"ustar"
REGULAR_TYPES, DIRECTORY_TYPE = (b"0", b"\0", b"7"), b"5"
PAX_TYPE, PAX_GLOBAL_TYPE, GNU_NAME_TYPE, GNU_LINK_TYPE = b"x", b"g", b"L", b"K"
LARGEST_HEADER_BYTES = 1 << 20  # of long names and other extended headers
NUMBER = re.compile(r"[0-9]{1,18}")  # Python refuses to read thousands of digits
SKIP_BYTES = 1 << 20


class TarError(Exception):
    """The archive is corrupted or truncated; the message says where."""


@dataclass(frozen=True)
class TarMember:
    """A file in an archive. `read` works until the next member is requested."""

    name: str
    size: int
    is_file: bool  # False: a link or device without contents
    _file: BinaryIO

    def read(self) -> bytes:
        """Return its contents; can be called once."""
        contents = self._file.read(self.size)
        if len(contents) < self.size:
            raise TarError(f"it ends inside {self.name}")
        return contents


def padded(size):  # type: ignore[no-untyped-def]
    """Return the bytes that contents of `size`, a number or an array, take up."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def tar_members(file: BinaryIO) -> Iterator[TarMember]:
    """Yield all members except directories, in order; TarError if the archive is invalid."""
    offset = 0
    extended: dict[str, str] = {}
    while True:
        header = file.read(BLOCK_BYTES)
        if header == bytes(BLOCK_BYTES):
            return _check_end(file, offset)
        if len(header) < BLOCK_BYTES:
            raise TarError(
                f"it ends at byte {offset + len(header)} without an end-of-archive marker"
            )
        _check_sum(header, offset)
        kind, size = header[TYPE_OFFSET : TYPE_OFFSET + 1], _size(header, offset)
        offset += BLOCK_BYTES
        start = offset
        if kind in (PAX_TYPE, PAX_GLOBAL_TYPE, GNU_NAME_TYPE, GNU_LINK_TYPE):
            contents = _read_header(file, size, offset)
            offset += size
            if kind == PAX_TYPE:
                extended |= _pax_records(contents)
            elif kind == GNU_NAME_TYPE:
                extended["path"] = contents.rstrip(b"\0").decode(errors="replace")
        else:
            size = _number(extended["size"], offset) if "size" in extended else size
            if kind != DIRECTORY_TYPE:
                counting, name = _Counting(file), extended.get("path", _name(header))
                yield TarMember(name, size, kind in REGULAR_TYPES, counting)  # type: ignore[arg-type]
                offset += counting.count
            extended = {}
        _skip(file, start + padded(size) - offset, start)
        offset = start + padded(size)


def pax_path(memory: mmap, offset: int) -> str:
    """Return the name in the pax header at `offset`."""
    size = int(memory[offset + SIZE_FIELD.start : offset + SIZE_FIELD.stop], 8)
    start = offset + BLOCK_BYTES
    return _pax_records(memory[start : start + size]).get("path", "")


class _Counting:
    """Reads from a file and counts the bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.count = 0

    def read(self, size: int) -> bytes:
        contents = self._file.read(size)
        self.count += len(contents)
        return contents


def _check_end(file: BinaryIO, offset: int) -> None:
    """Raise TarError unless a second empty block, and nothing else, follows the first at `offset`.

    A header that a disk has zeroed looks like the first block of the end-of-archive marker.
    """
    rest = file.read(BLOCK_BYTES)
    if len(rest) < BLOCK_BYTES:
        raise TarError(
            f"it ends at byte {offset + BLOCK_BYTES + len(rest)} with half an end-of-archive marker"
        )
    while rest:
        if any(rest):
            raise TarError(f"there is data after the end-of-archive marker at byte {offset}")
        rest = file.read(SKIP_BYTES)


def _check_sum(header: bytes, offset: int) -> None:
    try:
        stored = int(header[CHECKSUM_FIELD].split(b"\0")[0] or b"x", 8)
    except ValueError:
        stored = -1
    if stored != sum(header) - sum(header[CHECKSUM_FIELD]) + 8 * ord(" "):
        raise TarError(f"the header at byte {offset} is corrupted")


def _size(header: bytes, offset: int) -> int:
    field = header[SIZE_FIELD.start : SIZE_FIELD.stop + 1]
    if field[0] & 0x80:  # GNU tar stores sizes from 8 GiB on in binary
        return int.from_bytes(field[1:], "big")
    digits = field.rstrip(b"\0 ").lstrip(b" ") or b"0"
    if digits.strip(b"01234567"):
        raise TarError(f"the header at byte {offset} has no valid size")
    return int(digits, 8)


def _number(digits: str, offset: int) -> int:
    if not NUMBER.fullmatch(digits):
        raise TarError(f"the extended header before byte {offset} has no valid size")
    return int(digits)


def _name(header: bytes) -> str:
    name, prefix = header[NAME_FIELD].split(b"\0")[0], header[PREFIX_FIELD].split(b"\0")[0]
    is_ustar = header[257:263] == b"ustar\0"  # GNU tar uses the prefix for other data
    return (prefix + b"/" + name if prefix and is_ustar else name).decode(errors="replace")


def _read_header(file: BinaryIO, size: int, offset: int) -> bytes:
    contents = file.read(size) if size <= LARGEST_HEADER_BYTES else b""
    if len(contents) < size:
        raise TarError(f"the extended header at byte {offset} is corrupted")
    return contents


def _pax_records(contents: bytes) -> dict[str, str]:
    """Return the `LENGTH KEY=VALUE` records of a pax header."""
    records = {}
    while contents:
        length, _, rest = contents.partition(b" ")
        is_number = NUMBER.fullmatch(length.decode(errors="replace"))
        if not is_number or not 0 < int(length) <= len(contents):
            raise TarError("a pax header is corrupted")
        key, _, value = rest[: int(length) - len(length) - 2].partition(b"=")
        records[key.decode(errors="replace")] = value.decode(errors="replace")
        contents = contents[int(length) :]
    return records


def _skip(file: BinaryIO, count: int, offset: int) -> None:
    while count:
        block = file.read(min(count, SKIP_BYTES))
        if not block:
            raise TarError(f"it ends inside the contents that start at byte {offset}")
        count -= len(block)
