"""Tokens without a library: bytes, characters, and the ids of a tokenizer that is unknown.

`Characters` are the bytes that occur in the text, the most frequent first, as for enwik8 and text8.
A space ends a document, and may be inside one, too: a long text cut at its spaces has the same
tokens as the whole. Only the last token of a split is not in the text.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from data_pipeline.vocabularies.vocabulary import InvalidVocabulary, check_size
from foundation.errors import DataError

NUM_BYTES = 256
END = b" "


class ByteValues:
    """The bytes of UTF-8; the id 256 ends a document."""

    vocab_size, end_id, end_text = NUM_BYTES + 1, NUM_BYTES, ""

    def encode_many(self, texts: Sequence[str], num_threads: int) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def token_texts(self) -> list[bytes]:
        return [*(bytes([value]) for value in range(NUM_BYTES)), b""]


class Characters:
    """The bytes of the model, in the order of their ids."""

    end_text = END.decode()

    def __init__(self, model: bytes) -> None:
        if END not in model or len(set(model)) < len(model):
            raise InvalidVocabulary(
                "not a list of different bytes with a space, which ends every document; restore it"
            )
        self.vocab_size, self.end_id = len(model), model.index(END)
        self._values = np.frombuffer(model, np.uint8)
        self._ids = np.full(NUM_BYTES, self.vocab_size, np.uint16)
        self._ids[self._values] = np.arange(self.vocab_size)

    def encode_many(self, texts: Sequence[str], num_threads: int) -> list[np.ndarray]:
        """Return one array of ids per text; DataError for a byte that the vocabulary lacks."""
        return list(map(self._encode, texts))

    def _encode(self, text: str) -> np.ndarray:
        values = np.frombuffer(text.encode(), np.uint8)
        ids = self._ids[values]
        if (unknown := values[ids == self.vocab_size]).size:
            raise DataError(
                f"byte {unknown[0]} of a text is not in the vocabulary of its characters; build "
                "from text that has all of them, or use tokenizer.kind=bytes"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._values[list(ids)].tobytes().decode(errors="replace")

    def token_texts(self) -> list[bytes]:
        return [value.tobytes() for value in self._values]


def most_frequent_bytes(texts: Iterable[str]) -> bytes:
    """Return the bytes in the texts, most frequent first; of equal counts, the smallest first."""
    counts = np.zeros(NUM_BYTES, np.int64)
    for text in texts:
        counts += np.bincount(np.frombuffer(text.encode(), np.uint8), minlength=NUM_BYTES)
    counts[END[0]] += 1  # the end of each text
    order = np.argsort(-counts, kind="stable")
    return order[counts[order] > 0].astype(np.uint8).tobytes()


class UnknownTokens:
    """Ids below `vocab_size`; `end_id` ends a document."""

    end_text = ""

    def __init__(self, vocab_size: int, end_id: int) -> None:
        self.vocab_size, self.end_id = check_size(vocab_size), end_id
        if not 0 <= end_id < vocab_size:
            raise InvalidVocabulary(
                f"a vocabulary of {vocab_size:,} ids without the id {end_id}, which must end every "
                "document; set tokenizer.end_id"
            )

    def encode_many(self, texts: Sequence[str], num_threads: int) -> list[np.ndarray]:
        """Return the ids that are written in each text; DataError if anything else is."""
        return [np.array([self._id_of(word) for word in text.split()], np.uint32) for text in texts]

    def _id_of(self, word: str) -> int:
        if word.isascii() and word.isdigit() and len(word) <= 8 and int(word) < self.vocab_size:
            return int(word)
        raise DataError(
            f"found {word[:40]!r}, expected ids below {self.vocab_size:,}: the tokenizer of these "
            "tokens is unknown, so texts are written as ids"
        )

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"{token} " for token in ids)

    def token_texts(self) -> list[bytes]:
        return [b""] * self.vocab_size
