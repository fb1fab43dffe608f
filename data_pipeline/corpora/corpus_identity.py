"""What identifies a corpus: one hash of all its splits (`data.manifest_hashes`), and its tokenizer.

A manifest has the hashes of its shards, of their documents' lengths and of the tokenizer, so the
hash of a corpus' manifests covers every byte of all its splits. A run that names this hash need not
trust a store. Token ids mean nothing without the tokenizer: another one of the same kind and size
would raise no error, but give other texts, prompts and bits per byte.
"""

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

from data_pipeline.config import CacheConfig
from data_pipeline.corpora.manifest import (
    MANIFEST_NAME,
    SPLITS,
    TOKENIZER_DIRECTORY,
    Manifest,
    read_manifest,
)
from data_pipeline.corpora.remote_corpus import local_corpus_directory
from data_pipeline.tokenizer import DESCRIPTION_NAME, MODEL_NAME, Tokenizer, read_fingerprint
from foundation.errors import DataError
from foundation.files import settled_state
from foundation.paths import path_text
from foundation.typed_values import json_text

VALIDATION = SPLITS[1]
FINGERPRINTS_KEPT = 64  # in a process's cache


def split_hash(corpus: Path, split: str) -> str:
    """Return the hash of a split's tokens; "" if the corpus has no such split."""
    manifest = _manifest_of(corpus, split)
    return manifest.hash if manifest else ""


def corpus_hash(corpus: Path) -> str:
    """Return the hash of all splits of the corpus in a directory; "" if it has none."""
    manifests = {split: _manifest_of(corpus, split) for split in SPLITS}
    hashes = {split: manifest.hash if manifest else "" for split, manifest in manifests.items()}
    canonical = json_text(hashes, sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest() if any(hashes.values()) else ""


def _manifest_of(corpus: Path, split: str) -> Manifest | None:
    directory = corpus / split
    return read_manifest(directory) if (directory / MANIFEST_NAME).exists() else None


def pinned_directory(path: Path, cache: CacheConfig, hashes: Sequence[str]) -> Path:
    """Return where to read the corpus at a path or URL.

    DataError if there are `hashes` and the corpus has none of them. A URL's manifests and tokenizer
    are fetched.
    """
    directory = local_corpus_directory(path, cache)
    if hashes and (own_hash := corpus_hash(directory)) not in hashes:
        raise DataError(
            f"{path_text(path)} has manifest_hash {own_hash[:16] or '(no splits)'}, "
            f"data.manifest_hashes expects {', '.join(pin[:16] for pin in hashes)}: its training "
            "or validation split is another; restore it, or add the hash that `data-pipeline "
            "inspect` shows if it may be trusted"
        )
    return directory


def tokenizer_of(corpus: Path) -> Tokenizer:
    """Return the tokenizer of a corpus, or of an export, which has no splits to compare it with.

    DataError unless each split was built with it.
    """
    splits = [corpus / split for split in SPLITS if (corpus / split / MANIFEST_NAME).exists()]
    manifests = {split: read_manifest(split) for split in splits}
    for split, manifest in manifests.items():
        check_tokenizer(split, manifest.tokenizer)
    tokenizer = Tokenizer.load(corpus / TOKENIZER_DIRECTORY)
    for split, manifest in manifests.items():
        if (manifest.vocab_size, manifest.end_id) != (tokenizer.vocab_size, tokenizer.end_id):
            raise DataError(
                f"{split / MANIFEST_NAME} has {manifest.vocab_size} tokens, and {manifest.end_id} "
                f"ends a document, its tokenizer {tokenizer.vocab_size} and {tokenizer.end_id}; "
                "build the corpus again"
            )
    return tokenizer


def check_tokenizer(split: Path, expected: str) -> None:
    """Raise DataError unless the tokenizer beside `split` has the fingerprint that it records.

    A corpus without a tokenizer can be trained on; code that needs the tokenizer raises an error.
    """
    directory = split.parent / TOKENIZER_DIRECTORY
    if directory.exists() and (fingerprint := _fingerprint_in(directory)) != expected:
        raise DataError(
            f"tokenizer {directory} has fingerprint {fingerprint[:16]}, "
            f"{split / MANIFEST_NAME} expects {expected[:16]}; restore the tokenizer "
            "that the corpus was built with, or build the corpus again"
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
