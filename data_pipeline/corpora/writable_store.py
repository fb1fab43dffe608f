"""Writing to a store: each file that is uploaded is read back and compared.

From S3 it is read without a copy on disk. Other stores are written and read through
mosaicml-streaming, which cannot delete.
"""

import contextlib
import hashlib
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from data_pipeline.corpora.fetch import NotFetchedError, fetch_file, fetch_once, retry
from data_pipeline.corpora.stores import (
    BLOCK_BYTES,
    listed_objects,
    sdk_errors,
    store_at,
    uploader_to,
    with_timeout,
)
from data_pipeline.corpora.web_requests import RetryPolicy, StoreError
from foundation.errors import DataError
from foundation.files import Content, read_regular
from foundation.paths import path_below

S3 = "s3://"
MOST_DELETED = 1000  # objects of one request, a limit of S3


class WritableStore:
    """The objects under a URL. DataError, from the constructor, if it cannot be opened."""

    def __init__(self, url: str, scratch: Path, retry_policy: RetryPolicy | None = None) -> None:
        policy = retry_policy or RetryPolicy()
        self.url, self._policy, self._scratch = url.rstrip("/"), policy, scratch
        self._store = store_at(self.url, policy)
        self._bucket, _, self._prefix = self.url.removeprefix(S3).partition("/")
        self._s3: Any = None
        if self.url.startswith(S3):
            self._s3 = listed_objects(self.url, names=False)[0].s3
        else:
            self._send = uploader_to(self.url, scratch)

    def put(self, name: str, path: Path, content: Content) -> None:
        """Upload the file unless the store has it; DataError unless the store returns `content`."""

        def attempt() -> None:
            with contextlib.suppress(StoreError):
                return self._compare(name, content)  # the store has it already
            seconds = self._policy.seconds_for(content.bytes)
            with_timeout(seconds, lambda: self._upload(name, path, content))
            return self._compare(name, content)

        retry(self._policy, f"{self.url}/{name} could not be uploaded", attempt)

    def read(self, name: str, most: int) -> bytes | None:
        """Return the object, of at most `most` bytes; None if the store says that it is absent."""
        path = self._scratch / "read"
        try:
            fetch_file(
                self._store, name, path, self._scratch, lambda file: size_problem(file, most), most
            )
        except NotFetchedError as error:
            if error.is_absent:
                return None
            raise
        return read_regular(path, most)

    def names(self) -> list[str]:
        """Return the names of all objects under the URL; DataError if they cannot be listed."""
        return listed_objects(self.url)[1]

    @property
    def can_delete(self) -> bool:
        """Whether `delete` works for this kind of store."""
        return self._s3 is not None

    def delete(self, names: Sequence[str]) -> None:
        """Delete these objects; DataError if one is still there."""
        for first in range(0, len(names), MOST_DELETED):
            keys = [{"Key": self._key(name)} for name in names[first : first + MOST_DELETED]]
            try:
                with sdk_errors():
                    request = {"Objects": keys, "Quiet": True}
                    answer = self._s3.delete_objects(Bucket=self._bucket, Delete=request)
            except StoreError as error:
                raise DataError(f"{self.url}: cannot delete ({error})") from None
            for problem in answer.get("Errors", [])[:1]:
                raise DataError(f"{self.url}: cannot delete {problem['Key']} ({problem['Code']})")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}".lstrip("/")

    def _upload(self, name: str, path: Path, content: Content) -> None:
        if self._s3 is None:
            staged = path_below(self._scratch, name)
            staged.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                staged.unlink()
            os.symlink(path.absolute(), staged)
            return self._send(name)
        with sdk_errors():
            return self._s3.upload_file(str(path), self._bucket, self._key(name))

    def _compare(self, name: str, content: Content) -> None:
        """Raise StoreError unless the object has this content."""
        if self._s3 is not None:
            seconds = self._policy.seconds_for(content.bytes)
            return with_timeout(seconds, lambda: self._read_back(name, content))
        copy = self._scratch / f"{name.replace('/', '-')}.copy"  # other threads have other names
        fetch_once(self._store, name, copy, self._scratch, content.mismatch, content.bytes)
        return copy.unlink()

    def _read_back(self, name: str, content: Content) -> None:
        digest, arrived = hashlib.sha256(), 0
        with sdk_errors():
            answer = self._s3.get_object(Bucket=self._bucket, Key=self._key(name))
            with contextlib.closing(answer["Body"]) as body:
                if (size := answer["ContentLength"]) != content.bytes:
                    raise StoreError(f"the store has {size} bytes, expected {content.bytes}")
                for block in iter(partial(body.read, BLOCK_BYTES), b""):
                    digest.update(block)
                    arrived += len(block)
                    if arrived > content.bytes:
                        break
        if problem := content.hash_mismatch(digest.hexdigest()):
            raise StoreError(problem)


def size_problem(path: Path, most: int) -> str | None:
    """Return why a file is refused that may have at most `most` bytes; None if it is not."""
    size = path.stat().st_size
    return f"it has {size:,} bytes, expected at most {most:,}" if size > most else None
