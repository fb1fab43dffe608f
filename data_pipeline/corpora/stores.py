"""Where remote corpora lie: web servers, and object stores through mosaicml-streaming's downloaders.

A store only moves bytes. Whether the right ones arrived is for `fetch` to find out.
"""

from __future__ import annotations

import http.client
import logging
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol
from urllib.parse import quote

from data_pipeline.errors import NO_ROOM, DataError

BLOCK_BYTES = 1 << 18
WEB = ("http", "https")
OBJECT_STORES = ("s3", "gs", "azure", "oci", "hf")
PASSING_ANSWERS = (408, 425, 429)  # of those a web server gives because the request was wrong
LASTING_CODES = (
    *("401", "403", "404", "AccessDenied", "NoSuchKey", "NoSuchBucket", "InvalidBucketName"),
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"),
)
LASTING_ERRORS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "ParamValidationError",
    "ImportError",
)


class StoreError(Exception):
    """A file did not arrive, and why; `is_final` when asking again would not help."""

    def __init__(self, reason: str, is_final: bool = False) -> None:
        super().__init__(reason)
        self.is_final = is_final


@dataclass(frozen=True)
class RetryPolicy:
    """How long a store may take before a file is given up."""

    attempts: int = 5
    timeout: float = 20.0  # seconds without a byte
    pause: float = 1.0  # seconds before the second attempt, twice as long before each further one
    bytes_per_second: float = (
        250_000.0  # a store that stays below this is given up, however steadily it sends
    )

    def seconds_for(self, size: int) -> float:
        """The most that one attempt may take."""
        return 2 * self.timeout + size / self.bytes_per_second

    def pause_before(self, attempt: int) -> float:
        """Seconds to wait before attempt 1, 2, ...; never the same for all ranks, so that they do not come at once."""
        return self.pause * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)

    def longest(self, size: int) -> float:
        """The most that all attempts together take."""
        return self.attempts * self.seconds_for(size) + self.pause * 2**self.attempts


class Store(Protocol):
    """Files below a URL."""

    url: str
    patience: RetryPolicy

    def download(self, name: str, path: Path, size: int) -> None:
        """Write the file `name` of about `size` bytes to `path`; StoreError says why it cannot be had."""
        ...


def store_at(url: str, patience: RetryPolicy | None = None) -> Store:
    """The store that the URL's scheme asks for; DataError for an unknown one."""
    scheme = url.partition("://")[0]
    if scheme not in WEB + OBJECT_STORES:
        expected = ", ".join(f"{known}://" for known in WEB + OBJECT_STORES)
        raise DataError(
            f"found the location {url}, expected a URL that begins with one of {expected}"
        )
    store = WebStore if scheme in WEB else ObjectStore
    return store(url.rstrip("/"), patience or RetryPolicy())


class WebStore:
    """A web server, by GET."""

    def __init__(self, url: str, patience: RetryPolicy) -> None:
        self.url, self.patience = url, patience

    def download(self, name: str, path: Path, size: int) -> None:
        """Stops reading soon after `size` bytes."""
        deadline = time.monotonic() + self.patience.seconds_for(size)
        try:
            with (
                urllib.request.urlopen(
                    f"{self.url}/{quote(name)}", timeout=self.patience.timeout
                ) as answer,
                open(path, "wb") as file,
            ):
                while size >= 0 and (block := answer.read1(BLOCK_BYTES)):
                    if time.monotonic() > deadline:
                        raise StoreError("the server sends too slowly")
                    size -= file.write(block)
        except urllib.error.HTTPError as error:
            error.close()
            is_final = 400 <= error.code < 500 and error.code not in PASSING_ANSWERS
            raise StoreError(f"the server answered {error.code} {error.reason}", is_final) from None
        except (ValueError, OverflowError, http.client.InvalidURL) as error:
            raise StoreError(f"this is no URL ({error})", is_final=True) from None
        except http.client.HTTPException as error:
            raise StoreError(f"the server's answer cannot be read ({error!r})") from None
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
            raise StoreError(f"the connection failed ({error})") from None


