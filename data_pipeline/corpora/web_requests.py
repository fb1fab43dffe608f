"""GET requests of corpora: with credentials by reference, and redirects that stay on the web.

A server may redirect to another (stores do, to signed URLs), but neither to files or other
protocols, nor from https to http, nor to addresses that only this machine can reach: its own
services, and a cloud's metadata service, which hands out credentials.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import re
import socket
import urllib.error
import urllib.request
from http.client import HTTPMessage, HTTPResponse
from typing import IO, cast
from urllib.parse import urlsplit

from data_pipeline.credentials import redacted, user_and_password
from data_pipeline.errors import DataError

_LENGTH = re.compile(r"[0-9]{1,18}")


def open_url(url: str, timeout: float) -> HTTPResponse:
    """Return the answer to a GET; what urllib raises, and DataError for a variable not set."""
    try:
        plain, user, password = user_and_password(url)
    except KeyError as error:
        raise DataError(
            f"{url} needs the variable {error.args[0]} with PASSWORD@HOST, for this host; export it"
        ) from None
    request = urllib.request.Request(plain)
    if user:
        token = base64.b64encode(f"{user}:{password}".encode()).decode()
        # Not redirected: another server must not get the password.
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
    if new.scheme not in ("http", "https") or new.scheme < old.scheme:
        return f"{redacted(after)}, expected {old.scheme}"
    if _is_internal(new.hostname or "") and not _is_internal(old.hostname or ""):
        return f"{redacted(after)}, an address that only this machine can reach"
    return None


def _is_internal(host: str) -> bool:
    """Whether the name, however it is written, stands for this machine or its own link."""
    with contextlib.suppress(OSError, UnicodeError):
        found = {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None)}
        return any(_is_own(ipaddress.ip_address(address)) for address in found)
    return False  # unknown here: the request itself will say so, or a proxy knows it


def _is_own(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_link_local or address.is_unspecified
