"""One file out of a store: tried again when it fails, checked before it takes its name."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from data_pipeline.corpora.manifest import (
    MANIFEST_NAME,
    Manifest,
    ShardInfo,
    mismatch,
    read_manifest,
)
from data_pipeline.corpora.stores import RetryPolicy, Store, StoreError, with_timeout
from data_pipeline.errors import DataError
from data_pipeline.files import fsync_directory, fsync_file, named_errors
from data_pipeline.tokenizer import DESCRIPTION_NAME, MODEL_NAME, Tokenizer, fingerprint_of

SMALL_BYTES = 32 << 20  # what a manifest or tokenizer is allowed time for


class NotFetchedError(DataError):
    """A remote file could not be had; `is_final` when the store said that it is not there, or not for us."""

    def __init__(self, message: str, is_final: bool) -> None:
        super().__init__(message)
        self.is_final = is_final


def fetch_file(
    store: Store,
    name: str,
    path: Path,
    scratch: Path,
    problem_with: Callable[[Path], str | None],
    size: int = SMALL_BYTES,
) -> None:
    """Have the store's file `name` at `path`; it comes there by a rename, once `problem_with` it there is none.

    `scratch` is a directory on the same file system. NotFetchedError names the file and why the last attempt failed;
    a full disk is an OSError at once.
    """
    attempt = partial(fetch_once, store, name, path, scratch, problem_with, size)
    retry(store.patience, f"{store.url}/{name} could not be fetched", attempt)


def retry(patience: RetryPolicy, failure: str, attempt: Callable[[], None]) -> None:
    """Call `attempt` until it raises no StoreError, with pauses; NotFetchedError when that is in vain."""
    number, last = 0, StoreError("no attempt was made")
    for number in range(1, patience.attempts + 1):
        try:
            return attempt()
        except StoreError as error:
            last = error
            if error.is_final or number == patience.attempts:
                break
        time.sleep(patience.pause_before(number))
    raise NotFetchedError(
        f"{failure}; attempt {number} of {patience.attempts} ended with: {last}; "
        "check the store, then run the same command again: finished work is kept",
        last.is_final,
    )


def fetch_once(
    store: Store,
    name: str,
    path: Path,
    scratch: Path,
    problem_with: Callable[[Path], str | None],
    size: int = SMALL_BYTES,
) -> None:
    """One attempt of `fetch_file`; StoreError says why it failed."""
    # A directory per attempt: a download that was given up may still write into the last one.
    with (
        named_errors(path),
        TemporaryDirectory(dir=scratch, prefix=".", ignore_cleanup_errors=True) as directory,
    ):
        arrived = Path(directory) / Path(name).name
        with_timeout(store.patience.seconds_for(size), lambda: store.download(name, arrived, size))
        if problem := problem_with(arrived):
            raise StoreError(problem)
        fsync_file(arrived)
        os.replace(arrived, path)
    fsync_directory(path.parent)


def fetch_shard(store: Store, info: ShardInfo, path: Path, scratch: Path) -> None:
    """Have the shard at `path`, of the manifest's size and SHA-256."""
    fetch_file(store, info.path, path, scratch, lambda arrived: mismatch(arrived, info), info.size)


def fetch_manifest(store: Store, directory: Path) -> Manifest:
    """The manifest of the split at the store, now in `directory` too."""
    directory.mkdir(parents=True, exist_ok=True)

    def problem(arrived: Path) -> str | None:
        try:
            read_manifest(arrived.parent)
        except DataError as error:
            return f"what arrived is not a manifest ({error})"
        return None

    fetch_file(store, MANIFEST_NAME, directory / MANIFEST_NAME, directory, problem)
    manifest = read_manifest(directory)
    for info in manifest.shards:
        if Path(info.path).name != info.path:
            raise DataError(
                f"{store.url}/{MANIFEST_NAME} names the shard {info.path!r}, expected a plain file name"
            )
    return manifest


def fetch_tokenizer(store: Store, directory: Path, fingerprint: str) -> None:
    """Have the tokenizer of that fingerprint in `directory`; nothing is transferred when it is there already."""
    with contextlib.suppress(DataError):
        if Tokenizer.load(directory).fingerprint == fingerprint:
            return
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory, prefix=".") as name:
        description, model = Path(name) / DESCRIPTION_NAME, Path(name) / MODEL_NAME
        fetch_file(
            store,
            DESCRIPTION_NAME,
            description,
            Path(name),
            lambda path: _odd_description(path, fingerprint),
        )
        if (kind := json.loads(description.read_bytes())["kind"]) != "bytes":
            fetch_file(
                store,
                MODEL_NAME,
                model,
                Path(name),
                lambda path: _odd_model(path, kind, fingerprint),
            )
            os.replace(model, directory / MODEL_NAME)
        os.replace(description, directory / DESCRIPTION_NAME)


def _odd_description(path: Path, fingerprint: str) -> str | None:
    try:
        found, _ = (json.loads(path.read_bytes())[name] for name in ("fingerprint", "kind"))
    except (ValueError, KeyError, TypeError):
        return "what arrived does not describe a tokenizer"
    if found != fingerprint:
        return f"the tokenizer there has fingerprint {str(found)[:16]}, the corpus was built with {fingerprint[:16]}"
    return None


def _odd_model(path: Path, kind: str, fingerprint: str) -> str | None:
    return (
        None
        if fingerprint_of(kind, path.read_bytes()) == fingerprint
        else "it is not what its description says"
    )
