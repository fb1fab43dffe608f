"""Requests of corpora: with credentials by reference, and redirects that stay at their host.

A server may redirect to another path of its own host and port, or from http to https: another host
could be a service that only this machine reaches, such as a cloud's metadata service.
"""

from __future__ import annotations

import base64
import re
import urllib.error
import urllib.request
from http.client import HTTPMessage, HTTPResponse
from typing import IO, cast
from urllib.parse import urlsplit

from data_pipeline.credentials import redacted, user_and_password
from data_pipeline.errors import DataError

_LENGTH = re.compile(r"[0-9]{1,18}")


def open_url(url: str, timeout: float, method: str = "GET") -> HTTPResponse:
    """Return the answer to a request; what urllib raises, and DataError for a variable not set."""
    try:
        plain, user, password = user_and_password(url)
    except KeyError as error:
        raise DataError(
            f"{url} needs the variable {error.args[0]} with PASSWORD@HOST, for this host; export it"
        ) from None
    request = urllib.request.Request(plain, method=method)
    if user:
        token = base64.b64encode(f"{user}:{password}".encode()).decode()
        # Not redirected: not to another scheme, which may be another server's.
        request.add_unredirected_header("Authorization", f"Basic {token}")
    opener = urllib.request.build_opener(_Redirects)
    return cast("HTTPResponse", opener.open(request, timeout=timeout))


def stated_length(answer: HTTPResponse) -> int | None:
    """Return the Content-Length of an answer; None if there is none that is a number."""
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
    """Return why a request may not be redirected so; None if it may be."""
    old, new = urlsplit(before), urlsplit(after)
    same_host = new.netloc.rpartition("@")[2].lower() == old.netloc.rpartition("@")[2].lower()
    if not same_host or new.scheme not in ("http", "https") or new.scheme < old.scheme:
        return (
            f"{redacted(after)}, expected {old.scheme} at {redacted(old.netloc)}; name that server"
        )
    return None
