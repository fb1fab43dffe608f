"""Stores of remote corpora: web servers, and object stores by mosaicml-streaming's downloaders.

A store only transfers bytes. `fetch` checks that the right ones arrived.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

from data_pipeline.corpora.web_requests import RetryPolicy, StoreError, open_url, stated_length
from foundation.credentials import problem_of
from foundation.errors import NO_SPACE, DataError
from foundation.settings import OBJECT_STORES

BLOCK_BYTES = 1 << 18
LONGEST_VERSION = 200  # characters of an ETag that are kept
WEB = ("http", "https")
TRANSIENT_STATUS = (408, 425, 429)  # 4xx answers after which another attempt may succeed
# Codes and exceptions of SDKs after which another attempt would fail in the same way.
FINAL_REASONS = (
    *("401", "403", "404", "AccessDenied", "NoSuchKey", "NoSuchBucket", "InvalidBucketName"),
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"),
    *("NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "ImportError"),
)
# Codes and exceptions of SDKs for a file that does not exist.
ABSENT_REASONS = ("404", "NoSuchKey", "NotFound", "ResourceNotFoundError", "EntryNotFoundError")


def store_at(url: str, retry_policy: RetryPolicy | None = None) -> Store:
    """Return the store for the URL's scheme; DataError if it is unknown."""
    _refuse_secrets(url)
    scheme = url.partition("://")[0]
    if scheme not in WEB + OBJECT_STORES:
        raise DataError(_unknown_scheme(url, WEB + OBJECT_STORES))
    store = WebStore if scheme in WEB else CloudStore
    return store(url.rstrip("/"), retry_policy or RetryPolicy())


class WebStore:
    """A web server, read by GET requests."""

    def __init__(self, url: str, retry_policy: RetryPolicy) -> None:
        self.url, self.retry_policy = url, retry_policy

    def download(self, name: str, path: Path, size: int) -> None:
        """Write the file to `path`; stop reading soon after `size` bytes."""
        url = f"{self.url}/{quote(name)}"
        try:
            with open_url(url, self.retry_policy, "GET", size) as answer, open(path, "wb") as file:
                expected, arrived = stated_length(answer), 0
                while arrived <= size and (block := answer.read1(BLOCK_BYTES)):
                    arrived += file.write(block)
            if expected is not None and arrived < min(expected, size):
                raise StoreError(f"{arrived} of {expected} bytes arrived")
        except urllib.error.HTTPError as error:
            error.close()
            is_final = 300 <= error.code < 500 and error.code not in TRANSIENT_STATUS
            reason = f"the server answered {error.code} {error.reason}"
            raise StoreError(reason, is_final, error.code in (404, 410)) from None
        except (ValueError, OverflowError, http.client.InvalidURL) as error:
            raise StoreError(f"not a valid URL ({error})", is_final=True) from None
        except http.client.HTTPException as error:
            raise StoreError(f"the server's answer cannot be read ({error!r})") from None
        except OSError as error:
            if error.errno in NO_SPACE:
                raise
            raise StoreError(f"the connection failed ({error})") from None

    def version(self, name: str) -> str:
        """Return the ETag of the file; "" if the server does not send one."""
        try:
            url = f"{self.url}/{quote(name)}"
            with open_url(url, self.retry_policy, "HEAD") as answer:
                return answer.headers.get("ETag", "")[:LONGEST_VERSION]
        except (OSError, ValueError, OverflowError, http.client.HTTPException, StoreError):
            return ""


class CloudStore:
    """Any store that mosaicml-streaming has a downloader for.

    Credentials and endpoint come from the environment, as its documentation describes.
    """

    def __init__(self, url: str, retry_policy: RetryPolicy) -> None:
        # Imported here because it takes seconds, which must not count as part of an attempt.
        from streaming.base.storage import CloudDownloader

        self.url, self.retry_policy = url, retry_policy
        self._new_downloader = partial(CloudDownloader.get, url)
        self._idle: list[Any] = []  # downloaders; each serves one thread at a time

    def download(self, name: str, path: Path, size: int) -> None:
        """Write the file; the SDK may retry internally within the time of an attempt."""
        with sdk_errors():
            downloader = self._idle.pop() if self._idle else self._new_downloader()
            try:
                downloader.download(f"{self.url}/{name}", str(path), self.retry_policy.timeout)
            finally:
                self._idle.append(downloader)

    def version(self, name: str) -> str:
        """Return the ETag of the file in S3; "" in other stores: streaming cannot ask for it."""
        if not self.url.startswith("s3://"):
            return ""
        bucket, _, prefix = self.url.removeprefix("s3://").partition("/")
        try:
            from boto3.session import Session

            client = Session().client("s3", endpoint_url=os.environ.get("S3_ENDPOINT_URL"))
            answer = client.head_object(Bucket=bucket, Key=f"{prefix}/{name}".lstrip("/"))
            return str(answer.get("ETag", ""))[:LONGEST_VERSION]
        except Exception:  # SDK errors have no common base class; `download` will report them
            return ""


