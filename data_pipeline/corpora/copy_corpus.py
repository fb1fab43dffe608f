"""Copy a whole corpus from or to a store, and verify one in a store.

An interrupted copy is resumed by the same call: files that already match at the target are not
transferred again. The manifest is copied last, so a split that has one is complete.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from data_pipeline.corpora.fetch import (
    Check,
    NotFetchedError,
    fetch_lengths,
    fetch_manifest,
    fetch_once,
    fetch_shard,
    fetch_tokenizer,
    retry,
)
from data_pipeline.corpora.lengths import files_of, lengths_beside, lengths_problem
from data_pipeline.corpora.manifest import (
    MANIFEST_NAME,
    SPLITS,
    TOKENIZER_DIRECTORY,
    ShardInfo,
    check_shard,
    lengths_name,
    mismatch,
    read_manifest,
    splits_of,
)
from data_pipeline.corpora.stores import (
    RetryPolicy,
    Store,
    StoreError,
    store_at,
    uploader_to,
    with_timeout,
)
from data_pipeline.shards.mds import INDEX_NAME
from foundation.errors import DataError
from foundation.files import folder_below, path_below
from foundation.locks import exclusive_lock

THREADS = 8
LOCK, SCRATCH = ".fetch.lock", ".fetch"
LOCK_SECONDS = 10.0
T = TypeVar("T")
Report = Callable[[str], None]


def fetch_corpus(
    url: str,
    directory: Path,
    splits: Sequence[str],
    report: Report,
    retry_policy: RetryPolicy | None = None,
) -> None:
    """Copy the named splits of the corpus at `url`, and its tokenizer, into `directory`."""
    tokenizers = store_at(f"{url.rstrip('/')}/{TOKENIZER_DIRECTORY}", retry_policy)
    stores = [store_at(f"{url.rstrip('/')}/{split}", retry_policy) for split in splits]
    with exclusive_scratch(directory) as scratch:
        for split, store in zip(splits, stores, strict=True):
            manifest = fetch_manifest(store, scratch)
            target = folder_below(directory, split)

            def fetch(info: ShardInfo, store: Store = store, target: Path = target) -> None:
                path = path_below(target, info.path)
                if not path.exists() or mismatch(path, info):
                    fetch_shard(store, info, path, scratch)
                lengths = path_below(target, lengths_name(info.path))
                if not lengths.exists() or lengths_problem(lengths, info):
                    fetch_lengths(store, info, lengths, scratch)

            in_parallel(fetch, manifest.shards, split, report)
            tokenizer = folder_below(directory, TOKENIZER_DIRECTORY)
            fetch_tokenizer(tokenizers, tokenizer, manifest.tokenizer)
            manifest.write(target)


def upload_corpus(
    directory: Path, url: str, report: Report, retry_policy: RetryPolicy | None = None
) -> list[str]:
    """Upload the corpus in `directory`, read back and compare every file; return the splits."""
    splits = splits_of(directory)
    if splits == [directory]:
        raise DataError(
            f"{directory} is one split; give the corpus, {directory.parent}, "
            "which includes the tokenizer"
        )
    with TemporaryDirectory(prefix="xl-pretrain-upload-", ignore_cleanup_errors=True) as name:
        upload = _Upload(directory, url.rstrip("/"), Path(name), retry_policy or RetryPolicy())
        for path in sorted((directory / TOKENIZER_DIRECTORY).glob("tokenizer.*")):
            upload.file(f"{TOKENIZER_DIRECTORY}/{path.name}")
        for split in splits:
            manifest = read_manifest(split)
            in_parallel(partial(upload.shard, split.name), manifest.shards, split.name, report)
            for name in (INDEX_NAME, MANIFEST_NAME):
                if (split / name).exists():
                    upload.file(f"{split.name}/{name}")
    return [split.name for split in splits]


def problems_at(url: str, report: Report, retry_policy: RetryPolicy | None = None) -> list[str]:
    """Read every shard of the corpus at `url` and return one line per problem."""
    problems: list[str] = []
    with TemporaryDirectory(prefix="xl-pretrain-verify-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        for split in SPLITS:
            store = store_at(f"{url.rstrip('/')}/{split}", retry_policy)
            try:
                manifest = fetch_manifest(store, scratch)
            except NotFetchedError as error:
                if split == SPLITS[0] or not error.is_absent:  # validation may be absent
                    raise
                continue

            def read(info: ShardInfo, store: Store = store) -> None:
                for fetch in (fetch_shard, fetch_lengths):
                    copy = path_below(scratch, info.path)
                    try:
                        fetch(store, info, copy, scratch)
                        copy.unlink()
                    except NotFetchedError as error:
                        problems.append(str(error))

            in_parallel(read, manifest.shards, split, report)
    return problems


class _Upload:
    """Uploads files of a directory. A file is uploaded once the store returns equal bytes."""

    def __init__(self, directory: Path, url: str, scratch: Path, policy: RetryPolicy) -> None:
        self._directory = directory
        self._scratch = scratch
        self._send = uploader_to(url, directory)
        self._store = store_at(url, policy)

    def shard(self, split: str, info: ShardInfo) -> None:
        """Upload a shard and its lengths; DataError if a local file is corrupted."""
        check_shard(self._directory / split / info.path, info)
        lengths_beside(self._directory / split, info)
        checks: tuple[Check, ...] = (
            partial(mismatch, info=info),
            partial(lengths_problem, info=info),
        )
        for (name, size), check in zip(files_of(info).items(), checks, strict=True):
            self._upload(f"{split}/{name}", size, check)

    def file(self, name: str) -> None:
        """Upload a file that no manifest describes."""
        content = (self._directory / name).read_bytes()

        def check(path: Path) -> str | None:
            return None if path.read_bytes() == content else "it differs from the local file"

        self._upload(name, len(content), check)

    def _upload(self, name: str, size: int, check: Check) -> None:
        policy = self._store.retry_policy
        copy = self._scratch / name.replace("/", "-")
        read_back = partial(fetch_once, self._store, name, copy, self._scratch, check, size)

        def attempt() -> None:
            with contextlib.suppress(StoreError):
                return read_back()  # the store has it already
            with_timeout(policy.seconds_for(size), lambda: self._send(name))
            return read_back()

        retry(policy, f"{self._store.url}/{name} could not be uploaded", attempt)
        copy.unlink()


def in_parallel(task: Callable[[T], None], items: Sequence[T], name: str, report: Report) -> None:
    """Run `task` for every item in some threads; raise the first error.

    Errors and Ctrl-C do not wait for active tasks, which a silent store may block for minutes. An
    executor would: it joins its threads. These are daemon threads.
    """
    waiting, ended = deque(items), queue.Queue[BaseException | None]()

    def work() -> None:
        with contextlib.suppress(IndexError):  # the queue is empty
            while True:
                item = waiting.popleft()
                try:
                    task(item)
                    ended.put(None)
                except BaseException as error:  # for the caller
                    ended.put(error)

    for _ in range(min(THREADS, len(items))):
        threading.Thread(target=work, name="copy", daemon=True).start()
    try:
        for number in range(1, len(items) + 1):
            if error := ended.get():
                raise error
            report(f"{name}: {number}/{len(items)}")
    finally:
        waiting.clear()


@contextlib.contextmanager
def exclusive_scratch(directory: Path) -> Iterator[Path]:
    """Yield a scratch directory in `directory`, locked against other copies into it.

    Inside, because a rename needs the same file system. It is removed at the end; one that a
    killed command left is removed at the start, once its lock is free.
    """
    directory.mkdir(parents=True, exist_ok=True)
    scratch = directory / SCRATCH
    with exclusive_lock(directory / LOCK, LOCK_SECONDS):
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