class ObjectStore:
    """What mosaicml-streaming has a downloader for; credentials and endpoint come from the environment, as it says."""

    def __init__(self, url: str, patience: RetryPolicy) -> None:
        from streaming.base.storage import (
            CloudDownloader,  # takes seconds, which no attempt should be charged with
        )

        self.url, self.patience = url, patience
        self._new_downloader = partial(CloudDownloader.get, url)
        self._idle: list[Any] = []  # downloaders; each serves one thread at a time

    def download(self, name: str, path: Path, size: int) -> None:
        """An SDK below may try again on its own, within the time an attempt has."""
        try:
            downloader = self._idle.pop() if self._idle else self._new_downloader()
            try:
                downloader.download(f"{self.url}/{name}", str(path), self.patience.timeout)
            finally:
                self._idle.append(downloader)
        except Exception as error:  # of many SDKs, which have no base in common
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise
            raise StoreError(*_sdk_reason(error)) from error


def uploader_to(url: str, directory: Path) -> Callable[[str], None]:
    """A function that copies the file of a name below `directory` to that name below `url`, or raises StoreError.

    DataError when nothing can be written to such a URL.
    """
    uploader = _sdk_uploader(url, directory)

    def upload(name: str) -> None:
        try:
            uploader.upload_file(name)
        except Exception as error:
            raise StoreError(*_sdk_reason(error)) from error

    return upload


def list_objects(url: str) -> list[str]:
    """The objects below `url`, named from there on; DataError when they cannot be listed."""
    prefix = url.partition("://")[2].partition("/")[2].strip("/")
    with TemporaryDirectory() as nothing:
        uploader = _sdk_uploader(url, Path(nothing))
        try:
            keys = uploader.list_objects()
        except Exception as error:  # of many SDKs, which have no base in common
            raise DataError(
                f"{url} cannot be listed ({_sdk_reason(error)[0]}); check your rights"
            ) from error
    return sorted(key.removeprefix(prefix).lstrip("/") for key in keys if not key.endswith("/"))


def _sdk_uploader(url: str, directory: Path) -> Any:
    if url.partition("://")[0] not in OBJECT_STORES:
        expected = ", ".join(f"{known}://" for known in OBJECT_STORES)
        raise DataError(f"found the location {url}, expected one in an object store: {expected}")
    try:
        from streaming.base.storage import CloudUploader

        logging.getLogger("streaming").setLevel(
            logging.ERROR
        )  # it warns that the directory has files in it
        return CloudUploader.get((str(directory), url), keep_local=True, exist_ok=True)
    except Exception as error:  # of many SDKs, which have no base in common
        reason = _sdk_reason(error)[0]
        raise DataError(
            f"{url} cannot be opened ({reason}); check the bucket, the endpoint and your rights"
        ) from error


def _sdk_reason(error: Exception) -> tuple[str, bool]:
    """What an SDK's error says, on one line, and whether it is final."""
    kind = type(error).__name__
    answer = getattr(error, "response", None)
    if isinstance(answer, dict) and (found := answer.get("Error")):
        code = str(found.get("Code"))
        return f"the store answered {code}: {found.get('Message')}", code in LASTING_CODES
    return f"{kind}: {' '.join(str(error).split())}", kind in LASTING_ERRORS


def with_timeout(seconds: float, task: Callable[[], None]) -> None:
    """Run `task` in a thread of its own; StoreError when it has not ended in time, and the thread is left to itself."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            done.set_result(task())
        except BaseException as error:  # for the caller
            done.set_exception(error)

    thread = threading.Thread(target=run, name="download", daemon=True)
    thread.start()
    thread.join(seconds)
    if not done.done():
        raise StoreError(f"it took longer than {seconds:.0f} seconds")
    done.result()
