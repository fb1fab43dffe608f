"""Records of raw text: each becomes a Document or a Reject with its location and the reason.

Rejects are listed in a file, so no record is lost silently.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data_pipeline.builder.compression import UnreadableRecords
from data_pipeline.builder.sources import SourceFile
from data_pipeline.config import LARGEST_VOCABULARY, CorpusConfig
from foundation.errors import DataError
from foundation.settings import assert_never
from foundation.typed_values import json_text

LONGEST_DOCUMENT_BYTES = 1 << 28  # longer records are rejected; several fit into a shard
JSON_FRAME_BYTES = 1 << 20  # JSON that a record may have in addition to its text
EMPTY_ROW = "empty row"  # the reason for a row without text, such as one between paragraphs
MOST_BESIDE_TEXT = 1 << 24  # bytes of JSON outside of strings; parsed, they take 30 times more
REJECTS_NAME = "rejects.jsonl"
TOKEN_BYTES = 4
CUTS = ("\n\n", "\n", " ")  # ends of a paragraph, line and word: where to cut, best first


@dataclass(frozen=True, slots=True)
class Document:
    """One text, read whole and in order by one lane."""

    id: str
    text: str
    source: str  # file, or file:record
    tokens: np.ndarray | None = field(default=None, compare=False)  # instead of the text
    continues: bool = False  # the next document is the rest of this one: nothing ends here


@dataclass(frozen=True, slots=True)
class Reject:
    """An unusable record."""

    source: str
    reason: str

    @property
    def is_empty_row(self) -> bool:
        """Whether it is a row of a table without text."""
        return self.reason == EMPTY_ROW


Tell = Callable[[], int]  # how many of a file's bytes were read
Records = Iterator[Document | Reject]


def corrupted(source: SourceFile, reason: object) -> str:
    """Return the message about a file that cannot be read to its end, or not at all."""
    if isinstance(reason, UnreadableRecords):
        return f"{source.path} cannot be read: {reason}"
    return (
        f"{source.path} is corrupted or truncated ({reason}); "
        "fetch it again or remove it from the input"
    )


def longest_json() -> int:
    """Return the most bytes that JSON of a valid text may have: \\u00xx is one character."""
    return 6 * LONGEST_DOCUMENT_BYTES + JSON_FRAME_BYTES


def too_long(source: str) -> Reject:
    """Return the reject for a record that is longer than allowed."""
    return Reject(source, f"longer than {LONGEST_DOCUMENT_BYTES:,} bytes")


def document_of_bytes(
    raw: bytes, name: str, source: str, config: CorpusConfig
) -> Document | Reject:
    """Make a document from UTF-8; `name` is its id."""
    if len(raw) > LONGEST_DOCUMENT_BYTES:
        return too_long(source)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        return Reject(source, f"invalid UTF-8 at byte {error.start}")
    if not text.strip():
        return Reject(source, "empty")
    return Document(name, with_newlines(text, config), source)


def document_of_json(raw: bytes, name: str, source: str, config: CorpusConfig) -> Document | Reject:
    """Make a document from a JSON object with a text field; its id is its own, or else `name`."""
    if _has_much_beside_text(raw):
        return Reject(source, f"more than {MOST_BESIDE_TEXT:,} bytes of JSON beside its texts")
    try:
        record = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        return Reject(source, f"invalid UTF-8 at byte {error.start} of the JSON")
    except (ValueError, RecursionError) as error:
        return Reject(source, f"invalid JSON: {error}")
    if not isinstance(record, dict):
        return Reject(source, f"found {type(record).__name__}, expected a JSON object")
    if config.text_field not in record:
        return Reject(source, f"no field {config.text_field!r}")
    text = record[config.text_field]
    if not isinstance(text, str):
        type_name = type(text).__name__
        return Reject(source, f"field {config.text_field!r} holds {type_name}, expected text")
    if not text.strip():
        return Reject(source, "empty")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        return Reject(source, f"half a surrogate pair at character {error.start}")
    if size > LONGEST_DOCUMENT_BYTES:
        return too_long(source)
    name = document_id(record.get(config.id_field), name)
    return Document(name, with_newlines(text, config), source)


def _has_much_beside_text(raw: bytes) -> bool:
    """Whether a record's JSON has more than MOST_BESIDE_TEXT bytes outside of strings."""
    if len(raw) <= MOST_BESIDE_TEXT:
        return False
    raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # now each quote begins or ends a string
    counted = 8 * raw.count(b'"')  # a string takes 60 bytes of host memory beside its characters
    return counted > MOST_BESIDE_TEXT or (
        counted + sum(map(len, raw.split(b'"')[::2])) > MOST_BESIDE_TEXT
    )


