"""Requests to web servers: a total deadline, credentials by reference, redirects on one host.

A server may redirect to another path of its own host and port, or from http to https: another host
could be a service that only this machine reaches, such as a cloud's metadata service.
"""

import base64
import contextlib
import http.client
import random
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http.client import HTTPMessage, HTTPResponse
from typing import IO, Any, cast
from urllib.parse import urlsplit

from foundation.credentials import redacted, user_and_password
from foundation.errors import DataError

_LENGTH = re.compile(r"[0-9]{1,18}")


class StoreError(Exception):
    """A file could not be transferred.

    `is_final` if another attempt would not help, `is_absent` if the store says that it has no such
    file; a denied request says nothing about the file.
    """

    def __init__(self, reason: str, is_final: bool = False, is_absent: bool = False) -> None:
        super().__init__(redacted(" ".join(reason.split())))
        self.is_final, self.is_absent = is_final or is_absent, is_absent


@dataclass(frozen=True)
class RetryPolicy:
    """How long and how often to try to transfer a file."""

    attempts: int = 5
    timeout: float = 20.0  # seconds without a byte
    pause: float = 1.0  # seconds before the second attempt; doubles before each further one
    bytes_per_second: float = 250_000.0  # slower attempts fail, even if bytes keep coming

    def seconds_for(self, size: int) -> float:
        """Return the most seconds that one attempt may take."""
        return 2 * self.timeout + size / self.bytes_per_second

    def pause_before(self, attempt: int) -> float:
        """Return the seconds to wait before attempt 1, 2, ..., random so that ranks spread out."""
        return self.pause * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)

    def longest(self, size: int) -> float:
        """Return the most seconds that all attempts together may take."""
        return self.attempts * self.seconds_for(size) + self.pause * 2**self.attempts


@contextlib.contextmanager
def open_url(
    url: str, retry_policy: RetryPolicy, method: str = "GET", size: int = 0
) -> Iterator[HTTPResponse]:
    """Yield the answer to a request; the caller reads at most `size` bytes.

    The connection is closed after the block. StoreError if the answer's head, or then its content,
    takes too long; DataError if the URL's variable is not set; otherwise urllib's errors.
    """
    try:
        plain, user, password = user_and_password(url)
    except KeyError as error:
        raise DataError(
            f"{url} needs the variable {error.args[0]} with PASSWORD@HOST, for this host; export it"
        ) from None
    request = urllib.request.Request(plain, method=method)
    if user:
        token = base64.b64encode(f"{user}:{password}".encode()).decode()
        # A redirected request does not have it: another scheme may lead to another server.
        request.add_unredirected_header("Authorization", f"Basic {token}")
    deadline = _Deadline(retry_policy.seconds_for(0))
    opener = urllib.request.build_opener(_Redirects, deadline.http, deadline.https)
    try:
        with opener.open(request, timeout=retry_policy.timeout) as answer:
            stated = stated_length(answer)
            deadline.restart(
                retry_policy.seconds_for(size if stated is None else min(stated, size))
            )
            yield cast("HTTPResponse", answer)
    except (OSError, ValueError, http.client.HTTPException):
        if not deadline.is_over:
            raise
    finally:
        deadline.stop()
    if deadline.is_over:
        raise StoreError("the server sends too slowly")


class _Deadline:
    """Ends the connections of a request when its time is over, whatever the server sends."""

    def __init__(self, seconds: float) -> None:
        self.is_over, self._sockets = False, list[socket.socket]()
        self.http, self.https = urllib.request.HTTPHandler(), urllib.request.HTTPSHandler()
        for handler in (self.http, self.https):
            handler.do_open = partial(self._opened, handler.do_open)  # type: ignore[method-assign]
        self.restart(seconds)

    def restart(self, seconds: float) -> None:
        """Move the deadline to `seconds` from now."""
        if timer := getattr(self, "_timer", None):
            timer.cancel()
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        """Stop the timer, and close our copies of the connections."""
        self._timer.cancel()
        for connection in self._sockets:
            connection.close()

    def _end(self) -> None:
        self.is_over = True
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _opened(
        self, do_open: Callable[..., Any], kind: Any, *arguments: Any, **options: Any
    ) -> Any:
        def connected(*to: Any, **how: Any) -> socket.socket:
            connection = socket.create_connection(*to, **how)
            self._sockets.append(connection.dup())  # TLS takes over the original's descriptor
            if self.is_over:
                self._end()
            return connection

        def made(host: str, **settings: Any) -> http.client.HTTPConnection:
            connection = kind(host, **settings)
            connection._create_connection = connected
            return connection

        return do_open(made, *arguments, **options)


def stated_length(answer: HTTPResponse) -> int | None:
    """Return the Content-Length of an answer; None unless it is a number."""
    stated = answer.headers.get("Content-Length", "")
    return int(stated) if _LENGTH.fullmatch(stated) else None


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if problem := redirect_problem(req.full_url, newurl):
            raise urllib.error.HTTPError(newurl, code, f"redirect to {problem}", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def redirect_problem(before: str, after: str) -> str | None:
    """Return why a request must not be redirected from `before` to `after`; None if it may be."""
    old, new = urlsplit(before), urlsplit(after)
    same_host = new.netloc.rpartition("@")[2].lower() == old.netloc.rpartition("@")[2].lower()
    if not same_host or new.scheme not in ("http", "https") or new.scheme < old.scheme:
        return (
            f"{redacted(after)}, expected {old.scheme} at {redacted(old.netloc)}; name that server"
        )
    return None
