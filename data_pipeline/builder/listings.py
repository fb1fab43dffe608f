"""Lists that come with a data set: of its files and their sizes, its splits, its current version.

A listed file that is missing, or has another size, is an error. Two kinds of files are skipped, and
notes name them: files beside listed ones that are not listed, of an older version or a cache; and
files of test and validation splits, which are no training text.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from data_pipeline.builder.compression import UnreadableRecords, is_compressed, without_compression
from data_pipeline.builder.formats import INDEX_SUFFIX, holds_records
from data_pipeline.builder.hub_card import CARD, SPLIT, training_files
from data_pipeline.config import SourceKind
from foundation.errors import DataError
from foundation.files import LARGEST_LIST_BYTES, read_json

STATE, SPLITS, BY_NAME = "state.json", "dataset_dict.json", "by name"
# Lists in the order that they are followed; "" is all others. Lists of splits come first: a split
# that they exclude has lists of its own, which are then not followed.
TURNS = (CARD, BY_NAME, SPLITS, "")
MDS_INDEX = "index.json"
MDS_COMPRESSIONS = ("", "zstd", "gz")
MDS_FORMS = ("raw_data", "zip_data")  # keys of a shard's two files; the folder has one of them
# Folders that show that the files beside them are of several versions of a table.
VERSIONED = {
    "_delta_log": "a Delta table",
    "_spark_metadata": "the output of a Spark stream",
    ".hoodie": "a Hudi table",
}
# Files with these ends hold no records, but may be of a split, too.
OF_SPLITS = (".txt", ".raw", ".tokens", ".bin", ".npy", INDEX_SUFFIX)
# The hub has also put a hash after the numbers: train-00000-of-00002-a09b74b3ef9c3b56.parquet.
NUMBERED = re.compile(
    r"(?P<start>.*?)(?P<number>\d+)-of-(?P<total>\d+)(-[0-9a-f]{16})?(?P<end>\D*)"
)


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file by its name below the input, and what its list says of it."""

    name: str
    size: int | None = None  # bytes
    samples: int | None = None
    hashes: tuple[tuple[str, str], ...] = ()  # name of the algorithm and hash


@dataclass(frozen=True, slots=True)
class Listing:
    """A list of files, each in one or more forms; one form of each has to be there.

    In `folders`, files that end in `suffix` and are not listed are skipped.
    """

    name: str
    files: tuple[tuple[ListedFile, ...], ...]
    folders: Collection[PurePosixPath] = ()
    suffix: str = ""


Tell = Callable[[str, list[str]], None]  # a reason, and the names of the files that it is about


def listed_files(
    root: Path, names: list[str], kind: SourceKind | None, tell: Tell, keeps_splits: bool
) -> dict[str, ListedFile]:
    """Return which of the names below `root` belong to its data sets, in order.

    `kind` is the kind of file that the settings state. DataError for a listed file that is missing
    or has another size, for a table of several versions, and if names number the files of two
    versions.
    """
    refuse_versions(root, names)
    present, listed = frozenset(names), dict[str, ListedFile]()
    for turn in TURNS[2:] if keeps_splits else TURNS:
        bases = {name: PurePosixPath(name).name for name in names}
        turns = (name for name in names if turn == (bases[name] if bases[name] in TURNS else ""))
        lists = [listing for name in turns for listing in _listings(root, name, kind, present)]
        for listing in lists:
            listed |= {file.name: file for file in _present(root, listing, present)}
        others = [name for name in names if name not in listed]
        excluded = _held_out(others) if turn == BY_NAME else _excluded(others, lists)
        for reason, left_out in excluded.items():
            tell(f"left out, {reason}", sorted(left_out))
        gone = set().union(*excluded.values())
        names = [name for name in names if name not in gone]
    _check_numbers(root, names, tell)
    _check_packed(root, names)
    return {name: listed.get(name, ListedFile(name)) for name in names}


def _excluded(names: list[str], lists: list[Listing]) -> dict[str, set[str]]:
    """Return reason -> names that are skipped for it; no list has any of `names`."""
    decides = {
        (folder, listing.suffix): f"not listed in {listing.name}"
        for listing in lists
        for folder in listing.folders
    }
    suffixes = sorted({suffix for _, suffix in decides})
    excluded: dict[str, set[str]] = defaultdict(set)
    for name in names:
        folder = PurePosixPath(name).parent
        for suffix in suffixes:
            if (folder, suffix) in decides and _ends(name, suffix):
                excluded[decides[folder, suffix]].add(name)
                break
    return excluded


