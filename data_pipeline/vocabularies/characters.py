"""Characters as enwik8 and text8 use them: the bytes that occur in the text, the commonest first.

A space ends a document, and stands in the text as well: a long text cut at its spaces is the same
sequence of tokens as the whole, and no token is there that is not in the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.vocabularies.byte_values import NUM_BYTES
from data_pipeline.vocabularies.vocabulary import InvalidVocabulary

END = b" "


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

    def token_bytes(self, token: int) -> bytes:
        return self._values[token].tobytes()


def most_frequent_bytes(texts: Iterable[str]) -> bytes:
    """Return the model of the bytes of the texts: by count, of equal ones the smallest first."""
    counts = np.zeros(NUM_BYTES, np.int64)
    for text in texts:
        counts += np.bincount(np.frombuffer(text.encode(), np.uint8), minlength=NUM_BYTES)
    counts[END[0]] += 1  # the end of each text
    order = np.argsort(-counts, kind="stable")
    return order[counts[order] > 0].astype(np.uint8).tobytes()
