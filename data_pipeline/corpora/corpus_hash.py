"""One hash of a whole corpus, for `data.manifest_hash`: whoever names it trusts no store.

A manifest has the hashes of its shards, of their documents' lengths and of the tokenizer, so the
hash of a corpus' manifests covers every byte of all its splits.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from data_pipeline.config import CacheConfig
from data_pipeline.corpora.manifest import MANIFEST_NAME, SPLITS, Manifest, read_manifest
from data_pipeline.corpora.remote_corpus import local_corpus_directory
from data_pipeline.errors import DataError
from data_pipeline.files import path_text

VALIDATION = SPLITS[1]


def split_hash(corpus: Path, split: str) -> str:
    """Return the hash of a split's tokens; "" if the corpus has no such split."""
    manifest = _manifest_of(corpus, split)
    return manifest.hash if manifest else ""


def corpus_hash(corpus: Path) -> str:
    """Return the hash of all splits of the corpus in a directory; "" if it has none."""
    manifests = {split: _manifest_of(corpus, split) for split in SPLITS}
    hashes = {split: found.file_hash if found else "" for split, found in manifests.items()}
    canonical = json.dumps(hashes, sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest() if any(hashes.values()) else ""


def _manifest_of(corpus: Path, split: str) -> Manifest | None:
    directory = corpus / split
    return read_manifest(directory) if (directory / MANIFEST_NAME).exists() else None


def pinned_directory(path: Path, cache: CacheConfig, manifest_hash: str) -> Path:
    """Return where to read the corpus at a path or URL; DataError unless it has the hash, if any.

    A URL's manifests and tokenizer are fetched.
    """
    directory = local_corpus_directory(path, cache)
    if manifest_hash and (found := corpus_hash(directory)) != manifest_hash:
        raise DataError(
            f"{path_text(path)} has manifest_hash {found[:16] or '(no splits)'}, the settings "
            f"expect {manifest_hash[:16]}: its training or validation split is another; restore "
            "it, or set the hash that `data-pipeline inspect` shows if it may be trusted"
        )
    return directory