Store = WebStore | CloudStore


@contextlib.contextmanager
def sdk_errors() -> Iterator[None]:
    """Raise the block's errors as StoreError, except the OSError of a full disk."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:  # SDK errors have no common base class
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            raise
        raise _sdk_error(error) from error


def uploader_to(url: str, directory: Path) -> Callable[[str], None]:
    """Return a function that copies a file of that name from `directory` to the URL.

    It raises StoreError if the copy fails. DataError if nothing can be written to such a URL.
    """
    uploader = _sdk_uploader(url, directory)

    def upload(name: str) -> None:
        try:
            uploader.upload_file(name)
        except Exception as error:
            raise _sdk_error(error) from error

    return upload


def listed_objects(url: str, names: bool = True) -> tuple[Any, list[str]]:
    """Return the SDK's client for `url`, and with `names` the names of the objects under it.

    DataError if they cannot be listed.
    """
    prefix = url.partition("://")[2].partition("/")[2].strip("/")
    with TemporaryDirectory() as empty:
        uploader = _sdk_uploader(url, Path(empty))
        try:
            keys = uploader.list_objects() if names else []
        except Exception as error:
            raise DataError(
                f"{url} cannot be listed ({_sdk_error(error)}); check your permissions"
            ) from error
    names_below = (key.removeprefix(prefix).lstrip("/") for key in keys if not key.endswith("/"))
    return uploader, sorted(names_below)


def _unknown_scheme(url: str, schemes: tuple[str, ...]) -> str:
    expected = ", ".join(f"{scheme}://" for scheme in schemes)
    return f"found the location {url}, expected a URL that starts with one of {expected}"


def _refuse_secrets(url: str) -> None:
    if problem := problem_of(url):
        raise DataError(problem)


def _sdk_uploader(url: str, directory: Path) -> Any:
    _refuse_secrets(url)
    if url.partition("://")[0] not in OBJECT_STORES:
        raise DataError(_unknown_scheme(url, OBJECT_STORES))
    try:
        from streaming.base.storage import CloudUploader

        # Silence the warning that the directory is not empty.
        logging.getLogger("streaming").setLevel(logging.ERROR)
        return CloudUploader.get((str(directory), url), keep_local=True, exist_ok=True)
    except Exception as error:
        raise DataError(
            f"{url} cannot be opened ({_sdk_error(error)}); check bucket, endpoint and permissions"
        ) from error


def _sdk_error(error: Exception) -> StoreError:
    """Return the StoreError for an SDK's error: on one line, and whether it is final."""
    kind = type(error).__name__
    answer = getattr(error, "response", None)
    if isinstance(answer, dict) and (problem := answer.get("Error")):
        code = str(problem.get("Code"))
        reason = f"the store answered {code}: {problem.get('Message')}"
        return StoreError(reason, code in FINAL_REASONS, code in ABSENT_REASONS)
    # Some of streaming's downloaders raise a FileNotFoundError of their own, without a number.
    is_absent = kind in ABSENT_REASONS or (kind == "FileNotFoundError" and len(error.args) == 1)
    return StoreError(f"{kind}: {' '.join(str(error).split())}", kind in FINAL_REASONS, is_absent)


def with_timeout(seconds: float, task: Callable[[], None]) -> None:
    """Run `task` in a thread; StoreError if it takes longer. The thread is then left running.

    No SDK offers a limit on the whole transfer, and a blocked thread cannot be killed.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            done.set_result(task())
        except BaseException as error:  # raised again by done.result()
            done.set_exception(error)

    thread = threading.Thread(target=run, name="download", daemon=True)
    thread.start()
    thread.join(seconds)
    if not done.done():
        raise StoreError(f"it took longer than {seconds:.0f} seconds")
    done.result()
