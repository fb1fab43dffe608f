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
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from data_pipeline.corpora.fetch import (
    NotFetchedError,
    fetch_manifest,
    fetch_shard,
    fetch_tokenizer,
)
from data_pipeline.corpora.lengths import files_of, lengths_beside, lengths_file
from data_pipeline.corpora.manifest import (
    MANIFEST_NAME,
    SPLITS,
    TOKENIZER_DIRECTORY,
    ShardInfo,
    check_shard,
    mismatch,
    read_manifest,
    splits_of,
)
from data_pipeline.corpora.stores import RetryPolicy, Store, store_at
from data_pipeline.corpora.writable_store import WritableStore
from data_pipeline.shards.mds import INDEX_NAME
from foundation.errors import DataError
from foundation.files import content_of, folder_below, path_below
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
                for entry in (info, lengths_file(info)):
                    path = path_below(target, entry.path)
                    if not path.exists() or mismatch(path, entry):
                        fetch_shard(store, entry, path, scratch)

            in_parallel(fetch, manifest.shards, split, report)
            tokenizer = folder_below(directory, TOKENIZER_DIRECTORY)
            fetch_tokenizer(tokenizers, tokenizer, manifest.tokenizer)
            manifest.write(target)


def upload_corpus(
    directory: Path, url: str, report: Report, retry_policy: RetryPolicy | None = None
) -> list[str]:
    """Upload the corpus in `directory`, every file read back and compared; return the splits."""
    splits = splits_of(directory)
    if splits == [directory]:
        raise DataError(
            f"{directory} is one split; give the corpus, {directory.parent}, "
            "which includes the tokenizer"
        )
    with TemporaryDirectory(prefix="xl-pretrain-upload-", ignore_cleanup_errors=True) as name:
        store = WritableStore(url, Path(name), retry_policy)

        def upload(name: str) -> None:
            store.put(name, directory / name, content_of(directory / name))

        for path in sorted((directory / TOKENIZER_DIRECTORY).glob("tokenizer.*")):
            upload(f"{TOKENIZER_DIRECTORY}/{path.name}")
        for split in splits:
            manifest = read_manifest(split)

            def upload_shard(info: ShardInfo, split: Path = split) -> None:
                check_shard(split / info.path, info)
                lengths_beside(split, info)
                for name in files_of(info):
                    upload(f"{split.name}/{name}")

            in_parallel(upload_shard, manifest.shards, split.name, report)
            for name in (INDEX_NAME, MANIFEST_NAME):
                if (split / name).exists():
                    upload(f"{split.name}/{name}")
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
                for entry in (info, lengths_file(info)):
                    copy = path_below(scratch, entry.path)
                    try:
                        fetch_shard(store, entry, copy, scratch)
                        copy.unlink()
                    except NotFetchedError as error:
                        problems.append(str(error))

            in_parallel(read, manifest.shards, split, report)
    return problems


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
