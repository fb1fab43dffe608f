"""A built split over HTTP(S): every file is checked before it takes its name, the manifest comes last.

Interrupted, the same call goes on: files that are already right are not read from the server again. Processes that
fetch into one directory wait for each other by file locks, so no file is transferred twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

from data_pipeline.corpus import TOKENIZER_DIRECTORY, check_shard
from data_pipeline.errors import DataError
from data_pipeline.files import replacing
from data_pipeline.manifest import MANIFEST_NAME, ShardInfo, read_manifest
from data_pipeline.tokenizer import DESCRIPTION_NAME, MODEL_NAME, Tokenizer

BLOCK_BYTES = 1 << 18
SMALL_BYTES = 1 << 30  # no manifest and no tokenizer is larger
SLOWEST_BYTES_PER_SECOND = 100_000  # a server that stays below this is given up, however steadily it sends


def fetch_corpus(url: str, directory: Path, splits: Sequence[str], report: Callable[[str], None]) -> None:
    """Copy the named splits of the corpus at `url`, and its tokenizer, into `directory`."""
    for split in splits:
        Fetcher(f"{url.rstrip('/')}/{split}").fetch_split(directory / split, report)
    tokenizer = directory / TOKENIZER_DIRECTORY
    Fetcher(f"{url.rstrip('/')}/{TOKENIZER_DIRECTORY}").fetch_tokenizer(tokenizer)
    for split in splits:
        found, expected = Tokenizer.load(tokenizer).fingerprint, read_manifest(directory / split).tokenizer
        if found != expected:
            raise DataError(
                f"the tokenizer at {url} has fingerprint {found[:16]}, its split {split} expects {expected[:16]}; "
                "put the tokenizer there that the corpus was built with"
            )


class _TransferError(Exception):
    """What arrived is not the file."""


TRANSIENT = (
    _TransferError,
    DataError,
    urllib.error.URLError,
    http.client.HTTPException,
    ConnectionError,
    TimeoutError,
)


class Fetcher:
    """Reads files below one URL; what fails is tried again `attempts` times in all, with growing pauses."""

    def __init__(self, url: str, attempts: int = 4, timeout: float = 30.0, pause: float = 1.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise DataError(f"found the location {url}, expected a URL that begins with http:// or https://")
        self.url = url.rstrip("/")
        self._attempts = attempts
        self._timeout = timeout  # seconds without a byte
        self._pause = pause

    def fetch_split(self, directory: Path, report: Callable[[str], None] = lambda line: None) -> None:
        """Make `directory` a copy of the split at the URL; DataError names the file that could not be had, and why."""
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=directory, prefix=".manifest.") as scratch:
            self._retry(MANIFEST_NAME, lambda: self._fetch_manifest(Path(scratch)))
            manifest = read_manifest(Path(scratch))
        for number, info in enumerate(manifest.shards):
            self.fetch_shard(info, directory)
            report(f"{directory.name}: {number + 1}/{len(manifest.shards)} shards")
        with _alone(directory / f".{MANIFEST_NAME}.lock"):
            manifest.write(directory)

    def fetch_shard(self, info: ShardInfo, directory: Path) -> None:
        """Have the shard in `directory`, whole and checked; it is transferred only if it is not there already."""
        if Path(info.path).name != info.path:
            raise DataError(f"{self.url}/{MANIFEST_NAME} names the shard {info.path!r}, expected a plain file name")
        with _alone(directory / f".{info.path}.lock"):
            with contextlib.suppress(DataError):
                check_shard(directory / info.path, info)
                return
            self._retry(info.path, lambda: self._transfer_shard(info, directory / info.path))

    def fetch_tokenizer(self, directory: Path) -> None:
        """Have the tokenizer's files in `directory`; whether they fit the corpus is for the caller to compare."""
        directory.mkdir(parents=True, exist_ok=True)
        with _alone(directory / ".lock"):
            self._retry(DESCRIPTION_NAME, lambda: self._transfer_small(DESCRIPTION_NAME, directory))
            if json.loads((directory / DESCRIPTION_NAME).read_bytes())["kind"] != "bytes":
                self._retry(MODEL_NAME, lambda: self._transfer_small(MODEL_NAME, directory))

    def _transfer_small(self, name: str, directory: Path) -> None:
        with replacing(directory / name) as file:
            file.write(b"".join(self._blocks(name, SMALL_BYTES)))

    def _transfer_shard(self, info: ShardInfo, path: Path) -> None:
        digest, size = hashlib.sha256(), 0
        with replacing(path) as file:
            for block in self._blocks(info.path, info.size):
                file.write(block)
                digest.update(block)
                size += len(block)
            if size != info.size:
                raise _TransferError(f"{size} bytes came, the manifest says {info.size}")
            if digest.hexdigest() != info.sha256:
                raise _TransferError("its SHA-256 is not the manifest's")

    def _fetch_manifest(self, scratch: Path) -> None:
        (scratch / MANIFEST_NAME).write_bytes(b"".join(self._blocks(MANIFEST_NAME, SMALL_BYTES)))
        read_manifest(scratch)

    def _blocks(self, name: str, size: int) -> Iterator[bytes]:
        """The file's content, at most one block more than `size` bytes of it."""
        deadline = time.monotonic() + self._timeout + size / SLOWEST_BYTES_PER_SECOND
        with urllib.request.urlopen(f"{self.url}/{quote(name)}", timeout=self._timeout) as answer:
            while size >= 0 and (block := answer.read1(BLOCK_BYTES)):
                if time.monotonic() > deadline:
                    raise _TransferError("the server sends too slowly")
                size -= len(block)
                yield block

    def _retry(self, name: str, attempt: Callable[[], None]) -> None:
        cause: Exception | None = None
        for number in range(self._attempts):
            try:
                return attempt()
            except TRANSIENT as error:
                cause = error
            if number + 1 < self._attempts:
                time.sleep(self._pause * 2**number)
        raise DataError(
            f"{self.url}/{name} could not be fetched in {self._attempts} attempts, the last failed because: {cause}; "
            "check the server, then run the same command again: finished files are kept"
        )


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    with open(path, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