def refuse_versions(root: Path, names: list[str]) -> None:
    """Raise DataError for files of a table whose log, beside them, may have removed some."""
    tables = {PurePosixPath(name).parent for name in names if name.lower().endswith(".parquet")}
    folders = {root / within for table in tables for within in (table, *table.parents)}
    for folder in sorted(folders | set(root.resolve().parents)) if tables else ():
        kind = next((VERSIONED[name] for name in VERSIONED if (folder / name).is_dir()), None)
        if kind is None and any((folder / "metadata").glob("*.metadata.json*")):
            kind = "an Iceberg table"
        if kind:
            raise DataError(
                f"input {folder} is {kind}, whose files are of several versions; write its current "
                "version as Parquet or JSON Lines"
            )


def _held_out(names: list[str]) -> dict[str, set[str]]:
    """Return reason -> names of validation and test splits that are beside a training split."""
    trained, held_out = set(), defaultdict(set)
    for name in names:
        if not holds_records(name) and not without_compression(name).endswith(OF_SPLITS):
            continue
        path = PurePosixPath(name)
        for part, folder in zip(path.parts, reversed([*path.parents]), strict=True):
            if match := SPLIT.search(part.lower()):
                group = (folder, part[: match.start()].lower())
                trained |= {group} if match["train"] else set()
                held_out[group] |= set() if match["train"] else {name}
    reason = "of a validation or test split; name a file in validation_input to read it"
    names_of_splits = {name for group in trained for name in held_out[group]}
    return {reason: names_of_splits} if names_of_splits else {}


def _listings(
    root: Path, name: str, kind: SourceKind | None, present: frozenset[str]
) -> Iterator[Listing]:
    """Yield the list in a file of the input, if the file is a list."""
    path = PurePosixPath(name)
    folder = path.parent
    if kind == "megatron" and path.suffix.lower() in (".bin", INDEX_SUFFIX):
        other = INDEX_SUFFIX if path.suffix.lower() == ".bin" else ".bin"
        yield Listing(name, ((ListedFile(str(path.with_suffix(other))),),))
    if path.name not in READERS:
        return
    suffix, read = READERS[path.name]
    try:
        if path.name == CARD:
            training = training_files(root / name, folder, present)
            files = tuple((ListedFile(file),) for file in training)
            folders = {PurePosixPath(member).parent for member in present if training}
            folders = {member for member in folders if member.is_relative_to(folder)}
        else:
            files = read(read_json(root / name, LARGEST_LIST_BYTES), folder)
            folders = {folder, *(PurePosixPath(form.name).parent for (form, *_) in files)}
            if not files:
                raise UnreadableRecords("lists no files; give a data set that has some")
    except UnreadableRecords as error:
        raise DataError(f"{root / name} {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if any(
            PurePosixPath(member).parent == folder and _ends(member, suffix) for member in present
        ):
            raise DataError(
                f"{root / name}, the list of the files beside it, cannot be read "
                f"({type(error).__name__}: {error}); fetch it again"
            ) from None
        return  # the file is not about files here
    if suffix == STATE:
        states = (PurePosixPath(member).parent for member in present if _ends(member, STATE))
        folders = {member for member in states if member.parent == folder} - folders
        suffix = ""
    yield Listing(name, files, folders, suffix)


def _ends(name: str, suffix: str) -> bool:
    return without_compression(name).removesuffix(".zstd").endswith(suffix)


def _of_datasets(content: dict[str, Any], folder: PurePosixPath) -> Files:
    """Read the state.json of `save_to_disk`."""
    if content.get("_indices_data_files"):
        raise UnreadableRecords(
            "has an index of its rows, which is not read; save it after flatten_indices()"
        )
    return tuple((ListedFile(str(folder / file["filename"])),) for file in content["_data_files"])


def _of_splits(content: dict[str, Any], folder: PurePosixPath) -> Files:
    """Read the dataset_dict.json of a DatasetDict: each split has a state.json."""
    return tuple((ListedFile(str(folder / split / STATE)),) for split in content["splits"])