def document_of_tokens(
    values: np.ndarray, name: str, source: str, config: CorpusConfig
) -> Document | Reject:
    """Make a document of token ids, without an end-of-document id at the end; `name` is its id."""
    if not np.issubdtype(values.dtype, np.integer):
        return Reject(source, f"found {values.dtype}, expected ids, which are integers")
    if len(values) and values[-1] == config.tokenizer.end_id:
        values = values[:-1]
    if not len(values):
        return Reject(source, "empty")
    if values.min() < 0 or values.max() >= LARGEST_VOCABULARY:
        wrong = values.min() if values.min() < 0 else values.max()
        return Reject(source, f"found the id {wrong}, expected 0 to {LARGEST_VOCABULARY - 1}")
    if len(values) * TOKEN_BYTES > LONGEST_DOCUMENT_BYTES:
        return too_long(source)
    return Document(name, "", source, values.astype(np.uint32))


def with_newlines(text: str, config: CorpusConfig) -> str:
    """Return the text with the line ends that the setting `newlines` asks for."""
    match config.newlines:
        case "keep":
            return text
        case "normalize":
            return text.replace("\r\n", "\n").replace("\r", "\n")
        case "drop":
            return text.replace("\n", "")
        case _:
            assert_never(config.newlines)


def document_id(value: object, name: str) -> str:
    """Return a record's own id, or `name` if it has no usable one."""
    if isinstance(value, bytes):
        return value.decode(errors="replace") or name
    if not isinstance(value, str | int) or value == "":
        return name
    return str(value).encode(errors="replace").decode()


class RejectList:
    """Lists unusable records in a file; DataError if there are more than allowed.

    Empty rows of tables are only counted.
    """

    def __init__(self, file: BinaryIO, limit: int, path: Path) -> None:
        self._file, self._limit, self._path = file, limit, path
        self.count = self.empty_rows = 0

    def add(self, reject: Reject) -> None:
        if reject.is_empty_row:
            self.empty_rows += 1
            return
        self.count += 1
        self._file.write(json_text(asdict(reject)).encode() + b"\n")
        if self.count > self._limit:
            self._file.flush()
            raise DataError(
                f"more than max_rejects={self._limit} unusable records, the last one is "
                f"{reject.source}: {reject.reason}; they are listed in {self._path}: "
                "fix them or raise max_rejects"
            )


def fraction_of(text: str) -> float:
    """Return a number in [0, 1) that depends only on `text` and is distributed evenly."""
    digest = hashlib.blake2b(text.encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little") / (1 << 48)


def parts_of(document: Document, limit: int) -> list[Document]:
    """Return the document, or its parts NAME#1, NAME#2, ... of at most `limit` characters."""
    if not limit or len(document.text) <= limit:
        return [document]
    return [
        replace(document, id=f"{document.id}#{number}", text=text)
        for number, text in enumerate(split_text(document.text, limit), 1)
    ]


def split_text(text: str, limit: int) -> Iterator[str]:
    """Yield parts of at most `limit` characters that join to `text`, cut as `CUTS` says."""
    start = 0
    while len(text) - start > limit:
        cuts = ((text.rfind(cut, start, start + limit), len(cut)) for cut in CUTS)
        end = next((index + length for index, length in cuts if index >= 0), start + limit)
        yield text[start:end]
        start = end
    yield text[start:]
