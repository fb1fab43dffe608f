"""A record of raw text turns into a document, or into a reject with its place and the reason: none is lost silently."""

from __future__ import annotations

import json
from dataclasses import dataclass

from data_pipeline.config import CorpusConfig

JSON_FRAME_BYTES = 1 << 20  # of a record, beside its text


@dataclass(frozen=True, slots=True)
class Document:
    """One text, read whole and in order by one lane."""

    id: str
    text: str
    source: str  # file, or file:record


@dataclass(frozen=True, slots=True)
class Reject:
    """A record that was left out."""

    source: str
    reason: str


def longest_json(config: CorpusConfig) -> int:
    """Bytes of JSON beyond which its text is too long: it may write a character as \\u00xx, which is six bytes."""
    return 6 * config.max_document_bytes + JSON_FRAME_BYTES


def too_long(place: str, config: CorpusConfig) -> Reject:
    """A record beyond the longest that is allowed."""
    return Reject(place, f"longer than max_document_bytes={config.max_document_bytes}")


def document_of_bytes(raw: bytes, name: str, place: str, config: CorpusConfig) -> Document | Reject:
    """A document out of UTF-8; `name` is its id."""
    if len(raw) > config.max_document_bytes:
        return too_long(place, config)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        return Reject(place, f"invalid UTF-8 at byte {error.start}")
    return Document(name, text, place) if text.strip() else Reject(place, "empty")


def document_of_json(raw: bytes, name: str, place: str, config: CorpusConfig) -> Document | Reject:
    """A document out of a JSON object with a field of text; `name` is its id if the object has none."""
    try:
        record = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        return Reject(place, f"invalid UTF-8 at byte {error.start} of the JSON")
    except (ValueError, RecursionError) as error:
        return Reject(place, f"invalid JSON: {error}")
    if not isinstance(record, dict):
        return Reject(place, f"found {type(record).__name__}, expected a JSON object")
    if config.text_field not in record:
        return Reject(place, f"no field {config.text_field!r}")
    text = record[config.text_field]
    if not isinstance(text, str):
        return Reject(
            place, f"field {config.text_field!r} holds {type(text).__name__}, expected text"
        )
    if not text.strip():
        return Reject(place, "empty")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        return Reject(place, f"half a surrogate pair at character {error.start}")
    if size > config.max_document_bytes:
        return too_long(place, config)
    return Document(document_id(record.get(config.id_field), name), text, place)


def document_id(value: object, name: str) -> str:
    """A record's own id, or `name` if it has none that can be one."""
    if isinstance(value, bytes):
        return value.decode(errors="replace") or name
    if not isinstance(value, str | int) or value == "":
        return name
    return str(value).encode(errors="replace").decode()
