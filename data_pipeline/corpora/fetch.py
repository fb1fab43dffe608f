"""Download files of a store: retried on failure, and checked before they get their names."""

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from data_pipeline.corpora.manifest import (
    LARGEST_MANIFEST_BYTES,
    MANIFEST_NAME,
    Manifest,
    ShardInfo,
    mismatch,
    read_manifest,
)
from data_pipeline.corpora.stores import Store, with_timeout
from data_pipeline.corpora.web_requests import RetryPolicy, StoreError
from data_pipeline.tokenizer import (
    DESCRIPTION_NAME,
    MODEL_NAME,
    TRAITS,
    Description,
    Tokenizer,
    fingerprint_of,
)
from data_pipeline.vocabularies.vocabulary import LARGEST_MODEL_BYTES
from foundation.errors import DataError
from foundation.files import (
    SMALL_FILE_BYTES,
    fsync_file,
    make_directory,
    move,
    named_errors,
    read_regular,
    read_value,
)
from foundation.paths import path_below

LARGEST_BYTES = 1 << 30  # size of a file if the caller states none
THREADS = 8  # threads of `in_parallel`
T = TypeVar("T")
Report = Callable[[str], None]
Check = Callable[[Path], str | None]  # what is wrong with a file that arrived, or None


class NotFetchedError(DataError):
    """A file could not be fetched; `is_absent` if the store says that it has no such file, and
    `is_final` if another try would not help."""

    def __init__(self, message: str, is_absent: bool, is_final: bool) -> None:
        super().__init__(message)
        self.is_absent, self.is_final = is_absent, is_final


def fetch_file(
    store: Store, name: str, path: Path, scratch: Path, check: Check, size: int = LARGEST_BYTES
) -> None:
    """Download the store's file `name`; rename it to `path` once `check` finds no problem.

    `scratch` is a directory on the same file system. NotFetchedError names the file and the reason
    of the last failure. A full disk raises OSError immediately.
    """
    attempt = partial(fetch_once, store, name, path, scratch, check, size)
    retry(store.retry_policy, f"{store.url}/{name} could not be fetched", attempt)


def retry(policy: RetryPolicy, failure: str, attempt: Callable[[], None]) -> None:
    """Call `attempt` until it raises no StoreError; NotFetchedError when `policy` gives up."""
    number, last = 0, StoreError("no attempt was made")
    for number in range(1, policy.attempts + 1):
        try:
            return attempt()
        except StoreError as error:
            last = error
            if error.is_final or number == policy.attempts:
                break
        time.sleep(policy.pause_before(number))
    raise NotFetchedError(
        f"{failure}; attempt {number} of {policy.attempts} failed: {last}; "
        "check the store, then run the same command again: finished work is kept",
        last.is_absent,
        last.is_final,
    )


def fetch_once(
    store: Store, name: str, path: Path, scratch: Path, check: Check, size: int = LARGEST_BYTES
) -> None:
    """Make one attempt of `fetch_file`; StoreError with the reason if it fails."""
    # A directory per attempt: a download that timed out may still write into the previous one.
    with (
        named_errors(path),
        TemporaryDirectory(dir=scratch, prefix=".", ignore_cleanup_errors=True) as directory,
    ):
        arrived = path_below(Path(directory), Path(name).name)
        timeout = store.retry_policy.seconds_for(size)
        with_timeout(timeout, lambda: store.download(name, arrived, size))
        if problem := check(arrived):
            raise StoreError(problem)
        fsync_file(arrived)
        move(arrived, path)


def fetch_shard(store: Store, info: ShardInfo, path: Path, scratch: Path) -> None:
    """Download a shard, or its file of lengths; check that size and SHA-256 are as in `info`."""
    fetch_file(store, info.path, path, scratch, lambda arrived: mismatch(arrived, info), info.size)


def fetch_manifest(store: Store, directory: Path) -> Manifest:
    """Download the manifest of the split at the store into `directory`, and return it."""
    make_directory(directory)
    manifests: list[Manifest] = []

    def check(arrived: Path) -> str | None:
        try:
            manifests[:] = [read_manifest(arrived.parent)]
        except DataError as error:
            return f"what arrived is not a manifest ({error})"
        return None

    path = directory / MANIFEST_NAME
    fetch_file(store, MANIFEST_NAME, path, directory, check, LARGEST_MANIFEST_BYTES)
    return manifests[0]


def fetch_tokenizer(store: Store, directory: Path, fingerprint: str) -> None:
    """Download the tokenizer of that fingerprint into `directory`, unless it is there already."""
    with contextlib.suppress(DataError):
        if Tokenizer.load(directory).fingerprint == fingerprint:
            return
    make_directory(directory)

    def check_model(path: Path) -> str | None:
        matches = (
            fingerprint_of(kind, read_regular(path, LARGEST_MODEL_BYTES), options) == fingerprint
        )
        return None if matches else "it does not match its description"

    with TemporaryDirectory(dir=directory, prefix=".") as name:
        scratch = Path(name)
        description, model = scratch / DESCRIPTION_NAME, scratch / MODEL_NAME
        check = partial(_description_problem, fingerprint=fingerprint)
        fetch_file(store, DESCRIPTION_NAME, description, scratch, check, SMALL_FILE_BYTES)
        described = read_value(Description, description, is_open=True)
        kind, options = described.kind, described.options
        if TRAITS[kind].has_model:
            fetch_file(store, MODEL_NAME, model, scratch, check_model, LARGEST_MODEL_BYTES)
            move(model, directory / MODEL_NAME)
        move(description, directory / DESCRIPTION_NAME)


def _description_problem(path: Path, fingerprint: str) -> str | None:
    try:
        stated = read_value(Description, path, is_open=True).fingerprint
    except ValueError as error:
        return f"what arrived describes no tokenizer that this version knows ({error})"
    if stated != fingerprint:
        return (
            f"the tokenizer there has fingerprint {stated[:16]}, "
            f"the corpus was built with {fingerprint[:16]}"
        )
    return None


def in_parallel(task: Callable[[T], None], items: Sequence[T], name: str, report: Report) -> None:
    """Run `task` for every item in some threads; raise the first error.

    Errors and Ctrl-C do not wait for active tasks, which a silent store may block for minutes:
    these are daemon threads. An executor would join its threads.
    """
    waiting, outcomes = deque(items), queue.Queue[BaseException | None]()

    def work() -> None:
        with contextlib.suppress(IndexError):  # the queue is empty
            while True:
                item = waiting.popleft()
                try:
                    task(item)
                    outcomes.put(None)
                except BaseException as error:  # the caller's thread raises it
                    outcomes.put(error)

    for _ in range(min(THREADS, len(items))):
        threading.Thread(target=work, name="copy", daemon=True).start()
    try:
        for number in range(1, len(items) + 1):
            if error := outcomes.get():
                raise error
            report(f"{name}: {number}/{len(items)}")
    finally:
        waiting.clear()
