"""The files of raw text that a build reads, in an order that depends on nothing but names; see `CorpusConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data_pipeline.config import CorpusConfig
from data_pipeline.errors import ConfigError, DataError

COMPRESSED_SUFFIXES = (".gz", ".zst")
SourceKind = Literal["text", "jsonl", "tar", "parquet"]
# What a name ends in, before .gz or .zst; every other file is text.
KIND_SUFFIXES: dict[SourceKind, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson"),
    "tar": (".tar",),
    "parquet": (".parquet",),
}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of raw text. `name` does not depend on where the input lies, so that it can go into the corpus."""

    path: Path
    name: str
    kind: SourceKind
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
    wanted = [name for name in names if not config.suffixes or without_compression(name).endswith(config.suffixes)]
    return [_source(root / name, prefix + name, config) for name in wanted]


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
    """A file's name without .gz or .zst."""
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    return name
