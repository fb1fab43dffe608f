"""Records of tars, grouped as in WebDataset: KEY.txt, KEY.json and other members of that KEY."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO

from data_pipeline.builder import records
from data_pipeline.builder.compression import BLOCK_BYTES, InvalidRecords
from data_pipeline.builder.records import (
    Document,
    Records,
    Reject,
    document_of_bytes,
    document_of_json,
    longest_json,
    too_long,
)
from data_pipeline.builder.sources import SourceFile
from data_pipeline.config import CorpusConfig

LARGEST_HEADER_BYTES = 1 << 20  # limit for an extended header, such as a long name
EXTENDED_TYPES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, *tarfile.GNU_TYPES)
TEXT_EXTENSION, JSON_EXTENSION = "txt", "json"


@dataclass
class _Sample:
    """Consecutive tar members KEY.EXTENSION: all extensions, and the contents that may be text."""

    key: str
    location: str
    extensions: list[str] = field(default_factory=list)
    contents: dict[str, bytes | Reject] = field(default_factory=dict)


def read_tar(file: BinaryIO, source: SourceFile, config: CorpusConfig) -> Records:
    """Yield a document for each sample, as WebDataset groups members.

    Its text is KEY.txt or KEY.text_field, else the field text_field of KEY.json. Its id is the key,
    unless the JSON has one.
    """
    sample, count = None, 0
    for member, read in _tar_members(file):
        # A key ends at the first dot after the last slash.
        folder, slash, base = member.name.rpartition("/")
        stem, _, extension = base.partition(".")
        key = folder + slash + stem
        if sample is None or sample.key != key:
            if sample is not None:
                yield _document_of_sample(sample, config)
            sample, count = _Sample(key, f"{source.name}:{key}"), count + 1
        sample.extensions.append(extension)
        if extension in (config.text_field, TEXT_EXTENSION, JSON_EXTENSION):
            is_json = extension == JSON_EXTENSION
            most = longest_json() if is_json else records.LONGEST_DOCUMENT_BYTES
            if not member.isreg():
                reason = f"{member.name} is a link or a device in the archive, expected a file"
                sample.contents[extension] = Reject(sample.location, reason)
            elif member.size > most:
                sample.contents[extension] = too_long(sample.location)
            else:
                sample.contents[extension] = read()
    if sample is not None:
        yield _document_of_sample(sample, config)
    if source.listed and source.listed.samples not in (None, count):
        raise InvalidRecords(f"it has {count} samples, {source.listed.samples} by its list")


class _StrictInfo(tarfile.TarInfo):
    """A header; raises InvalidRecords if tarfile would take it for the end of the archive.

    tarfile, and other readers, would then silently lose the members after it.
    """

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _StrictInfo:  # type: ignore[override]
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  (an empty block)
            raise
        except tarfile.HeaderError as error:
            raise InvalidRecords(f"the header at byte {archive.offset}: {error}") from None

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _StrictInfo:
        info = super().frombuf(buf, encoding, errors)
        is_extended = info.type in EXTENDED_TYPES
        if info.issparse() or (is_extended and info.size > LARGEST_HEADER_BYTES):
            raise tarfile.HeaderError(f"a header of {info.size} bytes, or of a sparse file")
        return info


def _tar_members(file: BinaryIO) -> Iterator[tuple[tarfile.TarInfo, Callable[[], bytes]]]:
    """Yield each member but folders, in order, with a function that reads it before the next."""
    try:
        with tarfile.open(
            fileobj=file, mode="r|", tarinfo=_StrictInfo, encoding="utf-8", errors="replace"
        ) as archive:
            while member := archive.next():
                archive.members = []  # type: ignore[misc]  (it would list all)
                if member.size < 0:
                    raise InvalidRecords(f"{member.name} has a size of {member.size}")
                if not member.isdir():
                    yield member, partial(_contents_of, archive, member)
                # tarfile would skip as much as the header says, also beyond the end of the file.
                while (left := archive.offset - archive.fileobj.tell()) > 0:  # type: ignore[attr-defined]
                    if not archive.fileobj.read(min(left, BLOCK_BYTES)):  # type: ignore[union-attr]
                        raise InvalidRecords(f"it ends inside {member.name}")
            # tarfile has read one empty block, which may also be a header that a disk has zeroed.
            rest = archive.fileobj.read(tarfile.BLOCKSIZE)  # type: ignore[union-attr]
            if len(rest) < tarfile.BLOCKSIZE:
                raise InvalidRecords("it ends without an end-of-archive marker")
            while rest:
                if any(rest):
                    raise InvalidRecords("there is data after the end-of-archive marker")
                rest = archive.fileobj.read(BLOCK_BYTES)  # type: ignore[union-attr]
    except RecursionError:
        raise InvalidRecords("its extended headers follow each other without end") from None
    except (tarfile.TarError, ValueError, IndexError, OverflowError) as error:
        raise InvalidRecords(str(error)) from None


def _contents_of(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None, "a link is not read"
    return file.read(member.size)


def _document_of_sample(sample: _Sample, config: CorpusConfig) -> Document | Reject:
    for extension in (config.text_field, TEXT_EXTENSION, JSON_EXTENSION):
        if extension in sample.contents:
            contents = sample.contents[extension]
            if isinstance(contents, Reject):
                return contents
            convert = document_of_json if extension == JSON_EXTENSION else document_of_bytes
            return convert(contents, sample.key, sample.location, config)
    extensions = ", ".join(map(repr, sample.extensions))
    expected = " or ".join(dict.fromkeys((TEXT_EXTENSION, config.text_field, JSON_EXTENSION)))
    return Reject(sample.location, f"found members {extensions}, expected {expected}")
