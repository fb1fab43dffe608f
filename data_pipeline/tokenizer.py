"""Text to token ids and back, by any kind of tokenizer (data_pipeline/vocabularies)."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from data_pipeline.config import LARGEST_VOCABULARY, TokenizerKind
from data_pipeline.vocabularies.built_in import ByteValues, Characters, UnknownTokens
from data_pipeline.vocabularies.confined import ConfinedVocabulary
from data_pipeline.vocabularies.vocabulary import (
    LARGEST_MODEL_BYTES,
    InvalidVocabulary,
    UnencodableText,
    Vocabulary,
)
from data_pipeline.vocabularies.words import Words, normalized_words
from foundation.errors import DataError
from foundation.files import (
    GIT_LFS_POINTER,
    atomic_write,
    make_directory,
    read_regular,
    read_value,
    write_json,
)
from foundation.settings import assert_never
from foundation.typed_values import Count, InvalidValue, Line, Sha256, between, from_tree, json_text

DESCRIPTION_NAME = "tokenizer.json"
MODEL_NAME = "tokenizer.model"


@dataclass(frozen=True, kw_only=True)
class TokenizerTraits:
    """What a kind of tokenizer needs and allows."""

    has_model: bool = True  # a file defines it; otherwise its options do
    is_made: bool = False  # a build makes it from its text, unless one is given
    counts_all: bool = False  # it is made from all of that text, not from a sample
    is_list: bool = False  # any file given for it is a list of words, one a line
    joins: bool = True  # cut after line ends and decoded part by part, tokens give the same text


TRAITS: dict[TokenizerKind, TokenizerTraits] = {
    "unigram": TokenizerTraits(is_made=True),
    "bpe": TokenizerTraits(is_made=True),
    "characters": TokenizerTraits(is_made=True, counts_all=True),
    "words": TokenizerTraits(is_made=True, counts_all=True, is_list=True),
    "sentencepiece": TokenizerTraits(joins=False),  # decoding may drop a space at the start
    "huggingface": TokenizerTraits(joins=False),
    "tiktoken": TokenizerTraits(),
    "bytes": TokenizerTraits(has_model=False),
    "unknown": TokenizerTraits(has_model=False),
}


@dataclass(frozen=True)
class Description:
    """A tokenizer's description, stored next to its model."""

    kind: TokenizerKind
    fingerprint: Sha256
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _EndToken:
    end_token: Line


@dataclass(frozen=True)
class _Tiktoken:
    end_token: Line
    pattern: str
    special_tokens: dict[str, Annotated[int, between(0, LARGEST_VOCABULARY - 1)]]


@dataclass(frozen=True)
class _Unknown:
    vocab_size: Count
    end_id: Count


@functools.lru_cache(maxsize=1)  # to start a library takes half a second
def _vocabulary_of(kind: TokenizerKind, model: bytes, options_json: str) -> Vocabulary:
    """Return the vocabulary; InvalidVocabulary or InvalidValue if model or options are wrong."""
    options = json.loads(options_json)
    match kind:
        case "unigram" | "bpe":
            return ConfinedVocabulary("sentencepiece", model, may_cut=kind == "bpe")
        case "sentencepiece":
            end = from_tree(_EndToken, {"end_token": "", **options}, is_open=True)
            return ConfinedVocabulary(kind, model, may_cut=False, **vars(end))
        case "huggingface":
            return ConfinedVocabulary(kind, model, **vars(from_tree(_EndToken, options)))
        case "tiktoken":
            return ConfinedVocabulary(kind, model, **vars(from_tree(_Tiktoken, options)))
        case "words":
            return Words(model, from_tree(_EndToken, options).end_token)
        case "characters":
            return Characters(model)
        case "bytes":
            return ByteValues()
        case "unknown":
            unknown = from_tree(_Unknown, options)
            return UnknownTokens(unknown.vocab_size, unknown.end_id)
        case _:
            assert_never(kind)


