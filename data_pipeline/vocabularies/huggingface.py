"""Tokenizers of Hugging Face: a `tokenizer.json`, read and run by the library `tokenizers`.

The file is JSON and holds no code; nothing is fetched. Names of special tokens in a text are
encoded like other text, so that no document can contain its end. No template is applied: what a
file would put before and after a text is for inference.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from data_pipeline.vocabularies.vocabulary import (
    encoding_errors,
    library_errors,
    missing_library,
    no_end,
    size_of,
)
from foundation.typed_values import parse_json


class HuggingFaceTokenizer:
    """The file's tokenizer, run by `tokenizers`; the token `end_token` ends a document."""

    end_text = ""

    def __init__(self, model: bytes, end_token: str) -> None:
        try:
            import tokenizers
        except ImportError:
            raise missing_library("a tokenizer.json", "tokenizers", "huggingface") from None
        with library_errors("a tokenizer.json of Hugging Face"):
            # Parsed here first: the library accepts some files that are not JSON.
            self._spells_bytes = _has_byte_level(parse_json(model))
            self.library: Any = tokenizers.Tokenizer.from_str(model.decode())
            self.library.no_truncation()
            self.library.no_padding()
            if getattr(self.library.model, "dropout", None):  # the same text has the same tokens
                self.library.model.dropout = None
            ids = self.library.get_vocab(with_added_tokens=True)
            self.vocab_size = size_of(set(ids.values()))
        if end_token not in ids:
            raise no_end(end_token)
        # Only special tokens' names are encoded as text, and the file may not call the end special.
        end = tokenizers.AddedToken(end_token, special=True, normalized=False)
        self.library.add_special_tokens([end])
        self.library.encode_special_tokens = True
        self.end_id = ids[end_token]

    def encode_many(self, texts: Sequence[str], num_threads: int) -> list[np.ndarray]:
        """Return one array of ids per text; releases the GIL.

        The library shares a batch among the threads of its own pool, one per core unless
        RAYON_NUM_THREADS says otherwise.
        """
        with encoding_errors():
            encoded = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        with encoding_errors():
            return self.library.decode(list(ids), skip_special_tokens=False)

    def token_texts(self) -> list[bytes]:
        """Return exact bytes if tokens' names spell bytes; otherwise what the names show."""
        ids = self.library.get_vocab(with_added_tokens=True)
        added = set(self.library.get_added_tokens_decoder())
        values = _byte_values() if self._spells_bytes else {}
        texts = [b""] * self.vocab_size
        for name, token in ids.items():
            if values and token not in added:
                texts[token] = bytes(values[letter] for letter in name if letter in values)
            elif len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
                texts[token] = b"\0"  # one byte; only its size matters
            else:
                texts[token] = name.removeprefix("##").replace("\u2581", " ").encode()
        return texts


def end_token_of(*descriptions: Any) -> str:
    """Return the end token that files beside a tokenizer.json name; "" if they name none."""
    for tree in descriptions:
        entry = tree.get("eos_token") if isinstance(tree, dict) else None
        name = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(name, str) and name:
            return name
    return ""


def special_tokens_of(model: bytes) -> set[str]:
    """Return the names of the tokens that the file adds to the tokens of its model."""
    tree = parse_json(model)
    added = tree.get("added_tokens") if isinstance(tree, dict) else None
    tokens = added if isinstance(added, list) else []
    return {str(token.get("content")) for token in tokens if isinstance(token, dict)}


def _has_byte_level(tree: Any) -> bool:
    """Whether the names of tokens spell bytes by one character each, as GPT-2's do."""
    decoder = tree.get("decoder") or {}
    steps = decoder.get("decoders") or [decoder]
    return any(step.get("type") == "ByteLevel" for step in steps if isinstance(step, dict))


def _byte_values() -> dict[str, int]:
    """Return character -> its byte: printable bytes are themselves, the others 256, 257, ..."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    values = {chr(value): value for value in printable}
    return {**values, **{chr(256 + number): value for number, value in enumerate(others)}}
