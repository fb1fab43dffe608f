"""The documents of an input file: text, JSONL or a tar of text here, tables and tokens beside.

Text, JSONL and tars may be compressed.

Text files that hold many documents: a line each, articles of WikiText, or one long stream.

These are how the data sets of language models were published. No word or character is added or
lost: a line end or a space between two documents is the end of the first (`end_text` of words and
characters), so the tokens of all documents in order are those of the file.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from data_pipeline.builder.formats import (
    BLOCK_BYTES,
    CORRUPTION,
    decompressed,
    is_compressed,
    kind_by_name,
    stated_kind,
)
from data_pipeline.builder.records import (
    Document,
    InvalidRecords,
    Records,
    Reject,
    Tell,
    corrupted,
    document_of_bytes,
    document_of_json,
    longest_json,
    too_long,
)
from data_pipeline.builder.sources import SourceFile
from data_pipeline.builder.tables import read_arrow, read_parquet
from data_pipeline.builder.token_files import read_array, read_mds, read_megatron
from data_pipeline.config import CorpusConfig
from data_pipeline.shards.tar import TarError, TarMember, tar_members
from foundation.errors import ConfigError, DataError
from foundation.files import named_errors
from foundation.settings import assert_never

# The title of an article; those of its sections have more of the signs.
TITLE = re.compile(rb" ?= [^=].* = ?\r?\n?")
STRETCH_BYTES = 100_000
SPACE = b" "
# Where splits begin and end, half a character may be.
HALF_CHARACTER = re.compile(rb"\A[\x80-\xbf]{1,3}")


def read_lines(file: BinaryIO, source: SourceFile, config: CorpusConfig) -> Records:
    """Yield a document for each line that is not blank."""
    for number, line in enumerate(_lines(file, config), 1):
        location = f"{source.name}:{number}"
        if isinstance(line, Reject):
            yield replace(line, source=location)
        elif line.strip():
            yield document_of_bytes(line.rstrip(b"\r\n"), location, location, config)


def read_articles(file: BinaryIO, source: SourceFile, config: CorpusConfig) -> Records:
    """Yield a document for each title and what follows; blank lines in front are its own."""
    lines: list[bytes] = []
    number, size = 1, 0
    for line in _lines(file, config):
        if isinstance(line, Reject):
            yield replace(line, source=f"{source.name}:{number}")
            continue
        if TITLE.fullmatch(line) and any(each.strip() for each in lines):
            yield _article(lines, size, number, source, config)
            lines, number, size = [], number + 1, 0
        size += len(line)
        if size <= config.max_document_bytes:
            lines.append(line)
    if any(each.strip() for each in lines):
        yield _article(lines, size, number, source, config)


def _article(
    lines: list[bytes], size: int, number: int, source: SourceFile, config: CorpusConfig
) -> Document | Reject:
    location = f"{source.name}:{number}"
    if size > config.max_document_bytes:
        return too_long(location, config)
    return document_of_bytes(b"".join(lines).removesuffix(b"\n"), location, location, config)


def _lines(file: BinaryIO, config: CorpusConfig) -> Iterator[bytes | Reject]:
    """Yield the lines with their ends; a Reject for one that is too long."""
    longest = config.max_document_bytes + 2
    is_first = True
    while line := file.readline(longest):
        if is_first:
            line, is_first = line.removeprefix(codecs.BOM_UTF8), False
        if len(line) == longest and not line.endswith(b"\n"):
            while (line := file.readline(BLOCK_BYTES)) and not line.endswith(b"\n"):
                pass
            yield too_long("", config)
        else:
            yield line


def read_stream(file: BinaryIO, source: SourceFile, config: CorpusConfig) -> Records:
    """Yield the file's stretch from `source.start` on in parts of about STRETCH_BYTES.

    They end before a space, which is not in any of them.
    """
    file.seek(source.start)
    left, offset, rest, is_first = source.size, source.start, b"", True
    while left or rest:
        block = file.read(min(STRETCH_BYTES, left))
        left = left - len(block) if block else 0
        text = rest + block
        cut = text.rfind(SPACE) if left else len(text)
        if cut < 0:
            rest = text
            continue
        part, rest = text[:cut], text[cut + 1 :]
        location = f"{source.name}:{offset}"
        if is_first:
            part = HALF_CHARACTER.sub(b"", part) if source.start else part
            part, is_first = part.lstrip(SPACE), False
        if not left:
            part = _whole_characters(part, source).rstrip(SPACE)
        offset += cut + 1
        if part.strip():
            document = document_of_bytes(part, location, location, config)
            if isinstance(document, Reject):  # 100 kB would be missing from one text
                raise InvalidRecords(f"{location}: {document.reason}")
            yield document


def _whole_characters(text: bytes, source: SourceFile) -> bytes:
    """Leave out half a character at the end of a split that does not end its file."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        is_cut = source.start + source.size < source.file_size
        if is_cut and error.reason == "unexpected end of data":
            return text[: error.start]
    return text


def with_held_out(
    sources: list[tuple[str, SourceFile]], config: CorpusConfig
) -> list[tuple[str, SourceFile]]:
    """Return the training and validation stretch of each file, without what is left for tests."""
    found = []
    for _, source in sources:
        training = source.size - config.validation_bytes - config.test_bytes
        if is_compressed(source.name) or training <= 0:
            raise ConfigError(
                f"{source.path} has {source.size:,} bytes, expected an unpacked file with more "
                f"than validation_bytes={config.validation_bytes:,} and "
                f"test_bytes={config.test_bytes:,}"
            )
        found.append(("train", replace(source, size=training)))
        if config.validation_bytes:
            held_out = replace(source, start=training, size=config.validation_bytes)
            found.append(("validation", held_out))
    return found


