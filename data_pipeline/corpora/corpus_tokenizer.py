"""The tokenizer of a corpus, which must be the one that its manifests record.

Token ids mean nothing without it. Another tokenizer of the same kind and size would fit everywhere,
and give other texts, prompts and bits per byte.
"""

from __future__ import annotations

import functools
from pathlib import Path

from data_pipeline.corpora.manifest import MANIFEST_NAME, SPLITS, TOKENIZER_DIRECTORY, read_manifest
from data_pipeline.errors import DataError
from data_pipeline.settled_files import settled_state
from data_pipeline.tokenizer import (
    DESCRIPTION_NAME,
    MODEL_NAME,
    Tokenizer,
    read_fingerprint,
)

FINGERPRINTS_KEPT = 64


def tokenizer_of(corpus: Path) -> Tokenizer:
    """Return the tokenizer of a corpus, or of an export, which has no splits to compare it with.

    DataError unless it is the one of each split.
    """
    splits = [corpus / split for split in SPLITS if (corpus / split / MANIFEST_NAME).exists()]
    manifests = {split: read_manifest(split) for split in splits}
    for split, manifest in manifests.items():
        check_tokenizer(split, manifest.tokenizer)
    tokenizer = Tokenizer.load(corpus / TOKENIZER_DIRECTORY)
    for split, manifest in manifests.items():
        found = (manifest.vocab_size, manifest.end_id)
        if found != (tokenizer.vocab_size, tokenizer.end_id):
            raise DataError(
                f"{split / MANIFEST_NAME} has {found[0]} tokens of which {found[1]} ends a "
                f"document, its tokenizer {tokenizer.vocab_size} and {tokenizer.end_id}; build "
                "the corpus again"
            )
    return tokenizer


def check_tokenizer(split: Path, expected: str) -> None:
    """Raise DataError unless the tokenizer beside `split` has the fingerprint that it records.

    A corpus without a tokenizer can be trained on; what needs the tokenizer says that it is gone.
    """
    directory = split.parent / TOKENIZER_DIRECTORY
    if directory.exists() and (found := _fingerprint_in(directory)) != expected:
        raise DataError(
            f"tokenizer {directory} has fingerprint {found[:16]}, {split / MANIFEST_NAME} expects "
            f"{expected[:16]}; restore the tokenizer that the corpus was built with, or build the "
            "corpus again"
        )


def _fingerprint_in(directory: Path) -> str:
    """Return a tokenizer's fingerprint; a process hashes its files once, unless they change."""
    files = [directory / name for name in (DESCRIPTION_NAME, MODEL_NAME)]
    states = tuple(settled_state(path) for path in files if path.exists())
    read = _read_once if all(states) else _read_once.__wrapped__
    return read(directory.absolute(), states)


@functools.lru_cache(maxsize=FINGERPRINTS_KEPT)
def _read_once(directory: Path, states: tuple[object, ...]) -> str:
    return read_fingerprint(directory)
