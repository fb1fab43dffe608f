"""Decompression of input files by the end of their names: .gz, .zst, or neither.

Damaged files and files that nothing here reads are two errors: they need two kinds of advice.
"""

import gzip
import io
import os
import zlib
from typing import BinaryIO

BLOCK_BYTES = 1 << 20
COMPRESSED_SUFFIXES = (".gz", ".zst")
LARGEST_WINDOW = 1 << 31  # bytes of host memory for a .zst file; `zstd --long=31` needs them all
# Decompressed at once: 4 bytes of .zst can be 128 KiB of text, so these are 32 MiB at most.
ZST_PIECE_BYTES = 1 << 10
CORRUPTION = (EOFError, zlib.error, gzip.BadGzipFile)  # raised by `decompressed` files


class InvalidRecords(Exception):
    """A file is not what its kind says, or ends too early; the message says how."""


class UnreadableRecords(InvalidRecords):
    """A file may be whole, but nothing here reads it; the message says why, and what to do."""


def without_compression(name: str) -> str:
    """Return a file's name in lower case, without .gz or .zst."""
    name = name.lower()
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def is_compressed(name: str) -> bool:
    """Whether the name ends in .gz or .zst, in any case."""
    return name.lower().endswith(COMPRESSED_SUFFIXES)


def decompressed(file: BinaryIO, name: str) -> BinaryIO:
    """Return a file's contents by its name; one of CORRUPTION if invalid. `file` stays open."""
    if is_compressed(name) and not os.fstat(file.fileno()).st_size:
        # An aborted transfer leaves an empty file. Compressed, empty contents are not empty.
        raise EOFError("it is empty")
    if name.lower().endswith(".gz"):
        return gzip.open(file, "rb")  # type: ignore[return-value]
    if name.lower().endswith(".zst"):
        return unpacked_zst(file)
    return file


def unpacked_zst(file: BinaryIO) -> BinaryIO:
    """Return the contents of a .zst file; EOFError where they are invalid."""
    return io.BufferedReader(_ZstFile(file), BLOCK_BYTES)


class _ZstFile(io.RawIOBase):
    """Contents of a .zst file of one or more frames; EOFError if it ends inside a frame.

    zstandard's own reader takes a truncated frame for the end of the file.
    """

    def __init__(self, file: BinaryIO) -> None:
        import zstandard

        self._file = file
        self._new_frame = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj
        self._error = zstandard.ZstdError
        self._frame = self._new_frame()
        self._is_inside = False
        self._ready = memoryview(b"")  # slices of it are not copied

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        while not self._ready:
            if not self._more():
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _more(self) -> bool:
        compressed = self._frame.unused_data if self._frame.eof else b""
        compressed = compressed or self._file.read(ZST_PIECE_BYTES)
        if self._frame.eof:
            self._frame, self._is_inside = self._new_frame(), False
        if not compressed:
            if self._is_inside:
                raise EOFError("the last frame is incomplete")
            return False
        self._is_inside = True
        try:
            self._ready = memoryview(self._frame.decompress(compressed))
        except self._error as error:
            if "ictionary" in str(error):
                raise UnreadableRecords("it needs a dictionary; compress it without") from None
            raise EOFError(str(error)) from None
        self._is_inside = not self._frame.eof
        return True
