"""The input files of a build, in an order that depends only on their names."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from data_pipeline.builder.compression import without_compression
from data_pipeline.builder.formats import (
    JSON_SUFFIX,
    holds_many,
    holds_records,
    is_companion,
    kind_by_contents,
    kind_by_name,
    lists_files,
    may_read_as,
    stated_kind,
)
from data_pipeline.builder.listings import ListedFile, listed_files, refuse_versions
from data_pipeline.config import CorpusConfig, SourceKind
from data_pipeline.corpora.manifest import MANIFEST_NAME
from foundation.errors import ConfigError, DataError
from foundation.progress import Note, Report

# Stated format -> ends of the files that are read in a folder; a .npz file is then refused.
ARRAY_SUFFIXES: dict[str | None, tuple[str, ...]] = {
    "array": (".bin", ".npy", ".npz"),
    "megatron": (".bin",),
}
PARTS_SUFFIX = ".parts"  # OUTPUT.parts is the directory where parts are built
# How many files of each suffix are opened before the build, to see their format. All are checked
# when they are read; to open millions before would take longer than it saves.
LOOKED_INTO = 16


@dataclass(frozen=True, slots=True)
class SourceFile:
    """An input file. `name` does not depend on the input's location: it goes into the corpus."""

    path: Path
    name: str
    kind: SourceKind
    size: int  # bytes that are read
    file_size: int
    modified: int  # time of the last change, nanoseconds
    inode: tuple[int, int]  # device and number: equal for links and second mounts of a file
    start: int = 0  # offset of the `size` bytes, for a stretch of a stream
    listed: ListedFile | None = None  # its entry in the data set's own list


def list_sources(
    roots: tuple[Path, ...],
    config: CorpusConfig,
    report: Report = lambda what: None,
    is_validation: bool = False,
) -> list[SourceFile]:
    """Return every input file under `roots`, by root and then by name; DataError if none.

    Also DataError for a file that no reader understands. `report` gets a note about skipped files.
    Splits for validation and tests are skipped unless `is_validation`.
    """
    inputs = [_sources_under(root, len(roots) > 1, config, report, is_validation) for root in roots]
    check_apart(inputs, "would be read twice")
    sources = [source for files in inputs for source in files]
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


def check_apart(inputs: Sequence[list[SourceFile]], harm: str) -> None:
    """Raise ConfigError if two inputs have the same file, by links, mounts or names."""
    files: dict[tuple[int, int], Path] = {}
    for source in (source for sources in inputs for source in sources):
        if (other := files.setdefault(source.inode, source.path)) is not source.path:
            same = "" if other == source.path else f", the same file as {other},"
            raise ConfigError(f"{source.path}{same} {harm}; name inputs that share no file")


def check_unchanged(source: SourceFile) -> None:
    """Raise DataError if the file is not as it was when it was listed."""
    status = source.path.stat()
    now = (status.st_size, status.st_mtime_ns, _inode(status))
    if now != (source.file_size, source.modified, source.inode):
        raise DataError(
            f"{source.path} was changed while it was read; build again when nothing writes to it"
        )


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _sources_under(
    root: Path, is_one_of_many: bool, config: CorpusConfig, report: Report, is_validation: bool
) -> list[SourceFile]:
    stated = stated_kind(config)
    if stated == "megatron" and not root.exists():  # Megatron's own way to name a pair of files
        pair = root.with_name(f"{root.name}.bin")
        root = pair if pair.is_file() else root
    if not root.exists():
        is_url = re.match(r"\w+:/", str(root))
        shown = str(root).replace(":/", "://", 1) if is_url else root
        advice = (
            "a build reads no URLs: copy it first" if is_url else "give a file or folder of text"
        )
        raise DataError(f"input {shown} does not exist; {advice}")
    if not root.is_dir():
        if not root.is_file():
            raise _not_a_file(root)
        refuse_versions(root.parent, [root.name])
        return _with_kinds(root.parent, [root.name], "", config)
    _check_folder(root, config)
    prefix = f"{root.resolve().name}/" if is_one_of_many else ""
    files = _files(root, _own_folders(config))
    names = sorted(path.relative_to(root).as_posix() for path in files)

    def tell(reason: str, about: list[str]) -> None:
        report(Note(f"input {root}: {reason}: {_examples(about)}"))

    listed = listed_files(root, names, stated, tell, is_validation)
    suffixes = tuple(suffix.lower() for suffix in config.suffixes) or ARRAY_SUFFIXES.get(stated, "")
    names = [name for name in listed if without_compression(name).endswith(suffixes)]
    read = {*names, *(name.removesuffix(".bin") + ".idx" for name in names if stated == "megatron")}
    if not config.suffixes and (others := [*(listed.keys() - read)]):
        tell(f"left out, since no name ends in {' or '.join(suffixes)}", others)
    if not config.suffixes and (left_out := _companions(root, names, config)):
        tell("left out, since they are about other files", left_out)
        names = [name for name in names if name not in left_out]
    sources = _with_kinds(root, names, prefix, config)
    return [
        replace(source, listed=listed[name]) for name, source in zip(names, sources, strict=True)
    ]


