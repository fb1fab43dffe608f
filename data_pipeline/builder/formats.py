"""The format of an input file: by its name, or by its contents where the name does not say.

With `format: auto` only text is read as text. A file that no reader understands is an error before
the build starts, which says what to do.
"""

import codecs
import contextlib
import json
import os
import re
from collections.abc import Collection
from pathlib import Path, PurePath

from data_pipeline.builder.compression import (
    BLOCK_BYTES,
    CORRUPTION,
    UnreadableRecords,
    decompressed,
    without_compression,
)
from data_pipeline.config import CorpusConfig, SourceKind
from foundation.errors import DataError
from foundation.files import GIT_LFS_POINTER

# Kind -> ends of names, in upper or lower case, before any .gz or .zst.
KIND_SUFFIXES: dict[SourceKind, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson"),
    "tar": (".tar",),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "mds": (".mds", ".mds.zstd"),
    "lines": (),
    "wikitext": (),
    "stream": (),
    "megatron": (),
    "array": (),
    "text": (".txt", ".text", ".md", ".rst", ".tex"),
}
JSON_SUFFIX = ".json"  # JSON Lines if the first line is an object, else refused
# Files that are published beside records and have none: their names up to the first dot.
COMPANIONS = frozenset(
    ("readme", "license", "licence", "copying", "notice", "citation")
    + ("dataset_info", "dataset_infos", "_success", "_metadata", "_common_metadata")
)
# Lists of files by `datasets`, MDS and WebDataset. Megatron's index lies beside each .bin file.
COMPANION_FILES = frozenset(("state.json", "dataset_dict.json", "index.json", "shardindex.json"))
INDEX_SUFFIX = ".idx"
MAPPED = re.compile(r"cache-[0-9a-f]{16}\w*\.arrow$")  # `datasets` keeps results beside its data
# Names of lists of files: SHA256SUMS, md5sums.txt, x.tar.md5, MANIFEST. Contents are checked, too.
LIST_NAME = re.compile("sums?|md5|sha|manifest|list")
CHECKSUM = re.compile(rb"\\?[0-9a-fA-F]{32,128}")
CHOOSE = "choose the files to read with `suffixes`, or set format=text to read every file as text"
MDS_ADVICE = ("the index of an MDS data set", "give the folder with its shards")
ARROW_ADVICE = ("an Arrow file", "rename it to .arrow, or set format=arrow")
ARRAY_ADVICE = (
    "an array of numbers by its name",
    f"set format=array or format=megatron if it has tokens, or {CHOOSE}",
)
TABLE_ADVICE = ("a table", f"write it as Parquet or JSON Lines, or {CHOOSE}")
PACKED_ADVICE = ("an archive", "unpack it, since only .gz and .zst are unpacked while reading")
# Files that are refused: ends of their names, what they are, what to do.
OTHER_SUFFIXES: tuple[tuple[tuple[str, ...], tuple[str, str]], ...] = (
    ((".feather", ".ipc"), ARROW_ADVICE),
    ((".bin", ".idx", ".npy", ".npz"), ARRAY_ADVICE),
    ((".csv", ".tsv"), TABLE_ADVICE),
    ((".zip", ".bz2", ".xz", ".lz4", ".7z", ".rar", ".zstd"), PACKED_ADVICE),
    ((".tgz",), ("a compressed tar", "rename it to .tar.gz")),
)
GZIP, ZSTD = ".gz", ".zst"
OF_LINES: tuple[SourceKind, ...] = ("jsonl", "lines", "wikitext")
TABLES_AND_TOKENS: tuple[SourceKind, ...] = ("parquet", "arrow", "mds", "megatron", "array")
UTF_16 = ("text in UTF-16", "write it as UTF-8")
NUMPY_MAGIC, MEGATRON_MAGIC = b"\x93NUMPY", b"MMIDIDX\0\0"
LLM_C = ("an array with a header of llm.c", "remove the header, 1,024 bytes")
REPACK = "let its name end in {}, or unpack it if it does"
EXTRACT = "extract its text, into JSON Lines or a file for each document"
# Offset, bytes there, (what the file is, what to do), kinds or ends of names that may have them.
MAGIC: tuple[tuple[int, bytes, tuple[str, str], tuple[str, ...]], ...] = (
    (0, b"PAR1", ("a Parquet file", "rename it to .parquet, or set format=parquet"), ("parquet",)),
    (0, b"ARROW1", ARROW_ADVICE, ("arrow",)),
    (0, b"FEA1", ("a Feather file of version 1", "write it as Parquet"), ()),
    (0, b"\x1f\x8b\x08", ("compressed by gzip", REPACK.format(GZIP)), (GZIP,)),
    (0, b"\x28\xb5\x2f\xfd", ("compressed by zstd", REPACK.format(ZSTD)), (ZSTD,)),
    (257, b"ustar", ("a tar", "rename it to .tar, or set format=tar"), ("tar",)),
    (0, b"PK\x03\x04", ("a zip file, such as .npz", "unpack it"), ()),
    (0, b"7z\xbc\xaf\x27\x1c", PACKED_ADVICE, ()),
    (0, b"\xfd7zXZ\x00", PACKED_ADVICE, ()),
    (4, b"1AY&SY", ("compressed by bzip2", "unpack it"), ()),
    (0, b"%PDF-", ("a PDF", EXTRACT), ()),
    (0, b"%!PS", ("PostScript", EXTRACT), ()),
    (0, b"{\\rtf", ("RTF", EXTRACT), ()),
    (0, b"WARC/1.", ("a WARC file, as Common Crawl has them", EXTRACT), ()),
    (0, b"<mediawiki", ("a dump of MediaWiki", EXTRACT), ()),
    (0, MEGATRON_MAGIC, ("an index of Megatron", "name its .bin file"), ()),
    (0, (20240520).to_bytes(4, "little"), LLM_C, ()),
    (0, (20240801).to_bytes(4, "little"), LLM_C, ()),
    (0, b"\x89HDF\r\n", ("an HDF5 file", "write it as Parquet, or its ids as an array"), ()),
    (0, GIT_LFS_POINTER, ("a pointer of Git LFS", "fetch its contents by `git lfs pull`"), ()),
    (0, codecs.BOM_UTF16_LE, UTF_16, TABLES_AND_TOKENS),
    (0, codecs.BOM_UTF16_BE, UTF_16, TABLES_AND_TOKENS),
)
HEAD_BYTES = 512  # start of a file that is compared with MAGIC