def whole(source: SourceFile) -> SourceFile:
    """Return the whole file of a stretch: the original's vocabulary is that of all splits."""
    return replace(source, start=0, size=source.file_size)


TEXT_EXTENSION, JSON_EXTENSION = "txt", "json"


def read_documents(
    source: SourceFile, config: CorpusConfig, follow: Callable[[Tell], None] = lambda tell: None
) -> Records:
    """Yield every record of a file in order; DataError if the file cannot be read to its end.

    `follow` is called with a function that returns how many of the file's bytes were read so far.
    """
    try:
        match source.kind:
            case "parquet":
                yield from read_parquet(source, config, follow)
            case "arrow":
                yield from read_arrow(source, config, follow)
            case "mds":
                yield from read_mds(source, config)
            case "megatron":
                yield from read_megatron(source, config, follow)
            case "array":
                yield from read_array(source, config, follow)
            case "text":
                yield from _read_bytes(_read_text, source, config, follow)
            case "jsonl":
                yield from _read_bytes(_read_jsonl, source, config, follow)
            case "lines":
                yield from _read_bytes(read_lines, source, config, follow)
            case "wikitext":
                yield from _read_bytes(read_articles, source, config, follow)
            case "stream":
                yield from _read_bytes(read_stream, source, config, follow)
            case "tar":
                yield from _read_bytes(_read_tar, source, config, follow)
            case _:
                assert_never(source.kind)
    except (*CORRUPTION, TarError, InvalidRecords) as error:
        raise DataError(corrupted(source, error)) from None


def _read_bytes(
    reader: Callable[[BinaryIO, SourceFile, CorpusConfig], Records],
    source: SourceFile,
    config: CorpusConfig,
    follow: Callable[[Tell], None],
) -> Records:
    """Yield what `reader` makes of the file's bytes, unpacked."""
    with named_errors(source.path), open(source.path, "rb", BLOCK_BYTES) as raw:
        follow(raw.tell)
        yield from reader(decompressed(raw, source.path.name), source, config)


def _read_text(file: BinaryIO, source: SourceFile, config: CorpusConfig) -> Records:
    raw = file.read(config.max_document_bytes + 1)
    if stated_kind(config) is None and not kind_by_name(source.name) and b"\0" in raw:
        yield Reject(source.name, f"not text (byte {raw.index(0)} is 0)")
        return
    yield document_of_bytes(raw.removeprefix(codecs.BOM_UTF8), source.name, source.name, config)


def _read_jsonl(file: BinaryIO, source: SourceFile, config: CorpusConfig) -> Records:
    longest_line = longest_json(config)
    number = 0
    while line := file.readline(longest_line):
        number += 1
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        location = f"{source.name}:{number}"
        if len(line) == longest_line and not line.endswith(b"\n"):
            yield too_long(location, config)
            while (line := file.readline(BLOCK_BYTES)) and not line.endswith(b"\n"):
                pass
        elif line.strip():
            yield document_of_json(line.rstrip(b"\r\n"), location, location, config)


@dataclass
class _Sample:
    """Consecutive tar members KEY.EXTENSION: all extensions, and the contents that may be text."""

    key: str
    location: str
    extensions: list[str] = field(default_factory=list)
    contents: dict[str, bytes | Reject] = field(default_factory=dict)


def _read_tar(file: BinaryIO, source: SourceFile, config: CorpusConfig) -> Records:
    """Yield a document for each sample, as WebDataset groups members; TarError if it is invalid.

    Its text is KEY.txt or KEY.text_field, else the field text_field of KEY.json. Its id is the key,
    unless the JSON has one.
    """
    sample = None
    for member in tar_members(file):
        # A key ends at the first dot after the last slash.
        folder, slash, base = member.name.rpartition("/")
        stem, _, extension = base.partition(".")
        key = folder + slash + stem
        if sample is None or sample.key != key:
            if sample is not None:
                yield _document_of_sample(sample, config)
            sample = _Sample(key, f"{source.name}:{key}")
        sample.extensions.append(extension)
        if extension in (config.text_field, TEXT_EXTENSION, JSON_EXTENSION):
            contents = _read_member(member, extension, sample.location, config)
            sample.contents[extension] = contents
    if sample is not None:
        yield _document_of_sample(sample, config)


def _read_member(
    member: TarMember, extension: str, location: str, config: CorpusConfig
) -> bytes | Reject:
    if not member.is_file:
        reason = f"{member.name} is a link or a device in the archive, expected a file"
        return Reject(location, reason)
    longest = longest_json(config) if extension == JSON_EXTENSION else config.max_document_bytes
    return member.read() if member.size <= longest else too_long(location, config)


def _document_of_sample(sample: _Sample, config: CorpusConfig) -> Document | Reject:
    for extension in (config.text_field, TEXT_EXTENSION, JSON_EXTENSION):
        if extension in sample.contents:
            contents = sample.contents[extension]
            if isinstance(contents, Reject):
                return contents
            convert = document_of_json if extension == JSON_EXTENSION else document_of_bytes
            return convert(contents, sample.key, sample.location, config)
    found = ", ".join(map(repr, sample.extensions))
    expected = " or ".join(dict.fromkeys((TEXT_EXTENSION, config.text_field, JSON_EXTENSION)))
    return Reject(sample.location, f"found members {found}, expected {expected}")
