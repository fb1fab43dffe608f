"""Tar archives as a stream of members. Damage is an error: what other readers take for the end of the archive is not.

POSIX.1-1988 (ustar) headers, with the long names and sizes of pax and GNU tar.
"""

from __future__ import annotations

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
SKIP_BYTES = 1 << 20


class TarError(Exception):
    """The archive is damaged or cut off; the message says where."""


@dataclass(frozen=True)
class TarMember:
    """A file in an archive. `read` gives its next bytes, while the walk stands at this member."""

    name: str
    size: int
    is_file: bool  # else a link or device, whose contents are elsewhere
    _file: BinaryIO

    def read(self) -> bytes:
        """All of its contents, once."""
        contents = self._file.read(self.size)
        if len(contents) < self.size:
            raise TarError(f"it ends inside {self.name}")
        return contents


def padded(size):  # type: ignore[no-untyped-def]
    """The bytes that contents of `size` take up; a number or an array of numbers."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def tar_members(file: BinaryIO) -> Iterator[TarMember]:
    """Everything but directories in its order; TarError where the archive is damaged or ends without its end."""
    place = 0
    extended: dict[str, str] = {}
    while True:
        header = file.read(BLOCK_BYTES)
        if header == bytes(BLOCK_BYTES):
            return _check_end(file, place)
        if len(header) < BLOCK_BYTES:
            raise TarError(f"it ends at byte {place + len(header)} without the mark of its end")
        _check_sum(header, place)
        kind, size = header[TYPE_OFFSET : TYPE_OFFSET + 1], _size(header, place)
        place += BLOCK_BYTES
        begin = place
        if kind in (PAX_TYPE, PAX_GLOBAL_TYPE, GNU_NAME_TYPE, GNU_LINK_TYPE):
            contents = _read_header(file, size, place)
            place += size
            if kind == PAX_TYPE:
                extended |= _pax_records(contents)
            elif kind == GNU_NAME_TYPE:
                extended["path"] = contents.rstrip(b"\0").decode(errors="replace")
        else:
            size = int(extended["size"]) if extended.get("size", "").isdigit() else size
            if kind != DIRECTORY_TYPE:
                counting, name = _Counting(file), extended.get("path", _name(header))
                yield TarMember(name, size, kind in REGULAR_TYPES, counting)  # type: ignore[arg-type]
                place += counting.count
            extended = {}
        _skip(file, begin + padded(size) - place, begin)
        place = begin + padded(size)


def pax_path(memory: mmap, place: int) -> str:
    """The name in the pax header at `place`."""
    size = int(memory[place + SIZE_FIELD.start : place + SIZE_FIELD.stop], 8)
    begin = place + BLOCK_BYTES
    return _pax_records(memory[begin : begin + size]).get("path", "")


class _Counting:
    """Reads from a file and knows how much."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.count = 0

    def read(self, size: int) -> bytes:
        contents = self._file.read(size)
        self.count += len(contents)
        return contents


def _check_end(file: BinaryIO, place: int) -> None:
    """Behind the first empty block there is another one, and nothing else: a zeroed header looks like an end, too."""
    rest = file.read(BLOCK_BYTES)
    if len(rest) < BLOCK_BYTES:
        raise TarError(
            f"it ends at byte {place + BLOCK_BYTES + len(rest)} with half the mark of its end"
        )
    while rest:
        if any(rest):
            raise TarError(f"behind the mark of its end at byte {place} there is more")
        rest = file.read(SKIP_BYTES)


def _check_sum(header: bytes, place: int) -> None:
    try:
        stored = int(header[CHECKSUM_FIELD].split(b"\0")[0] or b"x", 8)
    except ValueError:
        stored = -1
    if stored != sum(header) - sum(header[CHECKSUM_FIELD]) + 8 * ord(" "):
        raise TarError(f"the header at byte {place} is damaged")


def _size(header: bytes, place: int) -> int:
    field = header[SIZE_FIELD.start : SIZE_FIELD.stop + 1]
    if field[0] & 0x80:  # GNU's way of writing sizes of 8 GiB and more
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.rstrip(b"\0 ") or b"0", 8)
    except ValueError:
        raise TarError(f"the header at byte {place} has no size") from None


def _name(header: bytes) -> str:
    name, prefix = header[NAME_FIELD].split(b"\0")[0], header[PREFIX_FIELD].split(b"\0")[0]
    is_ustar = header[257:263] == b"ustar\0"  # GNU tar keeps other things where the prefix would be
    return (prefix + b"/" + name if prefix and is_ustar else name).decode(errors="replace")


def _read_header(file: BinaryIO, size: int, place: int) -> bytes:
    contents = file.read(size) if size <= LARGEST_HEADER_BYTES else b""
    if len(contents) < size:
        raise TarError(f"the extended header at byte {place} is damaged")
    return contents


def _pax_records(contents: bytes) -> dict[str, str]:
    """The `LENGTH KEY=VALUE` lines of a pax header."""
    records = {}
    while contents:
        length, _, rest = contents.partition(b" ")
        if not length.isdigit() or not 0 < int(length) <= len(contents):
            raise TarError("a pax header is damaged")
        key, _, value = rest[: int(length) - len(length) - 2].partition(b"=")
        records[key.decode(errors="replace")] = value.decode(errors="replace")
        contents = contents[int(length) :]
    return records


def _skip(file: BinaryIO, count: int, place: int) -> None:
    while count:
        block = file.read(min(count, SKIP_BYTES))
        if not block:
            raise TarError(f"it ends inside the contents that begin at byte {place}")
        count -= len(block)
