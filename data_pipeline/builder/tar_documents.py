"""Documents out of tars of text, as WebDataset lays them out: consecutive members KEY.EXTENSION are one sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from data_pipeline.builder.records import (
    Document,
    Reject,
    document_of_bytes,
    document_of_json,
    longest_json,
    too_long,
)
from data_pipeline.builder.sources import SourceFile
from data_pipeline.config import CorpusConfig
from data_pipeline.shards.tar import TarMember, tar_members

TEXT_EXTENSION, JSON_EXTENSION = "txt", "json"


@dataclass
class _Sample:
    """Members with one key: the extensions of all, the contents of those that may hold the text."""

    key: str
    extensions: list[str] = field(default_factory=list)
    contents: dict[str, bytes | Reject] = field(default_factory=dict)


def read_tar(
    file: BinaryIO, source: SourceFile, config: CorpusConfig
) -> Iterator[Document | Reject]:
    """A document for each sample: of KEY.txt or KEY.text_field, else of the field text_field of KEY.json.

    Its id is the key, unless the JSON has one. TarError when the archive is damaged or cut
    off.
    """
    sample = None
    for member in tar_members(file):
        key, extension = _split_name(member.name)
        if sample is None or sample.key != key:
            if sample is not None:
                yield _document_of(sample, source, config)
            sample = _Sample(key)
        sample.extensions.append(extension)
        if extension in (config.text_field, TEXT_EXTENSION, JSON_EXTENSION):
            sample.contents[extension] = _read(member, extension, _place(source, key), config)
    if sample is not None:
        yield _document_of(sample, source, config)


def _split_name(name: str) -> tuple[str, str]:
    """Key and extension: a key ends at the first dot behind the last slash."""
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return folder + slash + stem, extension


def _place(source: SourceFile, key: str) -> str:
    return f"{source.name}:{key}"


def _read(member: TarMember, extension: str, place: str, config: CorpusConfig) -> bytes | Reject:
    if not member.is_file:
        return Reject(place, f"{member.name} is a link or a device in the archive, expected a file")
    longest = longest_json(config) if extension == JSON_EXTENSION else config.max_document_bytes
    return member.read() if member.size <= longest else too_long(place, config)


def _document_of(sample: _Sample, source: SourceFile, config: CorpusConfig) -> Document | Reject:
    place = _place(source, sample.key)
    for extension in (config.text_field, TEXT_EXTENSION, JSON_EXTENSION):
        if extension in sample.contents:
            contents = sample.contents[extension]
            if isinstance(contents, Reject):
                return contents
            convert = document_of_json if extension == JSON_EXTENSION else document_of_bytes
            return convert(contents, sample.key, place, config)
    expected = " or ".join(dict.fromkeys((TEXT_EXTENSION, config.text_field, JSON_EXTENSION)))
    return Reject(
        place, f"found members {', '.join(map(repr, sample.extensions))}, expected {expected}"
    )