def check_head(head: bytes, name: str, kind: SourceKind, config: CorpusConfig) -> None:
    """Raise UnreadableRecords if the first bytes of a file show that it is not of this kind.

    The end of `name` says how the bytes are compressed; `name` is "" for bytes that were unpacked.
    With `format=text` every file is text.
    """
    if config.format == "text":
        return
    lower = name.lower()
    packing = GZIP if lower.endswith(GZIP) else ZSTD if lower.endswith((ZSTD, ".zstd")) else ""
    other = _magic(head, packing or kind)
    if packing and not other and _first_json(head):
        other = "JSON that is not compressed", f"remove {packing} from its name"
    elif not packing and kind == "jsonl" and b"\0" in head[:HEAD_BYTES].partition(b"\n")[0]:
        other = f"not text ({not_text(head)})", TABLE_ADVICE[1]
    elif not packing and kind in OF_LINES and b"\n" not in head and b"\r" in head.strip():
        other = "text whose lines end in a carriage return", "write newlines instead, by `tr`"
    if other:
        expected = f"one compressed by {packing[1:]}" if packing else f"format {kind}"
        raise UnreadableRecords(f"it is {other[0]}, expected {expected}; {other[1]}")


def _magic(head: bytes, expected: str) -> tuple[str, str] | None:
    """Return what a file is by its first bytes, and what to do; None if they may be `expected`."""
    starts = head, head.removeprefix(codecs.BOM_UTF8).lstrip()
    for offset, magic, advice, kinds in MAGIC:
        if expected not in kinds and any(start.startswith(magic, offset) for start in starts):
            return advice
    return None


def stated_kind(config: CorpusConfig) -> SourceKind | None:
    """Return the kind that the settings give to every file; None if each file's own decides."""
    return None if config.format == "auto" else config.format