def _of_shards(content: dict[str, Any], folder: PurePosixPath) -> Files:
    """Read the index.json of an MDS data set."""
    if "chunks" in content:
        raise UnreadableRecords("is of LitData, which is not read; write it as MDS or Parquet")
    for shard in content["shards"]:
        form, packing = shard["format"], shard["compression"] or ""
        if form != "mds" or packing.partition(":")[0] not in MDS_COMPRESSIONS:
            raise UnreadableRecords(
                f"lists shards of format {form}, compressed by {packing or 'nothing'}, expected "
                "mds, by zstd, gz or nothing; write them so"
            )
    return tuple(
        tuple(
            ListedFile(
                str(folder / form_of_shard["basename"]),
                form_of_shard.get("bytes"),
                shard.get("samples"),
                tuple((form_of_shard.get("hashes") or {}).items()),
            )
            for form in MDS_FORMS
            if (form_of_shard := shard.get(form))
        )
        for shard in content["shards"]
    )


def _of_tars(content: dict[str, Any], folder: PurePosixPath) -> Files:
    """Read the index that `widsindex` writes beside tars."""
    return tuple(
        (
            ListedFile(
                str(folder / PurePosixPath(shard["url"]).name),
                shard.get("filesize"),
                shard.get("nsamples"),
            ),
        )
        for shard in content["shardlist"]
    )


Files = tuple[tuple[ListedFile, ...], ...]
# Name of a list -> end of the names that it decides about, and the function that reads it.
READERS: dict[str, tuple[str, Callable[[dict[str, Any], PurePosixPath], Files]]] = {
    CARD: ("", lambda content, folder: ()),
    STATE: (".arrow", _of_datasets),
    SPLITS: (STATE, _of_splits),
    MDS_INDEX: (".mds", _of_shards),
    "shardindex.json": (".tar", _of_tars),
}


def _present(root: Path, listing: Listing, present: frozenset[str]) -> Iterator[ListedFile]:
    """Yield the form of each listed file that is there; DataError unless there is exactly one, with
    the size that is listed."""
    counts = Counter(form.name for forms in listing.files for form in forms)
    for forms in listing.files:
        if twice := [form.name for form in forms if counts[form.name] > 1]:
            raise DataError(f"{root / listing.name} lists {twice[0]} twice; repair it")
        present_forms = [form for form in forms if form.name in present]
        if len(present_forms) != 1:
            raise DataError(
                f"{root / listing.name} lists {' or '.join(form.name for form in forms)}, expected "
                f"one of them, found {len(present_forms)}; fetch or remove one"
            )
        (file,) = present_forms
        size = (root / file.name).stat().st_size
        if file.size not in (None, size):
            raise DataError(
                f"{root / file.name} has {size:,} bytes, expected {file.size} by {listing.name}; "
                "fetch both again"
            )
        yield file


def _check_numbers(root: Path, names: list[str], tell: Tell) -> None:
    """Tell how many files are missing, by names like train-00001-of-00002.

    DataError for two totals, or two files with one number.
    """
    numbered: dict[tuple[str, str], dict[str, list[int]]] = defaultdict(dict)
    for name in names:
        if match := NUMBERED.fullmatch(name):
            totals = numbered[match["start"], match["end"].lower()]
            totals.setdefault(match["total"], []).append(int(match["number"]))
    for (start, end), totals in numbered.items():
        if len(totals) > 1 or any(len(set(numbers)) < len(numbers) for numbers in totals.values()):
            raise DataError(
                f"{root} has {start}* of {' and of '.join(sorted(totals))} files, two versions of "
                "one data set; remove one"
            )
        for total, numbers in totals.items():
            if len(numbers) < int(total):
                tell(f"found {len(numbers)} of {int(total)} files", [f"{start}*{end}"])


def _check_packed(root: Path, names: list[str]) -> None:
    """Raise DataError if a file is there twice, plain and compressed."""
    plain: dict[str, str] = {}
    for name in names:
        other = plain.setdefault(without_compression(name), name)
        if is_compressed(name) != is_compressed(other):
            raise DataError(
                f"{root / name} is {other} in another form, by their names; remove one of them"
            )
