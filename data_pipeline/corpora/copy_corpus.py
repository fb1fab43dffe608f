"""Copy a whole corpus from or to a store, and verify one in a store.

An interrupted copy is resumed by the same call: files that already match at the target are not
transferred again. The manifest is copied last, so a split that has one is complete.

Copy objects of any kind from a store: no manifest says what they are, so the store has to.

S3 lists each object's size and ETag. The ETag is the MD5 of its contents or, after an upload in
parts, of its parts' MD5s; for objects whose ETag is neither (encrypted by KMS) the SDK checks the
checksum that the store keeps. Where there is none of these, and in stores other than S3, an object
is read twice and both readings are compared.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import queue
import re
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from data_pipeline.corpora.fetch import (
    Check,
    NotFetchedError,
    fetch_file,
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
    BLOCK_BYTES,
    ObjectStore,
    RetryPolicy,
    Store,
    StoreError,
    listed_objects,
    sdk_errors,
    store_at,
    uploader_to,
    with_timeout,
)
from data_pipeline.shards.mds import INDEX_NAME
from foundation.errors import NO_SPACE, DataError
from foundation.files import folder_below, path_below, sha256_of
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
                if info.lengths and (not lengths.exists() or lengths_problem(lengths, info)):
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
                for fetch in (fetch_shard, fetch_lengths)[: len(files_of(info))]:
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
        for (name, size), check in zip(files_of(info).items(), checks, strict=False):
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


UNKNOWN_BYTES = 1 << 40  # objects get a long time; the SDKs detect silence
MOST_PROBLEMS = 20  # more objects that cannot be copied end the command
MOST_OBJECTS = 10_000_000  # of a listing, which is kept in memory
MOST_EMPTY_PAGES = 100  # in a row
ETAG = re.compile(r"([0-9a-f]{32})(?:-(\d+))?")


@dataclass(frozen=True)
class StoredObject:
    """An object as its store lists it."""

    name: str  # below the URL
    size: int | None = None
    etag: str = ""


def fetch_objects(
    url: str, directory: Path, report: Report, retry_policy: RetryPolicy | None = None
) -> tuple[int, list[str]]:
    """Copy every object under `url` into `directory`, unless it is there already.

    Returns their number, and a line for each that could not be copied; the others are.
    """
    retry_policy = retry_policy or RetryPolicy()
    store, objects = _open(url, retry_policy)
    if not objects:
        raise DataError(f"there are no objects under {url}; check the URL")
    problems: list[str] = []
    lock = threading.Lock()
    with exclusive_scratch(directory) as scratch:

        def fetch(item: StoredObject) -> None:
            try:
                path = _target(directory, item)
                if not _is_there(path, item, store):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    fetch_file(store, item.name, path, scratch, lambda arrived: None, UNKNOWN_BYTES)
            except (DataError, OSError) as error:
                if isinstance(error, OSError) and error.errno in NO_SPACE:
                    raise
                with lock:
                    problems.append(_problem(url, item, error))
                if len(problems) > MOST_PROBLEMS:
                    raise DataError(
                        f"more than {MOST_PROBLEMS} objects could not be copied, the last one: "
                        f"{problems[-1]}"
                    ) from None

        in_parallel(fetch, objects, "objects", report)
    return len(objects), sorted(problems)


def _open(url: str, retry_policy: RetryPolicy) -> tuple[Store, list[StoredObject]]:
    if url.startswith("s3://"):
        bucket = S3Objects(url.rstrip("/"), retry_policy)
        return bucket, list(bucket.objects.values())
    _, names = listed_objects(url)
    return TwiceRead(store_at(url, retry_policy)), [StoredObject(name) for name in names]


def _target(directory: Path, item: StoredObject) -> Path:
    """Return where the object belongs; DataError if its name is no path below `directory`."""
    if item.name.split("/")[0] in (LOCK, SCRATCH):
        raise DataError("its name is that of a file of this command; rename it")
    return path_below(directory, item.name)


def _is_there(path: Path, item: StoredObject, store: Store) -> bool:
    """Whether an earlier call has copied the object as it is now."""
    if not path.is_file():
        return False
    return not isinstance(store, S3Objects) or store.mismatch(path, item) is None


def _problem(url: str, item: StoredObject, error: Exception) -> str:
    text = str(error)
    if isinstance(error, NotFetchedError):
        return text
    if isinstance(error, OSError):
        # A key can be the folder of another key, or longer than a file's name.
        is_both = error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY)
        reason = "another object's name makes it both a file and a folder"
        text = f"{reason if is_both else error.strerror}; rename it"
    return f"{url} holds {item.name!r}, which was not copied: {text}"


class S3Objects:
    """The objects below an S3 URL, each read in one request and compared with what is listed."""

    def __init__(self, url: str, retry_policy: RetryPolicy) -> None:
        self.url, self.retry_policy = url, retry_policy
        self._bucket, _, prefix = url.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        uploader, _ = listed_objects(url, names=False)
        self._client: Any = uploader.s3
        try:
            with sdk_errors():
                self.objects = {item.name: item for item in self._list()}
        except StoreError as error:
            raise DataError(f"{url} cannot be listed ({error}); check your permissions") from None

    def _list(self) -> Iterator[StoredObject]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix
        )
        num_listed = num_empty = 0
        for page in pages:
            entries = page.get("Contents", ())
            num_listed, num_empty = num_listed + len(entries), 0 if entries else num_empty + 1
            if num_listed > MOST_OBJECTS or num_empty > MOST_EMPTY_PAGES:
                raise StoreError(
                    f"the list does not end: {num_listed:,} objects so far, expected at most "
                    f"{MOST_OBJECTS:,}; copy one folder after the other"
                )
            for entry in entries:
                is_folder = entry["Key"].endswith("/") and not entry["Size"]
                if not is_folder:
                    name = entry["Key"].removeprefix(self._prefix)
                    yield StoredObject(name, entry["Size"], entry["ETag"].strip('"'))

    def download(self, name: str, path: Path, size: int) -> None:
        """Write the object; StoreError unless all of its bytes arrived as the store has them."""
        from botocore.httpchecksum import StreamingChecksumBody

        item = self.objects[name]
        with sdk_errors():
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
            with contextlib.closing(answer["Body"]) as body, open(path, "wb") as file:
                while file.tell() <= (item.size or 0) and (block := body.read(BLOCK_BYTES)):
                    file.write(block)
            if problem := self.mismatch(path, item):
                raise StoreError(problem)
            is_checked = isinstance(body, StreamingChecksumBody)  # by the SDK, at its end
            if not is_checked and self._etag_of(path, item) is None:
                again = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
                _compare(path, again["Body"])

    def mismatch(self, path: Path, item: StoredObject) -> str | None:
        """Return how a file differs from the object, or None if it does not."""
        if (found := path.stat().st_size) != item.size:
            return f"{found} bytes arrived, the store lists {item.size}"
        etag = self._etag_of(path, item)
        if etag is not None and etag != item.etag:
            return f"what arrived has the MD5 {etag}, the store's ETag is {item.etag}"
        return None

    def _etag_of(self, path: Path, item: StoredObject) -> str | None:
        """Return the ETag that these contents would have, or None if that cannot be known."""
        if not (match := ETAG.fullmatch(item.etag)):
            return None
        with sdk_errors():
            head = self._client.head_object(
                Bucket=self._bucket,
                Key=self._prefix + item.name,
                **({"PartNumber": 1} if match[2] else {}),
            )
        if head.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in head:
            return None
        if not match[2]:
            return _md5_of_parts(path, path.stat().st_size)[0].hex()
        part_size, count = head["ContentLength"], int(match[2])
        if part_size <= 0 or -(-path.stat().st_size // part_size) != count:
            return None  # its parts have different sizes
        parts = _md5_of_parts(path, part_size)
        return f"{hashlib.md5(b''.join(parts)).hexdigest()}-{count}"


class TwiceRead:
    """A store that lists no checksums: a file is read twice, and both readings have to agree."""

    def __init__(self, store: Store) -> None:
        assert isinstance(store, ObjectStore)
        self.url, self.retry_policy, self._store = store.url, store.retry_policy, store

    def download(self, name: str, path: Path, size: int) -> None:
        """Write the file; StoreError if its two readings differ."""
        again = path.with_name(f"{path.name}.again")
        self._store.download(name, path, size)
        self._store.download(name, again, size)
        is_equal = sha256_of(path) == sha256_of(again)
        again.unlink()
        if not is_equal:
            raise StoreError("two readings of it differ")


def _md5_of_parts(path: Path, part_size: int) -> list[bytes]:
    """Return the MD5 of each part of a file; an empty file has one."""
    digests = []
    with open(path, "rb") as file:
        while not digests or file.tell() < path.stat().st_size:
            digest, remaining = hashlib.md5(), part_size
            while remaining and (block := file.read(min(remaining, BLOCK_BYTES))):
                digest.update(block)
                remaining -= len(block)
            digests.append(digest.digest())
    return digests


def _compare(path: Path, body: Any) -> None:
    with contextlib.closing(body), open(path, "rb") as file:
        while block := body.read(BLOCK_BYTES):
            if file.read(len(block)) != block:
                raise StoreError("two readings of it differ")
        if file.read(1):
            raise StoreError("two readings of it differ")
