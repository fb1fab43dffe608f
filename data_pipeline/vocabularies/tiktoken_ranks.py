"""Encodings of tiktoken: a file of ranks, with the pattern and special tokens of the settings.

A line of the file is a token in base64 and its rank. The pattern is a regular expression that cuts
a text into words; the file does not have it, so it is a setting. Names of special tokens in a text
are encoded like other text.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from data_pipeline.config import LARGEST_VOCABULARY
from data_pipeline.vocabularies.vocabulary import (
    InvalidVocabulary,
    UnencodableText,
    encoding_errors,
    library_errors,
    missing_library,
    no_end,
    size_of,
)

LARGEST_GAP = 1  # ids without a token before the special ones: some encodings have one
PROBE = "A text's 10 words,\n  and more. "  # a pattern that can match an empty piece does it here


class TiktokenRanks:
    """A `tiktoken.Encoding` of the ranks; the special token `end_token` ends a document."""

    end_text = ""

    def __init__(
        self, model: bytes, pattern: str, special_tokens: Mapping[str, int], end_token: str
    ) -> None:
        try:
            import tiktoken
        except ImportError:
            raise missing_library("a .tiktoken file", "tiktoken", "tiktoken") from None
        if end_token not in special_tokens:
            raise no_end(end_token)
        ranks = read_ranks(model)
        ids = [*ranks.values(), *special_tokens.values()]
        if len(set(ids)) != len(ids):
            raise InvalidVocabulary("an encoding with two tokens of one id; give another")
        first = min(special_tokens.values())
        if (absent := first - sum(rank < first for rank in ranks.values())) > LARGEST_GAP:
            raise InvalidVocabulary(
                f"not the whole file of tiktoken ({absent:,} ids below {first:,}, the first "
                "special token, have no token); restore it, or name every special token"
            )
        self.vocab_size = size_of(ids)
        with library_errors("an encoding of tiktoken"):
            self.library: Any = tiktoken.Encoding(
                "ranks", pat_str=pattern, mergeable_ranks=ranks, special_tokens=dict(special_tokens)
            )
        try:
            self._encode(PROBE)
        except UnencodableText as error:
            raise InvalidVocabulary(
                f"an encoding whose tokenizer.pattern cuts a text into pieces that have no tokens "
                f"({error}); give the encoding's own, whose pieces are never empty"
            ) from None
        self.end_id = special_tokens[end_token]
        self._ids = frozenset(ids)

    def encode_many(self, texts: Sequence[str], num_threads: int) -> list[np.ndarray]:
        """Return one array of ids per text; releases the GIL."""
        if num_threads == 1 or len(texts) == 1:
            return list(map(self._encode, texts))
        with ThreadPoolExecutor(num_threads) as pool:
            return list(pool.map(self._encode, texts))

    def _encode(self, text: str) -> np.ndarray:
        with encoding_errors():
            return self.library.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids: Sequence[int]) -> str:
        known = [token for token in ids if token in self._ids]
        return self.library.decode_bytes(known).decode(errors="replace")

    def token_texts(self) -> list[bytes]:
        text_of = self.library.decode_single_token_bytes
        return [text_of(token) if token in self._ids else b"" for token in range(self.vocab_size)]


def read_ranks(model: bytes) -> dict[bytes, int]:
    """Return the ranks of the tokens; InvalidVocabulary unless every byte is one of them.

    The library ends the process's thread at a byte without a rank.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(model.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            value = int(rank) if len(rank) <= 8 else LARGEST_VOCABULARY
            if not 0 <= value < LARGEST_VOCABULARY:
                raise ValueError
            ranks[base64.b64decode(token, validate=True)] = value
        except (ValueError, binascii.Error):
            raise InvalidVocabulary(
                f"not a file of tiktoken (line {number} is not a token in base64 and a rank below "
                f"{LARGEST_VOCABULARY:,}); restore it"
            ) from None
    absent = next((value for value in range(256) if bytes([value]) not in ranks), None)
    if absent is not None:
        raise InvalidVocabulary(f"not a file of tiktoken (byte {absent} has no rank); restore it")
    return ranks
