"""The files of raw text that a build reads, in an order that depends on nothing but names; see `CorpusConfig`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data_pipeline.builder.compression import COMPRESSED_SUFFIXES
from data_pipeline.config import CorpusConfig
from data_pipeline.errors import ConfigError, DataError

PARTS_SUFFIX = ".parts"  # of the directory beside the output in which parts are built
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
    ((twice, count),) = Counter(source.name for source in sources).most_common(1) or [("", 0)]
    if count > 1:
        raise ConfigError(
            f"two inputs contain the same name {twice!r}; rename one of the folders or files"
        )
    if not sources:
        wanted = f" whose name ends in {' or '.join(config.suffixes)}" if config.suffixes else ""
        raise DataError(
            f"{', '.join(map(str, roots))}: no files{wanted} found; check input and suffixes"
        )
    return sources


def _sources_below(root: Path, is_one_of_many: bool, config: CorpusConfig) -> list[SourceFile]:
    if not root.exists():
        raise DataError(f"input {root} does not exist; give a file or folder of text")
    if root.is_file():
        return [_source(root, root.name, config)]
    if root.resolve() in (own := _own_directories(config)):
        raise ConfigError(
            f"input {root} is where a build to {config.output} writes; choose another output"
        )
    prefix = f"{root.resolve().name}/" if is_one_of_many else ""
    names = sorted(path.relative_to(root).as_posix() for path in _files_below(root, own))
    wanted = [
        name
        for name in names
        if not config.suffixes or without_compression(name).endswith(config.suffixes)
    ]
    return [_source(root / name, prefix + name, config) for name in wanted]


def _own_directories(config: CorpusConfig) -> frozenset[Path]:
    """Where a build writes, which is no input even if it lies below one."""
    output = config.output.resolve()
    return frozenset((output, output.with_name(f"{output.name}{PARTS_SUFFIX}")))


def _files_below(
    folder: Path, left_out: frozenset[Path], above: frozenset[Path] = frozenset()
) -> Iterator[Path]:
    """Every file, also behind links. What cannot be listed or leads in a circle is an error, not left out."""
    real = folder.resolve()
    if real in above:
        raise DataError(f"input {folder} is a link to a folder that it lies in; remove the link")
    if real in left_out:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _files_below(Path(entry.path), left_out, above | {real})
            elif entry.is_file():
                yield Path(entry.path)
            elif entry.is_symlink():
                target = os.readlink(entry.path)
                raise DataError(
                    f"input {entry.path} is a link to {target}, which does not exist; restore or remove it"
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
    """A file's name without .gz or .zst."""
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    return name
