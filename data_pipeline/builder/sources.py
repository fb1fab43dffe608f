"""The input files of a build, in an order that depends only on their names, and decompression."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from data_pipeline.config import CorpusConfig
from data_pipeline.errors import ConfigError, DataError

PARTS_SUFFIX = ".parts"  # of the directory next to the output in which parts are built
SourceKind = Literal["text", "jsonl", "tar", "parquet"]
# Name endings before .gz or .zst; every other file is text.
KIND_SUFFIXES: dict[SourceKind, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson"),
    "tar": (".tar",),
    "parquet": (".parquet",),
}
BLOCK_BYTES = 1 << 20
COMPRESSED_SUFFIXES = (".gz", ".zst")
LARGEST_WINDOW = 1 << 31  # of a .zst file, in bytes of host memory; `zstd --long=31` needs it
CORRUPTION = (EOFError, zlib.error, gzip.BadGzipFile)  # raised by `decompressed` files


@dataclass(frozen=True, slots=True)
class SourceFile:
    """An input file. `name` does not depend on the input's location: it goes into the corpus."""

    path: Path
    name: str
    kind: SourceKind
    size: int
    modified: int  # nanoseconds


def list_sources(roots: tuple[Path, ...], config: CorpusConfig) -> list[SourceFile]:
    """Return every input file under `roots`, by root and then by name; DataError if none."""
    sources = [source for root in roots for source in _sources_under(root, len(roots) > 1, config)]
    if not sources:
        wanted = f" whose name ends in {' or '.join(config.suffixes)}" if config.suffixes else ""
        raise DataError(
            f"{', '.join(map(str, roots))}: no files{wanted} found; check input and suffixes"
        )
    ((name, count),) = Counter(source.name for source in sources).most_common(1)
    if count > 1:
        raise ConfigError(
            f"two inputs contain the same name {name!r}; rename one of the folders or files"
        )
    return sources


def _sources_under(root: Path, is_one_of_many: bool, config: CorpusConfig) -> list[SourceFile]:
    if not root.exists():
        raise DataError(f"input {root} does not exist; give a file or folder of text")
    if root.is_file():
        return [_source(root, root.name, config)]
    # What a build writes is not input, even if it is in an input folder.
    output = config.output.resolve()
    own = frozenset((output, output.with_name(f"{output.name}{PARTS_SUFFIX}")))
    if root.resolve() in own:
        raise ConfigError(
            f"input {root} is where a build to {config.output} writes; choose another output"
        )
    prefix = f"{root.resolve().name}/" if is_one_of_many else ""
    names = sorted(path.relative_to(root).as_posix() for path in _files_under(root, own))
    return [
        _source(root / name, prefix + name, config)
        for name in names
        if not config.suffixes or without_compression(name).endswith(config.suffixes)
    ]


def _files_under(
    folder: Path, excluded: frozenset[Path], parents: frozenset[Path] = frozenset()
) -> Iterator[Path]:
    """Yield every file, through symlinks too. Unreadable folders and broken links are errors."""
    real = folder.resolve()
    if real in parents:
        raise DataError(f"input {folder} is a link to one of its parent folders; remove the link")
    if real in excluded:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _files_under(Path(entry.path), excluded, parents | {real})
            elif entry.is_file():
                yield Path(entry.path)
            elif entry.is_symlink():
                raise DataError(
                    f"input {entry.path} is a link to {os.readlink(entry.path)}, "
                    "which does not exist; restore or remove it"
                )


def _source(path: Path, name: str, config: CorpusConfig) -> SourceFile:
    kind = _kind_of(name) if config.format == "auto" else config.format
    status = path.stat()
    printable = name.encode(errors="backslashreplace").decode()  # a file's name may be any bytes
    return SourceFile(path, printable, kind, status.st_size, status.st_mtime_ns)


def _kind_of(name: str) -> SourceKind:
    name = without_compression(name)
    for kind, suffixes in KIND_SUFFIXES.items():
        if name.endswith(suffixes):
            return kind
    return "text"


def without_compression(name: str) -> str:
    """Return a file's name without .gz or .zst."""
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def decompressed(file: BinaryIO, suffix: str) -> BinaryIO:
    """Return the contents of a file by its suffix; one of CORRUPTION if they are invalid.

    The caller closes `file`.
    """
    if suffix in COMPRESSED_SUFFIXES and not os.fstat(file.fileno()).st_size:
        # An aborted transfer leaves this. Compressed empty contents are not empty.
        raise EOFError("it is empty")
    if suffix == ".gz":
        return gzip.open(file, "rb")  # type: ignore[return-value]
    if suffix == ".zst":
        return io.BufferedReader(_ZstFile(file), BLOCK_BYTES)
    return file


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
