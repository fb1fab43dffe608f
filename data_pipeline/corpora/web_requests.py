"""Requests of corpora: with credentials by reference, and redirects that stay on the web.

A server may redirect to another (stores do, to signed URLs), but neither to files or other
protocols, nor from https to http, nor, from a server of the open internet, to addresses that only
this machine or its network can reach: their services, and a cloud's metadata service, which hands
out credentials.
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

# Mapped and translated (NAT64) addresses: the last four bytes are one of version 4.
_LAST_BYTES = tuple(map(ipaddress.IPv6Network, ("::/96", "64:ff9b::/96", "64:ff9b:1::/48")))
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
        return f"{redacted(after)}, an address that only this machine or its network can reach"
    return None


def _is_internal(host: str) -> bool:
    """Whether the name, however it is written, stands for an address that is not global."""
    with contextlib.suppress(OSError, UnicodeError):
        found = {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None)}
        return not all(_is_global(ipaddress.ip_address(address)) for address in found)
    return False  # unknown here: the request itself will say so, or a proxy knows it


def _is_global(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and (inner := _inner(address)):
        address = inner
    return address.is_global and not address.is_multicast


def _inner(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the address of version 4 that the one of version 6 stands for, if it does."""
    if any(address in network for network in _LAST_BYTES):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour
