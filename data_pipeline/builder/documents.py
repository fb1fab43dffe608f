"""The documents of an input file of any format; text and JSON Lines are read here.

A text file is one document, or many: its lines, or articles of WikiText. Or it is one long stream,
as language models' data sets were published, and is read in parts. Nothing is added or lost: parts
join to the stream, and for a tokenizer of words the line end between two documents is the first
one's end (`end_text`). So the tokens of all documents in order are the file's, and for a stream
there is one more, which ends the split.
"""

import codecs
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import BinaryIO

from data_pipeline.builder import records
from data_pipeline.builder.compression import (
    BLOCK_BYTES,
    CORRUPTION,
    InvalidRecords,
    UnreadableRecords,
    decompressed,
    is_compressed,
)
from data_pipeline.builder.formats import HEAD_BYTES, TABLES_AND_TOKENS, check_head, stated_kind
from data_pipeline.builder.mds_records import read_mds
from data_pipeline.builder.records import (
    Document,
    Records,
    Reject,
    Tell,
    corrupted,
    document_of_bytes,
    document_of_json,
    longest_json,
    too_long,
    with_newlines,
)
from data_pipeline.builder.sources import SourceFile
from data_pipeline.builder.tables import read_arrow, read_parquet
from data_pipeline.builder.tar_records import read_tar
from data_pipeline.builder.token_files import read_array, read_megatron
from data_pipeline.config import CorpusConfig, SourceKind
from foundation.errors import ConfigError, DataError
from foundation.files import named_errors, open_regular

# The title of an article; titles of its sections have more equals signs.
TITLE = re.compile(rb" ?= [^=].* = ?\r?\n?")
PART_BYTES = 100_000
SPACES, LONGEST_WORD = re.compile(rb"[ \n]"), 1024
REST_OF_CHARACTER = re.compile(rb"[\x80-\xbf]{0,3}")
# The last character, which may not be whole.
LAST_CHARACTER = re.compile(rb"[\xc0-\xff]?[\x80-\xbf]{0,3}\Z")


def read_lines(file: BinaryIO, source: SourceFile, config: CorpusConfig) -> Records:
    """Yield a document for each line that is not blank."""
    for number, line in enumerate(_lines(file), 1):
        location = f"{source.name}:{number}"
        if isinstance(line, Reject):
            yield replace(line, source=location)
        elif line.strip():
            yield document_of_bytes(line.rstrip(b"\r\n"), location, location, config)


def read_articles(file: BinaryIO, source: SourceFile, config: CorpusConfig) -> Records:
    """Yield a document for each title and what follows; the first has any blank lines in front."""
    lines: list[bytes] = []
    number, size = 1, 0
    for line in _lines(file):
        if isinstance(line, Reject):
            yield replace(line, source=f"{source.name}:{number}")
            continue
        if TITLE.fullmatch(line) and any(text.strip() for text in lines):
            yield _article(lines, size, number, source, config)
            lines, number, size = [], number + 1, 0
        size += len(line)
        if size <= records.LONGEST_DOCUMENT_BYTES:
            lines.append(line)
    if any(text.strip() for text in lines):
        yield _article(lines, size, number, source, config)


def _article(
    lines: list[bytes], size: int, number: int, source: SourceFile, config: CorpusConfig
) -> Document | Reject:
    location = f"{source.name}:{number}"
    if size > records.LONGEST_DOCUMENT_BYTES:
        return too_long(location)
    return document_of_bytes(b"".join(lines).removesuffix(b"\n"), location, location, config)


def _lines(file: BinaryIO) -> Iterator[bytes | Reject]:
    """Yield the lines with their ends; a Reject for one that is too long."""
    longest = records.LONGEST_DOCUMENT_BYTES + 2
    is_first = True
    while line := file.readline(longest):
        if is_first:
            line, is_first = line.removeprefix(codecs.BOM_UTF8), False
        if len(line) == longest and not line.endswith(b"\n"):
            while (line := file.readline(BLOCK_BYTES)) and not line.endswith(b"\n"):
                pass
            yield too_long("")
        else:
            yield line


def read_stream(file: BinaryIO, source: SourceFile, config: CorpusConfig) -> Records:
    """Yield the file's stretch from `source.start` on in parts of about PART_BYTES.

    They join to the stretch, and all but the last have `continues` set. InvalidRecords for a byte
    that is not UTF-8: without its part, 100 kB would be missing inside the text.
    """
    start = source.start
    if not start and file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
        start = len(codecs.BOM_UTF8)
    file.seek(start)
    left, offset, rest, has_any = source.size - start + source.start, start, b"", False
    while left:
        block = file.read(min(PART_BYTES, left))
        left = left - len(block) if block else 0
        text = rest + block
        cut = _end_of_part(text) if left else len(text)
        part, rest = text[:cut], text[cut:]
        if left and not part.strip():  # it might have no tokens
            rest = text
            continue
        try:
            decoded = with_newlines(part.decode(), config)
        except UnicodeDecodeError as error:
            raise InvalidRecords(f"invalid UTF-8 at byte {offset + error.start}") from None
        if has_any or part.strip():
            location = f"{source.name}:{offset}"
            yield Document(location, decoded, location, continues=left > 0)
        offset, has_any = offset + cut, True


def _end_of_part(text: bytes) -> int:
    """Return where to cut: after the last line, before the last space, or between characters."""
    line_end = text.rfind(b"\n") + 1
    if text[:line_end].strip():
        return line_end
    if (space := text.rfind(b" ")) > 0:
        return space
    return len(text) - len(LAST_CHARACTER.search(text)[0])  # type: ignore[index]


def refuse_packed(source: SourceFile) -> None:
    """Raise ConfigError for a compressed file: a stream is read from any byte on."""
    if is_compressed(source.name):
        raise ConfigError(
            f"{source.path} is compressed, expected plain text of a stream; unpack it"
        )


def stretches_of(source: SourceFile, config: CorpusConfig) -> Iterator[tuple[str, SourceFile]]:
    """Yield training and validation part of a stream, with their splits; the rest is for tests."""
    held_out = 0 if config.validation_input else round(source.size * config.validation_fraction)
    end = source.size - config.test_bytes
    refuse_packed(source)
    if end - held_out <= 0:
        raise ConfigError(
            f"{source.path} has {source.size:,} bytes, expected more than "
            f"validation_fraction={config.validation_fraction:g} of them plus "
            f"test_bytes={config.test_bytes:,}"
        )
    end = _word_start(source, end)
    start = _word_start(source, end - held_out)
    yield "train", replace(source, size=start)
    if held_out:
        yield "validation", replace(source, start=start, size=end - start)


def _word_start(source: SourceFile, offset: int) -> int:
    """Return the first start of a word, or in a long word of a character, from `offset` on."""
    if offset == source.size:
        return offset
    with open(source.path, "rb") as file:
        file.seek(offset - 1)
        near = file.read(LONGEST_WORD)
    word = SPACES.search(near) or REST_OF_CHARACTER.match(near, 1)
    return offset - 1 + (word.end() if word else 1)


def _read_bytes(
    reader: Callable[[BinaryIO, SourceFile, CorpusConfig], Records],
    source: SourceFile,
    config: CorpusConfig,
    follow: Callable[[Tell], None],
) -> Records:
    """Yield the records that `reader` finds in the file's unpacked bytes."""
    with named_errors(source.path), open(source.path, "rb", BLOCK_BYTES) as raw:
        follow(raw.tell)
        head = raw.peek(HEAD_BYTES)  # type: ignore[attr-defined]
        check_head(head, source.path.name, source.kind, config)
        unpacked = decompressed(raw, source.path.name)
        head = unpacked.peek(HEAD_BYTES)  # type: ignore[attr-defined]
        check_head(head, "", source.kind, config)
        yield from reader(unpacked, source, config)


def _read_text(file: BinaryIO, source: SourceFile, config: CorpusConfig) -> Records:
    raw = file.read(records.LONGEST_DOCUMENT_BYTES + 1)
    if stated_kind(config) is None and b"\0" in raw:
        yield Reject(source.name, f"not text (byte {raw.index(0)} is 0)")
        return
    yield document_of_bytes(raw.removeprefix(codecs.BOM_UTF8), source.name, source.name, config)


def _read_jsonl(file: BinaryIO, source: SourceFile, config: CorpusConfig) -> Records:
    longest_line = longest_json()
    number = 0
    while line := file.readline(longest_line):
        number += 1
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
            if line.lstrip().startswith(b"[") or line.strip() == b"{":
                query = ".[]" if b"[" in line else "."
                raise UnreadableRecords(
                    "it has a list or objects over several lines, expected one on each line; write "
                    f"them, such as by `jq -c '{query}' {source.path.name}`"
                )
        location = f"{source.name}:{number}"
        if len(line) == longest_line and not line.endswith(b"\n"):
            yield too_long(location)
            while (line := file.readline(BLOCK_BYTES)) and not line.endswith(b"\n"):
                pass
        elif line.strip():
            record = document_of_json(line.rstrip(b"\r\n"), location, location, config)
            reason = record.reason if isinstance(record, Reject) else ""
            is_cut = not line.endswith(b"\n") and (b"\0" in line or "Extra data" not in reason)
            if is_cut and reason.startswith("invalid "):
                raise InvalidRecords(f"its last line is {reason}")
            yield record


def read_documents(
    source: SourceFile, config: CorpusConfig, follow: Callable[[Tell], None] = lambda tell: None
) -> Records:
    """Yield every record of a file in order; DataError if the file cannot be read to its end.

    `follow` is called with a function that returns how many of the file's bytes were read so far.
    """
    try:
        if source.kind in TABLES_AND_TOKENS:
            with named_errors(source.path), open_regular(source.path) as file:
                check_head(file.read(HEAD_BYTES), source.path.name, source.kind, config)
        yield from READERS[source.kind](source, config, follow)
    except (*CORRUPTION, tarfile.TarError, InvalidRecords) as error:
        raise DataError(corrupted(source, error)) from None


Reader = Callable[[SourceFile, CorpusConfig, Callable[[Tell], None]], Records]
READERS: dict[SourceKind, Reader] = {
    "text": partial(_read_bytes, _read_text),
    "lines": partial(_read_bytes, read_lines),
    "wikitext": partial(_read_bytes, read_articles),
    "stream": partial(_read_bytes, read_stream),
    "jsonl": partial(_read_bytes, _read_jsonl),
    "tar": partial(_read_bytes, read_tar),
    "parquet": read_parquet,
    "arrow": read_arrow,
    "mds": read_mds,
    "megatron": read_megatron,
    "array": read_array,
}
