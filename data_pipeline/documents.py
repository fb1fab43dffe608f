"""Documents out of text folders and JSONL files, in an order that depends on nothing but names; see `CorpusConfig`.

A record that cannot be used comes out as a Reject with its place and the reason: nothing is lost silently.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from data_pipeline.config import CorpusConfig
from data_pipeline.errors import ConfigError, DataError
from data_pipeline.files import naming

COMPRESSED_SUFFIXES = (".gz", ".zst")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Document:
    """One text, read whole and in order by one lane."""

    id: str
    text: str
    source: str  # file, or file:line


@dataclass(frozen=True, slots=True)
class Reject:
    """A record that was left out."""

    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of raw text. `name` does not depend on where the input lies, so that it can go into the corpus."""

    path: Path
    name: str
    kind: Literal["text", "jsonl"]
    size: int
    modified: int  # nanoseconds


def list_sources(roots: tuple[Path, ...], config: CorpusConfig) -> list[SourceFile]:
    """Every input file below `roots`, in the order of the roots and then of the names; DataError when there is none."""
    sources = [source for root in roots for source in _sources_below(root, len(roots) > 1, config)]
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"two inputs contain the same name {twice!r}; rename one of the folders or files")
    if not sources:
        wanted = f" whose name ends in {' or '.join(config.suffixes)}" if config.suffixes else ""
        raise DataError(f"{', '.join(map(str, roots))}: no files{wanted} found; check input and suffixes")
    return sources


def _sources_below(root: Path, is_one_of_many: bool, config: CorpusConfig) -> list[SourceFile]:
    if not root.exists():
        raise DataError(f"input {root} does not exist; give a file or folder of text")
    if root.is_file():
        return [_source(root, root.name, config)]
    prefix = f"{root.resolve().name}/" if is_one_of_many else ""
    relative = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    visible = (path for path in relative if not any(part.startswith(".") for part in path.parts))
    names = sorted(path.as_posix() for path in visible)
    wanted = [name for name in names if not config.suffixes or _without_compression(name).endswith(config.suffixes)]
    return [_source(root / name, prefix + name, config) for name in wanted]


def _source(path: Path, name: str, config: CorpusConfig) -> SourceFile:
    is_jsonl = config.format == "jsonl"
    if config.format == "auto":
        is_jsonl = _without_compression(name).endswith(JSONL_SUFFIXES)
    status = path.stat()
    printable = name.encode(errors="backslashreplace").decode()  # a file's name may be any bytes
    return SourceFile(path, printable, "jsonl" if is_jsonl else "text", status.st_size, status.st_mtime_ns)


def _without_compression(name: str) -> str:
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def read_documents(source: SourceFile, config: CorpusConfig) -> Iterator[Document | Reject]:
    """Every record of a file in its order. DataError when the file itself cannot be read to its end."""
    try:
        with naming(source.path), open_decompressed(source.path) as file:
            yield from (_read_text if source.kind == "text" else _read_jsonl)(file, source, config)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{source.path} is damaged or cut off ({error}); fetch it again or take it out") from None


def open_decompressed(path: Path) -> BinaryIO:
    """The contents of a plain, .gz or .zst file."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".zst":
        return io.BufferedReader(_ZstFile(path), BLOCK_BYTES)
    return open(path, "rb", BLOCK_BYTES)


class _ZstFile(io.RawIOBase):
    """Decompressed bytes of a .zst file of one or more frames; a file that ends inside a frame raises EOFError."""

    def __init__(self, path: Path) -> None:
        import zstandard

        self._file = open(path, "rb")  # noqa: SIM115 (closed with this file)
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
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

    def close(self) -> None:
        self._file.close()
        super().close()


def _read_text(file: BinaryIO, source: SourceFile, config: CorpusConfig) -> Iterator[Document | Reject]:
    raw = file.read(config.max_document_bytes + 1)
    if len(raw) > config.max_document_bytes:
        yield Reject(source.name, f"longer than max_document_bytes={config.max_document_bytes}")
        return
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        yield Reject(source.name, f"invalid UTF-8 at byte {error.start}")
        return
    yield Document(source.name, text, source.name) if text.strip() else Reject(source.name, "empty")


def _read_jsonl(file: BinaryIO, source: SourceFile, config: CorpusConfig) -> Iterator[Document | Reject]:
    # JSON may write a character as \u00xx, six bytes, so a line may be longer than its text.
    longest_line = 6 * config.max_document_bytes + BLOCK_BYTES
    number = 0
    while line := file.readline(longest_line):
        number += 1
        place = f"{source.name}:{number}"
        if len(line) == longest_line and not line.endswith(b"\n"):
            yield Reject(place, f"longer than max_document_bytes={config.max_document_bytes}")
            while (line := file.readline(BLOCK_BYTES)) and not line.endswith(b"\n"):
                pass
        elif line.strip():
            yield _parse_record(line.rstrip(b"\r\n"), place, config)


def _parse_record(line: bytes, place: str, config: CorpusConfig) -> Document | Reject:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Reject(place, f"invalid UTF-8 at byte {error.start} of the line")
    except (ValueError, RecursionError) as error:
        return Reject(place, f"invalid JSON: {error}")
    if not isinstance(record, dict):
        return Reject(place, f"found {type(record).__name__}, expected a JSON object")
    if config.text_field not in record:
        return Reject(place, f"no field {config.text_field!r}")
    text = record[config.text_field]
    if not isinstance(text, str):
        return Reject(place, f"field {config.text_field!r} holds {type(text).__name__}, expected text")
    if not text.strip():
        return Reject(place, "empty")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        return Reject(place, f"half a surrogate pair at character {error.start}")
    if size > config.max_document_bytes:
        return Reject(place, f"longer than max_document_bytes={config.max_document_bytes}")
    return Document(_document_id(record.get(config.id_field), place), text, place)


def _document_id(value: object, place: str) -> str:
    if not isinstance(value, str | int) or value == "":
        return place
    return str(value).encode(errors="replace").decode()