class Tokenizer:
    """Encodes whole texts, without the `end_id` that ends a document.

    No text has that id inside, unless it stands for `end_text`: for words, it is each line end. The
    fingerprint, a hash of kind, model and options, identifies the tokenizer. If these are wrong,
    DataError has a message that completes "FILE is ...".
    """

    def __init__(
        self, kind: TokenizerKind, model: bytes = b"", options: Mapping[str, Any] | None = None
    ) -> None:
        self.kind: TokenizerKind = kind
        self.model = model
        self.options = dict(options or {})
        self.fingerprint = fingerprint_of(kind, model, self.options)
        try:
            self.vocabulary = _vocabulary_of(kind, model, json_text(self.options))
        except (InvalidVocabulary, InvalidValue) as error:
            raise DataError(str(error)) from None
        self.vocab_size, self.end_id = self.vocabulary.vocab_size, self.vocabulary.end_id
        self.end_text = self.vocabulary.end_text
        self._text_sizes: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def dtype(self) -> str:
        """The smallest dtype that holds every id."""
        return "uint16" if self.vocab_size <= 1 << 16 else "uint32"

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of one text."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str], num_threads: int = 1) -> list[np.ndarray]:
        """Return one array of ids per text, equal for any number of threads; releases the GIL.

        UnencodableText for a text that has the end of a document inside, or cannot be encoded.
        """
        encoded = [
            ids.astype(self.dtype, copy=False)
            for ids in self.vocabulary.encode_many(texts, num_threads)
        ]
        if not self.end_text and any((ids == self.end_id).any() for ids in encoded):
            raise UnencodableText(
                f"it contains token {self.end_id}, which ends documents; choose another with "
                "tokenizer.end_token, or another tokenizer"
            )
        return encoded

    def checked(self, ids: np.ndarray, source: str) -> np.ndarray:
        """Return ids that were given instead of text; DataError names `source` if one is wrong."""
        if (largest := int(ids.max())) >= self.vocab_size:
            raise DataError(
                f"{source} has the id {largest}, the vocabulary {self.vocab_size:,} ids; give the "
                "tokenizer of these tokens, raise tokenizer.vocab_size, or correct token_dtype"
            )
        if not self.end_text and (ids == self.end_id).any():
            raise DataError(
                f"{source} contains {self.end_id}, which ends documents; set tokenizer.end_id "
                "to it, or choose another end with tokenizer.end_token"
            )
        return ids.astype(self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of some ids.

        Ids outside the vocabulary are skipped, and ends of documents unless they stand for text.
        """
        tokens = (int(token) for token in ids)
        skipped = -1 if self.end_text else self.end_id
        return self.vocabulary.decode(
            [token for token in tokens if token != skipped and 0 <= token < self.vocab_size]
        )

    def normalized(self, text: str) -> str:
        """Return what encoding and decoding should give: the text; for words, single spaces."""
        return normalized_words(text) if isinstance(self.vocabulary, Words) else text

    def leaves_out_end_of(self, text: str) -> bool:
        """Whether `encode` drops the last line end of the text, as for words (it is `end_id`)."""
        return isinstance(self.vocabulary, Words) and text.endswith(self.end_text)

    def text_sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return how many UTF-8 bytes, and how many characters, each id adds to a text, [V].

        A character that is encoded as bytes counts at its first byte. Ends of documents count 0,
        unless they stand for text.
        """
        if self._text_sizes is None:
            sizes = np.zeros((2, self.vocab_size), np.int64)
            for token, piece in enumerate(self.vocabulary.token_texts()):
                if token != self.end_id or self.end_text:
                    sizes[:, token] = len(piece), sum(byte & 0xC0 != 0x80 for byte in piece)
            self._text_sizes = sizes[0], sizes[1]
        return self._text_sizes

    def save(self, directory: Path) -> None:
        """Write the model, then the description that marks the directory as a tokenizer."""
        make_directory(directory)
        if not self.model:
            (directory / MODEL_NAME).unlink(missing_ok=True)
        else:
            with atomic_write(directory / MODEL_NAME) as file:
                file.write(self.model)
        description = {
            "kind": self.kind,
            "vocab_size": self.vocab_size,
            "end_id": self.end_id,
            "fingerprint": self.fingerprint,
        }
        if self.options:
            description["options"] = self.options
        write_json(directory / DESCRIPTION_NAME, description)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read what `save` wrote, or any SentencePiece `.model` file with an end token."""
        if path.is_file():
            return named_tokenizer(path, "sentencepiece", read_model(path))
        kind, model, options = read_saved(path)
        return named_tokenizer(path / MODEL_NAME, kind, model, options)


def read_model(path: Path) -> bytes:
    """Return the bytes of a tokenizer file that others wrote; DataError if it cannot be one."""
    try:
        content = read_regular(path, LARGEST_MODEL_BYTES)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; give the file of a tokenizer") from None
    except ValueError as error:
        raise DataError(f"{path} is not the file of a tokenizer ({error})") from None
    if content.startswith(GIT_LFS_POINTER):
        raise DataError(f"{path} is a pointer of Git LFS; fetch its contents by `git lfs pull`")
    return content


def read_fingerprint(path: Path) -> str:
    """Return the fingerprint of the tokenizer that `save` wrote, without loading its model."""
    return fingerprint_of(*read_saved(path))


def fingerprint_of(kind: str, model: bytes, options: Mapping[str, Any] | None = None) -> str:
    """Return the hash that identifies a tokenizer."""
    named = json_text(options, sort_keys=True).encode() + b"\0" if options else b""
    return hashlib.sha256(kind.encode() + b"\0" + named + model).hexdigest()


def read_saved(path: Path) -> tuple[TokenizerKind, bytes, dict[str, Any]]:
    """Return kind, model and options of what `save` wrote.

    DataError unless the fingerprint of the three is the description's.
    """
    try:
        description = read_value(Description, path / DESCRIPTION_NAME, is_open=True)
        kind, expected = description.kind, description.fingerprint
        options = description.options
        model = b""
        if TRAITS[kind].has_model:
            model = read_regular(path / MODEL_NAME, LARGEST_MODEL_BYTES)
        elif os.path.lexists(path / MODEL_NAME):
            raise ValueError(f"a tokenizer of kind {kind} has no {MODEL_NAME}, found one")
    except FileNotFoundError as error:
        raise DataError(f"{path} is not a tokenizer: {error.filename} is missing") from None
    except ValueError as error:
        raise DataError(f"{path / DESCRIPTION_NAME} is corrupted ({error}); restore it") from None
    fingerprint = fingerprint_of(kind, model, options)
    if fingerprint != expected:
        raise DataError(
            f"{path} is corrupted: its model has fingerprint {fingerprint}, its description "
            f"expects {expected}; restore it"
        )
    return kind, model, options


def named_tokenizer(
    path: Path, kind: TokenizerKind, model: bytes, options: Mapping[str, Any] | None = None
) -> Tokenizer:
    """Return the tokenizer of the model at `path`; DataError names it if the model is wrong."""
    try:
        return Tokenizer(kind, model, options)
    except DataError as error:
        raise DataError(f"{path} is {error}") from None