def may_read_as(kind: SourceKind, config: CorpusConfig) -> bool:
    """Whether a file may be read as this kind."""
    return stated_kind(config) in (None, kind)


def holds_many(kind: SourceKind) -> bool:
    """Whether a file of the kind holds many documents."""
    return kind != "text"


def kind_by_name(name: str) -> SourceKind | None:
    """Return the kind that the end of a name states, or None if the contents have to decide."""
    plain = without_compression(name)
    return next((kind for kind, ends in KIND_SUFFIXES.items() if plain.endswith(ends)), None)


def holds_records(name: str) -> bool:
    """Whether a file of that name holds many documents."""
    kind = kind_by_name(name)
    return without_compression(name).endswith(JSON_SUFFIX) if kind is None else holds_many(kind)


def is_companion(name: str) -> bool:
    """Whether a file of that name goes with records: README.md, LICENSE, dataset_info.json, ..."""
    base = PurePath(name).name.lower()
    if base in COMPANION_FILES or base.endswith(INDEX_SUFFIX) or MAPPED.match(base):
        return True
    stem = base.partition(".")[0]
    kind = kind_by_name(name)
    return stem in COMPANIONS and (kind is None or not holds_many(kind))


def lists_files(path: Path, bases: Collection[str]) -> bool:
    """Whether a file lists files: each of its first lines has a checksum or a name of `bases`."""
    if not LIST_NAME.search(path.name.lower()) or holds_records(path.name):
        return False
    lines = [line.split() for line in _head(path).splitlines() if line.strip()]
    return bool(lines) and all(
        CHECKSUM.fullmatch(line[0])
        or CHECKSUM.fullmatch(line[-1])
        or (len(line) < 4 and PurePath(os.fsdecode(line[-1])).name in bases)
        for line in lines
    )


def kind_by_contents(path: Path) -> SourceKind:
    """Return `jsonl` or `text` by the first bytes of a file; DataError if it is neither."""
    plain = without_compression(path.name)
    for ends, advice in OTHER_SUFFIXES:
        if plain.endswith(ends):
            raise _refused(path, *advice)
    head = _head(path)
    if advice := _magic(head, "text"):
        raise _refused(path, *advice)
    first_line = _first_json(head)
    if plain.endswith(JSON_SUFFIX):
        if plain == "index.json" and b'"shards"' in head:
            raise _refused(path, *MDS_ADVICE)
        if first_line or not head.strip():
            return "jsonl"
        advice = f"write one object per line, such as by `jq -c '.[]' {path.name} > x.jsonl`"
        raise _refused(path, "JSON without an object on its first line", advice)
    if first_line:
        raise _refused(path, "JSON Lines by its first line", "rename it to .jsonl, or " + CHOOSE)
    if kind_by_name(plain) is None and (reason := not_text(head)):
        raise _refused(path, f"not text ({reason})", CHOOSE)
    return "text"


def not_text(head: bytes) -> str | None:
    """Return why these first bytes of a file are not UTF-8 text, or None if they may be."""
    if (offset := head.find(0)) >= 0:
        return f"byte {offset} is 0"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < BLOCK_BYTES)
    except UnicodeDecodeError as error:
        return f"invalid UTF-8 at byte {error.start}"
    return None


def _refused(path: Path, what: str, advice: str) -> DataError:
    return DataError(
        f"input {path} is {what}, expected text, JSON Lines, a tar or Parquet; {advice}"
    )


def _head(path: Path) -> bytes:
    """Return the first unpacked bytes; none of a corrupted file, which is an error when read."""
    with contextlib.suppress(*CORRUPTION), open(path, "rb") as file:
        return decompressed(file, path.name).read(BLOCK_BYTES)
    return b""


def _first_json(head: bytes) -> bool:
    """Whether the first line is a JSON object, or the start of one that fills the whole head."""
    line, newline, _ = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")
    if not line.startswith(b"{"):
        return False
    if not newline and len(head) == BLOCK_BYTES:
        return True
    try:
        return isinstance(json.loads(line.decode()), dict)
    except (ValueError, RecursionError):
        return False
