"""The documents of an input file: text, JSONL or a tar of text here, tables and tokens beside.

Text, JSONL and tars may be compressed.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

from data_pipeline.builder.decompression import BLOCK_BYTES, CORRUPTION, decompressed
from data_pipeline.builder.formats import kind_by_name, stated_kind
from data_pipeline.builder.mds_records import read_mds
from data_pipeline.builder.plain_text import read_articles, read_lines, read_stream
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
from data_pipeline.builder.token_arrays import read_array, read_megatron
from data_pipeline.config import CorpusConfig
from data_pipeline.errors import DataError
from data_pipeline.files import named_errors
from data_pipeline.setting_fields import assert_never
from data_pipeline.shards.tar import TarError, TarMember, tar_members

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
