"""The interface of all kinds of tokenizers, and their errors.

A vocabulary comes from a model, the bytes of a file, and from options that the file does not have.
Others may have written both. They are data, and no module here executes what they contain.
"""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import numpy as np

from data_pipeline.config import LARGEST_VOCABULARY
from foundation.errors import ConfigError, DataError

LARGEST_MODEL_BYTES = 1 << 28  # limit for a tokenizer's file; 800,000 words have 10 MB
MOST_UNUSED_IDS = 1 << 16  # more than any published vocabulary leaves for later
# Usual names of the token that ends a text, the most specific first.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "</s>", "<eos>", "<|eos|>", "[SEP]")


class InvalidVocabulary(Exception):
    """A model or its options are wrong; the message completes "FILE is ..."."""


class UnencodableText(DataError):
    """A tokenizer has no usable ids for one text; the message says why."""


class Vocabulary(Protocol):
    """The ids of a tokenizer, from 0 to `vocab_size` - 1."""

    vocab_size: int
    end_id: int  # ends a document
    end_text: str  # the text that end_id stands for; "": none, and no text contains end_id

    def encode_many(self, texts: Sequence[str], num_threads: int) -> list[np.ndarray]:
        """Return each text's ids, equal for any number of threads, or raise UnencodableText."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids of the vocabulary."""
        ...

    def token_texts(self) -> list[bytes]:
        """Return the text that each id adds to a document; b"" if it adds none."""
        ...


def missing_library(what: str, library: str, extra: str) -> ConfigError:
    """Return the error for an optional dependency that is not installed."""
    return ConfigError(
        f"{what} needs {library}, which is not installed; `pip install 'xl-pretrain[{extra}]'`"
    )


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Raise InvalidVocabulary for whatever a library raises about a file, a panic of Rust too."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, InvalidVocabulary):
        raise
    except BaseException as error:
        reason = _reason_of(error)
        if reason.startswith("INTERNAL: "):  # names a line of SentencePiece's own code
            reason = "it cannot be parsed"
        raise InvalidVocabulary(f"not {what} ({reason}); restore it") from None


@contextlib.contextmanager
def encoding_errors() -> Iterator[None]:
    """Raise UnencodableText for whatever a library raises about a text, a panic of Rust too."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, UnencodableText):
        raise
    except BaseException as error:
        raise UnencodableText(f"the tokenizer fails: {_reason_of(error)}") from None


def _reason_of(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def check_size(vocab_size: int) -> int:
    """Return the size; InvalidVocabulary unless tables of that size fit into host memory."""
    if not 0 < vocab_size <= LARGEST_VOCABULARY:
        raise InvalidVocabulary(
            f"a vocabulary of {vocab_size:,} ids, expected 1 to {LARGEST_VOCABULARY:,}; "
            "give another"
        )
    return vocab_size


def size_of(ids: Collection[int]) -> int:
    """Return the size of a vocabulary with these ids, which is the largest id plus one.

    InvalidVocabulary as in `check_size`, and if a small file would make large tables.
    """
    size = check_size(max(ids, default=-1) + 1)
    if size > 2 * len(ids) + MOST_UNUSED_IDS:
        raise InvalidVocabulary(
            f"a vocabulary of {len(ids):,} tokens with ids up to {size - 1:,}, expected at most "
            f"{MOST_UNUSED_IDS:,} unused ones; give another"
        )
    return size


def usual_end(names: Collection[str]) -> str:
    """Return the first of END_NAMES that is among `names`; "" if there is no such name."""
    return next((name for name in END_NAMES if name in names), "")


def no_end(end_token: str) -> InvalidVocabulary:
    """Return the error for a vocabulary without the token that ends documents."""
    problem = f"has no token {end_token!r}" if end_token else "does not say which token ends a text"
    return InvalidVocabulary(
        f"a tokenizer that {problem}, which must end every document; set tokenizer.end_token"
    )
