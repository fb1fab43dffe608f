"""Text to token ids and back: bytes, SentencePiece models of our own, or one of the user's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np

from data_pipeline.checked_fields import Fields, InvalidField
from data_pipeline.config import TokenizerKind
from data_pipeline.errors import DataError
from data_pipeline.files import (
    LARGEST_DESCRIPTION_BYTES,
    atomic_write,
    read_json,
    read_regular,
    write_json,
)
from data_pipeline.setting_fields import assert_never

DESCRIPTION_NAME = "tokenizer.json"
MODEL_NAME = "tokenizer.model"
NUM_BYTES = 256
# A long string halves BPE's speed, so a BPE model of our own encodes longer texts in parts of at
# least this many characters, cut after a newline. In such a model a newline is a separate symbol
# that no merge crosses, and nothing is added at the start of a text, so the parts have the same
# tokens as the whole. No other model is cut: one of the user's may add a space at every start, and
# unigram sums float32 scores from the start, so that near ties may end otherwise in a part.
CUT_CHARACTERS = 1 << 15


@dataclass(frozen=True, kw_only=True)
class TokenizerTraits:
    has_model: bool = True  # without one, tokens are bytes
    may_cut: bool = False  # at newlines, without other tokens than those of the whole text


def tokenizer_traits(kind: TokenizerKind) -> TokenizerTraits:
    """Return what a kind of tokenizer needs and allows."""
    match kind:
        case "unigram" | "sentencepiece":
            return TokenizerTraits()
        case "bpe":
            return TokenizerTraits(may_cut=True)
        case "bytes":
            return TokenizerTraits(has_model=False)
        case _:
            assert_never(kind)


class Tokenizer:
    """Encodes whole texts. Never returns `end_id`, which ends a document.

    The fingerprint, a hash of the model, identifies the tokenizer.
    """

    def __init__(self, kind: TokenizerKind, model: bytes = b"") -> None:
        self.kind: TokenizerKind = kind
        self.model = model
        self.fingerprint = fingerprint_of(kind, model)
        self._processor: Any = None
        if not tokenizer_traits(kind).has_model:
            self.vocab_size, self.end_id = NUM_BYTES + 1, NUM_BYTES
            return
        import sentencepiece

        if not model:
            raise DataError("not a SentencePiece model (it is empty); restore it")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            # All of them now: a piece that is not UTF-8 would be an error wherever it occurs.
            self._processor.id_to_piece(list(range(self._processor.get_piece_size())))
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise DataError(f"not a SentencePiece model ({reason}); restore it") from None
        self.vocab_size, self.end_id = self._processor.get_piece_size(), self._processor.eos_id()

    @property
    def dtype(self) -> str:
        """The smallest dtype that holds every id."""
        return "uint16" if self.vocab_size <= 1 << 16 else "uint32"

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of one text."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str], num_threads: int = 1) -> list[np.ndarray]:
        """Return one array of ids per text, equal for any number of threads; releases the GIL."""
        if self._processor is None:
            return [np.frombuffer(text.encode(), np.uint8).astype(self.dtype) for text in texts]
        may_cut = tokenizer_traits(self.kind).may_cut
        cut = [list(_cut_at_newlines(text)) if may_cut else [text] for text in texts]
        flat = [part for parts in cut for part in parts]
        encoded = iter(self._processor.encode(flat, return_type="numpy", num_threads=num_threads))
        return [_join([next(encoded) for _ in parts], self.dtype) for parts in cut]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of some ids, without ends of documents and ids outside the vocabulary."""
        kept = [int(i) for i in ids if int(i) != self.end_id and int(i) < self.vocab_size]
        if self._processor is None:
            return bytes(kept).decode(errors="replace")
        return self._processor.decode(kept)

    def text_sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return UTF-8 bytes and characters of text of each id, [V]; a text's are their sums.

        A character that is encoded as bytes counts at its first byte. Ends of documents count 0.
        """
        sizes = np.zeros((2, self.vocab_size), np.int64)
        for token in range(self.vocab_size):
            if token == self.end_id:
                continue
            piece = b"" if self._processor else bytes([token])
            if self._processor is not None and not self._processor.is_control(token):
                name = self._processor.id_to_piece(token)
                is_byte = self._processor.is_byte(token)
                piece = (
                    bytes([int(name[3:5], 16)]) if is_byte else name.replace("\u2581", " ").encode()
                )
            sizes[:, token] = len(piece), sum(byte & 0xC0 != 0x80 for byte in piece)
        return sizes[0], sizes[1]

    def save(self, directory: Path) -> None:
        """Write the model, then the description that marks the directory as a tokenizer."""
        directory.mkdir(parents=True, exist_ok=True)
        if self.model:
            with atomic_write(directory / MODEL_NAME) as file:
                file.write(self.model)
        description = {
            "kind": self.kind,
            "vocab_size": self.vocab_size,
            "end_id": self.end_id,
            "fingerprint": self.fingerprint,
        }
        write_json(directory / DESCRIPTION_NAME, description)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read what `save` wrote, or any SentencePiece `.model` file with an end token."""
        if path.is_file():
            return _of_file(path, "sentencepiece", path.read_bytes())
        return _of_file(path / MODEL_NAME, *_read(path))


def read_fingerprint(path: Path) -> str:
    """Return the fingerprint of the tokenizer that `save` wrote, without loading its model."""
    return fingerprint_of(*_read(path))


def fingerprint_of(kind: str, model: bytes) -> str:
    """Return the hash that identifies a tokenizer."""
    return hashlib.sha256(kind.encode() + b"\0" + model).hexdigest()


def _read(path: Path) -> tuple[TokenizerKind, bytes]:
    """Return kind and model of what `save` wrote; DataError unless they match the description."""
    try:
        description = Fields(read_json(path / DESCRIPTION_NAME, LARGEST_DESCRIPTION_BYTES))
        kind = cast("TokenizerKind", description.choice("kind", get_args(TokenizerKind)))
        expected = description.sha256("fingerprint")
        has_model = tokenizer_traits(kind).has_model
        model = read_regular(path / MODEL_NAME) if has_model else b""
    except FileNotFoundError as error:
        raise DataError(f"{path} is not a tokenizer: {error.filename} is missing") from None
    except (ValueError, InvalidField) as error:
        raise DataError(f"{path / DESCRIPTION_NAME} is corrupted ({error}); restore it") from None
    found = fingerprint_of(kind, model)
    if found != expected:
        raise DataError(
            f"{path} is corrupted: its model has fingerprint {found[:16]}, "
            f"its description expects {expected[:16]}; restore it"
        )
    return kind, model


def _of_file(path: Path, kind: TokenizerKind, model: bytes) -> Tokenizer:
    try:
        tokenizer = Tokenizer(kind, model)
    except DataError as error:
        raise DataError(f"{path} is {error}") from None
    if tokenizer.end_id < 0:
        raise DataError(
            f"{path} has no end-of-sentence token (eos_id), which must end every document; "
            "train another"
        )
    return tokenizer


def _cut_at_newlines(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > CUT_CHARACTERS:
        newline = text.find("\n", start + CUT_CHARACTERS - 1)
        if newline < 0:
            break
        yield text[start : newline + 1]
        start = newline + 1
    if start < len(text):
        yield text[start:]


def _join(parts: list[np.ndarray], dtype: str) -> np.ndarray:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