def _own_folders(config: CorpusConfig) -> frozenset[Path]:
    """Return where the build writes, which is not input, even if it is in an input folder."""
    output = config.output.resolve()
    return frozenset((output, output.with_name(f"{output.name}{PARTS_SUFFIX}")))


def _check_folder(root: Path, config: CorpusConfig) -> None:
    if root.resolve() in _own_folders(config):
        raise ConfigError(
            f"input {root} is where a build to {config.output} writes; choose another output"
        )
    for folder in (root, root / "train"):
        if (folder / MANIFEST_NAME).exists() and may_read_as("tar", config):
            raise DataError(
                f"input {root} is a built corpus ({folder / MANIFEST_NAME}), expected text; "
                f"train on it with data.path={root}"
            )


def _files(
    folder: Path, excluded: frozenset[Path], parents: frozenset[Path] = frozenset()
) -> Iterator[Path]:
    """Yield the files of a folder, through symlinks, too; DataError for all else that is in it."""
    real = folder.resolve()
    if real in parents:
        raise DataError(f"input {folder} is a link to one of its parent folders; remove the link")
    if real in excluded:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            path = Path(entry.path)
            if entry.name.startswith((".", "_temporary")):  # _temporary: of a killed Spark job
                continue
            if entry.is_dir():
                yield from _files(path, excluded, parents | {real})
            elif entry.is_file():
                yield path
            elif entry.is_symlink() and not path.exists():
                raise DataError(
                    f"input {entry.path} is a link to {os.readlink(entry.path)}, "
                    "which does not exist; restore or remove it"
                )
            else:
                raise _not_a_file(path)


def _not_a_file(path: Path) -> DataError:
    return DataError(
        f"input {path} is a pipe, socket or device, expected a file or folder; "
        "write its contents into a file"
    )


def _examples(names: list[str]) -> str:
    """Return the first three names, and how many more there are, as a text."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + more


def _companions(root: Path, names: list[str], config: CorpusConfig) -> list[str]:
    """Return names of files about others: lists, and README.md and the like above records."""
    stated = stated_kind(config)
    if stated is not None and not holds_many(stated):
        return []
    with_records = {
        parent
        for name in names
        if not is_companion(name) and (stated is not None or holds_records(name))
        for parent in PurePath(name).parents
    }
    bases = {PurePath(name).name for name in names}
    return [
        name
        for name in names
        if (is_companion(name) and PurePath(name).parent in with_records)
        or lists_files(root / name, bases)
    ]


def _with_kinds(
    folder: Path, names: list[str], prefix: str, config: CorpusConfig
) -> list[SourceFile]:
    looked_into: Counter[str] = Counter()
    stated = stated_kind(config)
    sources = []
    for name in names:
        path = folder / name
        kind = stated or kind_by_name(name)
        if kind is None or (stated is None and not holds_many(kind)):
            suffix = PurePath(without_compression(name)).suffix
            looked_into[suffix] += 1
            is_looked_into = looked_into[suffix] <= LOOKED_INTO
            likely = "jsonl" if suffix == JSON_SUFFIX else "text"
            kind = kind_by_contents(path) if is_looked_into else likely
        status = path.stat()
        # A file's name may be any bytes.
        printable = (prefix + name).encode(errors="backslashreplace").decode()
        size, inode = status.st_size, _inode(status)
        sources.append(SourceFile(path, printable, kind, size, size, status.st_mtime_ns, inode))
    return sources
