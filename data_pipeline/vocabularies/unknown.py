"""Tokens of a tokenizer that nobody has: their text is their ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.vocabularies.vocabulary import InvalidVocabulary, check_size


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

    def token_bytes(self, token: int) -> bytes:
        return b""
