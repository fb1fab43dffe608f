"""What happens to usable documents before they are encoded: later copies are dropped, very long ones are cut."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace

from data_pipeline.builder.records import Document
from data_pipeline.config import CorpusConfig

HASH_BYTES = 16
# Where a long document may be cut, best first: behind a paragraph, a line, a word.
CUTS = ("\n\n", "\n", " ")


class DocumentRules:
    """Applies the settings `drop_duplicates` and `split_characters`, and counts what they did.

    The first of equal documents in the order of the input stays, whichever split it belongs to. Only 16 bytes of hash
    are held for each document.
    """

    def __init__(self, config: CorpusConfig, seen: Iterable[bytes] = ()) -> None:
        """`seen`: hashes of texts that came before the first document."""
        self._config = config
        self._seen = set(seen)
        self.duplicates = 0
        self.split_documents = 0

    def apply(self, document: Document) -> Iterator[Document]:
        """Nothing for a copy; the document; or its parts, with the ids NAME#1, NAME#2, ..."""
        if self._config.drop_duplicates and self._is_copy(document.text):
            self.duplicates += 1
            return
        limit = self._config.split_characters
        if not limit or len(document.text) <= limit:
            yield document
            return
        self.split_documents += 1
        for number, text in enumerate(split_text(document.text, limit), 1):
            yield replace(document, id=f"{document.id}#{number}", text=text)

    def _is_copy(self, text: str) -> bool:
        digest = hash_of(text)
        is_copy = digest in self._seen
        self._seen.add(digest)
        return is_copy


def hash_of(text: str) -> bytes:
    """What equal texts have in common and no others, for all that is known."""
    return hashlib.blake2b(text.encode(), digest_size=HASH_BYTES).digest()


def split_text(text: str, limit: int) -> Iterator[str]:
    """Parts of at most `limit` characters that join to `text`, cut behind paragraphs wherever one ends in time."""
    begin = 0
    while len(text) - begin > limit:
        found = ((text.rfind(cut, begin, begin + limit), len(cut)) for cut in CUTS)
        end = next((place + length for place, length in found if place >= 0), begin + limit)
        yield text[begin:end]
        begin = end
    yield text[begin:]
