"""Files that may be compressed, read as if they were not."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from typing import BinaryIO

BLOCK_BYTES = 1 << 20
COMPRESSED_SUFFIXES = (".gz", ".zst")
LARGEST_WINDOW = 1 << 31  # bytes of memory a .zst file may ask for, as `zstd --long=31` makes them
DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile)  # what reading a damaged or cut file raises


def decompressed(file: BinaryIO, suffix: str) -> BinaryIO:
    """The contents of a file whose name ends in .gz, .zst, or neither. `file` stays the caller's to close."""
    if suffix in COMPRESSED_SUFFIXES and not os.fstat(file.fileno()).st_size:
        raise EOFError(
            "it is empty"
        )  # what an aborted transfer leaves; even nothing, compressed, has a frame
    if suffix == ".gz":
        return gzip.open(file, "rb")  # type: ignore[return-value]
    if suffix == ".zst":
        return io.BufferedReader(_ZstFile(file), BLOCK_BYTES)
    return file


class _ZstFile(io.RawIOBase):
    """Decompressed bytes of a .zst file of one or more frames; a file that ends inside a frame raises EOFError."""

    def __init__(self, file: BinaryIO) -> None:
        import zstandard

        self._file = file
        self._new_frame = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj
        self._error = zstandard.ZstdError
        self._frame = self._new_frame()
        self._is_inside = False
        self._ready = b""

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
        compressed = compressed or self._file.read(BLOCK_BYTES)
        if self._frame.eof:
            self._frame, self._is_inside = self._new_frame(), False
        if not compressed:
            if self._is_inside:
                raise EOFError("the last frame is incomplete")
            return False
        self._is_inside = True
        try:
            self._ready = self._frame.decompress(compressed)
        except self._error as error:
            raise EOFError(str(error)) from None
        self._is_inside = not self._frame.eof
        return True
