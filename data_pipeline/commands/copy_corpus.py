"""`data-pipeline fetch`, `upload` and `verify URL`: whole corpora between this disk and a store.

Interrupted, the same call goes on: what is already right at the other end is not transferred again. The manifest comes
last, so that a place that has one is whole.
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

from data_pipeline.commands.verify import splits_of
from data_pipeline.corpora.fetch import (
    NotFetchedError,
    fetch_file,
    fetch_manifest,
    fetch_once,
    fetch_shard,
    fetch_tokenizer,
    retry,
)
from data_pipeline.corpora.manifest import (
    MANIFEST_NAME,
    SPLITS,
    TOKENIZER_DIRECTORY,
    ShardInfo,
    check_shard,
    mismatch,
    read_manifest,
)
from data_pipeline.corpora.stores import (
    RetryPolicy,
    Store,
    StoreError,
    list_objects,
    store_at,
    uploader_to,
    with_timeout,
)
from data_pipeline.errors import DataError
from data_pipeline.file_lock import exclusive_lock
from data_pipeline.shards.mds import INDEX_NAME

THREADS = 8
LOCK, SCRATCH = ".fetch.lock", ".fetch"
UNKNOWN_BYTES = (
    1 << 40
)  # an object of unknown size may take long; that nothing comes, the SDKs find out
LOCK_SECONDS = 10.0
T = TypeVar("T")


def fetch_corpus(
    url: str,
    directory: Path,
    splits: Sequence[str],
    report: Callable[[str], None],
    patience: RetryPolicy | None = None,
) -> None:
    """Copy the named splits of the corpus at `url`, and its tokenizer, into `directory`."""
    stores = {
        name: store_at(f"{url.rstrip('/')}/{name}", patience)
        for name in (*splits, TOKENIZER_DIRECTORY)
    }
    with _only_copy_into(directory) as scratch:
        for split in splits:
            manifest = fetch_manifest(stores[split], scratch)
            (directory / split).mkdir(exist_ok=True)
            fetch = partial(_have_shard, stores[split], directory / split, scratch)
            _in_parallel(fetch, manifest.shards, split, report)
            fetch_tokenizer(
                stores[TOKENIZER_DIRECTORY], directory / TOKENIZER_DIRECTORY, manifest.tokenizer
            )
            manifest.write(directory / split)


def fetch_objects(
    url: str, directory: Path, report: Callable[[str], None], patience: RetryPolicy | None = None
) -> int:
    """Copy every object below `url` to that name in `directory`, unless it is there; how many there are comes back."""
    names, store = list_objects(url), store_at(url, patience)
    if not names:
        raise DataError(f"there is nothing below {url}; check the URL")
    if strangers := [name for name in names if ".." in Path(name).parts]:
        raise DataError(
            f"{url} holds an object named {strangers[0]!r}, which would lie outside of {directory}; rename it"
        )
    with _only_copy_into(directory) as scratch:

        def have(name: str) -> None:
            path = directory / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                fetch_file(store, name, path, scratch, lambda arrived: None, UNKNOWN_BYTES)

        _in_parallel(have, names, "objects", report)
    return len(names)


def _have_shard(store: Store, directory: Path, scratch: Path, info: ShardInfo) -> None:
    path = directory / info.path
    if not path.exists() or mismatch(path, info):
        fetch_shard(store, info, path, scratch)


def upload_corpus(
    directory: Path, url: str, report: Callable[[str], None], patience: RetryPolicy | None = None
) -> list[str]:
    """Make `url` hold the corpus in `directory`, every file read back and compared; the splits' names come back."""
    splits = splits_of(directory)
    if splits == [directory]:
        raise DataError(
            f"{directory} is one split; give the corpus, {directory.parent}, whose tokenizer belongs to it"
        )
    with TemporaryDirectory(prefix="xl-pretrain-upload-", ignore_cleanup_errors=True) as name:
        upload = _Upload(directory, url.rstrip("/"), Path(name), patience or RetryPolicy())
        for path in sorted((directory / TOKENIZER_DIRECTORY).glob("tokenizer.*")):
            upload.file(f"{TOKENIZER_DIRECTORY}/{path.name}")
        for split in splits:
            manifest = read_manifest(split)
            _in_parallel(partial(upload.shard, split.name), manifest.shards, split.name, report)
            for name in (INDEX_NAME, MANIFEST_NAME):
                if (split / name).exists():
                    upload.file(f"{split.name}/{name}")
    return [split.name for split in splits]


def problems_at(
    url: str, report: Callable[[str], None], patience: RetryPolicy | None = None
) -> list[str]:
    """Read every shard of the corpus at `url`; what is wrong comes back, a line each."""
    problems: list[str] = []
    with TemporaryDirectory(prefix="xl-pretrain-verify-", ignore_cleanup_errors=True) as name:
        for split in SPLITS:
            store = store_at(f"{url.rstrip('/')}/{split}", patience)
            try:
                manifest = fetch_manifest(store, Path(name))
            except NotFetchedError as error:
                if split == SPLITS[0] or not error.is_final:  # a corpus may lack a validation split
                    raise
                continue

            def read(info: ShardInfo, store: Store = store) -> None:
                copy = Path(name) / info.path
                try:
                    fetch_shard(store, info, copy, Path(name))
                    copy.unlink()
                except NotFetchedError as error:
                    problems.append(str(error))

            _in_parallel(read, manifest.shards, split, report)
    return problems


class _Upload:
    """Files of a directory on their way to a store. A file counts as there when it was read back and is the same."""

    def __init__(self, directory: Path, url: str, scratch: Path, patience: RetryPolicy) -> None:
        self._directory = directory
        self._scratch = scratch
        self._send = uploader_to(url, directory)
        self._store = store_at(url, patience)

    def shard(self, split: str, info: ShardInfo) -> None:
        """A shard that is damaged here is not sent."""
        check_shard(self._directory / split / info.path, info)
        self._have(f"{split}/{info.path}", info.size, lambda path: mismatch(path, info))

    def file(self, name: str) -> None:
        content = (self._directory / name).read_bytes()
        self._have(
            name,
            len(content),
            lambda path: None if path.read_bytes() == content else "it differs from ours",
        )

    def _have(self, name: str, size: int, problem_with: Callable[[Path], str | None]) -> None:
        copy = self._scratch / name.replace("/", "-")
        read_back = partial(fetch_once, self._store, name, copy, self._scratch, problem_with, size)

        def attempt() -> None:
            with contextlib.suppress(StoreError):
                return read_back()  # it is there already
            with_timeout(self._store.patience.seconds_for(size), lambda: self._send(name))
            return read_back()

        retry(self._store.patience, f"{self._store.url}/{name} could not be uploaded", attempt)
        copy.unlink()


def _in_parallel(
    task: Callable[[T], None], items: Sequence[T], name: str, report: Callable[[str], None]
) -> None:
    """`task` for every item, some at a time; the first error ends it.

    Neither an error nor Ctrl-C waits for the tasks under way, which a silent store may hold up for minutes.
    """
    waiting, ended = deque(items), queue.Queue[BaseException | None]()

    def work() -> None:
        with contextlib.suppress(IndexError):  # nothing waits any more
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
def _only_copy_into(directory: Path) -> Iterator[Path]:
    """A place for what is not whole yet, in `directory`, into which no other command copies meanwhile."""
    directory.mkdir(parents=True, exist_ok=True)
    scratch = directory / SCRATCH
    with exclusive_lock(directory / LOCK, LOCK_SECONDS):
        shutil.rmtree(scratch, ignore_errors=True)  # of a killed command
        scratch.mkdir()
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
