"""Bytes as tokens: 256 values and the end of a document."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NUM_BYTES = 256


class ByteValues:
    """The bytes of UTF-8, and 256 at the end."""

    vocab_size, end_id, end_text = NUM_BYTES + 1, NUM_BYTES, ""

    def encode_many(self, texts: Sequence[str], num_threads: int) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])
