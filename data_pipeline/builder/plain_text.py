"""Text files that hold many documents: a line each, articles of WikiText, or one long stream.

These are how the data sets of language models were published. No word or character is added or
lost: a line end or a space between two documents is the end of the first (`end_text` of words and
characters), so the tokens of all documents in order are those of the file.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import BinaryIO

from data_pipeline.builder.decompression import BLOCK_BYTES, is_compressed
from data_pipeline.builder.records import (
    Document,
    InvalidRecords,
    Records,
    Reject,
    document_of_bytes,
    too_long,
)
from data_pipeline.builder.sources import SourceFile
from data_pipeline.config import CorpusConfig
from data_pipeline.errors import ConfigError

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
