"""Secrets: named by settings as `env:NAME`, never written into them, and hidden wherever text shows
a URL that has them.

    https://reader:env:STORE_PASSWORD@host/corpus    the variable STORE_PASSWORD has `PASSWORD@host`

The variable names the host, too: settings of others, such as those of their runs, could otherwise
send any secret of the environment to a host of theirs.

Errors and logs go through `redacted`, so that no module has to think of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

HIDDEN = "***"
_REFERENCE = "env:"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_START = r"[A-Za-z][A-Za-z0-9+.-]+:/+"  # pathlib makes one slash of two
# What a URL has before `@`. A password may, wrongly, have any character, but 8080/ is a port.
_USER = re.compile(rf"({_START})([^\s/?#]*|[^\s/?#:@]*:(?!\d+/)[^\s@]*)@")
# Signatures and tokens: everything after `?`, up to what cannot be in a URL.
_QUERY = re.compile(rf"({_START}[^\s?#]*\?)[^\s\"'<>]+")


def referenced_variable(value: str) -> str | None:
    """`NAME` of env:NAME; None for any other value."""
    return value.removeprefix(_REFERENCE) if value.startswith(_REFERENCE) else None


def is_variable_name(name: str) -> bool:
    """Whether an environment variable can have this name."""
    return _NAME.fullmatch(name) is not None


def redacted(text: str) -> str:
    """The text, with `***` for users, passwords and queries of the URLs in it.

    References stay: they are no secret.
    """
    if ":/" not in text:
        return text
    return _QUERY.sub(rf"\1{HIDDEN}", _USER.sub(_without_user, text))


def _without_user(match: re.Match[str]) -> str:
    kept = match[2] if _is_reference(match[2]) else HIDDEN
    return f"{match[1]}{kept}@"


def _is_reference(user: str) -> bool:
    name, _, password = user.partition(":")
    wanted = referenced_variable(password)
    return bool(name) and wanted is not None and is_variable_name(wanted)


def problem_of(url: str) -> str | None:
    """Return why the URL may not be in settings or on a command line; None if it may be."""
    if (user := _USER.match(url)) and not (url.startswith("http") and _is_reference(user[2])):
        return (
            f"found a user or password in {redacted(url)}, which files and logs would show; "
            "name a variable that has PASSWORD@HOST: https://USER:env:NAME@HOST/... "
            "(object stores: the variables of their SDK)"
        )
    if url.startswith("http") and _QUERY.match(url):
        return (
            f"found a query in {redacted(url)}, expected the URL of a directory: a signature or "
            "token in it is valid for one file, and files and logs would show it; "
            "use https://USER:env:NAME@HOST/..."
        )
    return None


def user_and_password(url: str, variables: Mapping[str, str] = os.environ) -> tuple[str, str, str]:
    """Return the URL without a user, the user, and the password from the variable it names.

    KeyError, with the variable's name, unless it has a password for the URL's host.
    """
    match = _USER.match(url)
    if not match:
        return url, "", ""
    user, _, password = match[2].partition(":")
    wanted = referenced_variable(password) or ""
    plain = url.replace(f"{match[2]}@", "", 1)
    secret, _, host = variables[wanted].rpartition("@")
    if not secret or host != urlsplit(plain).netloc:
        raise KeyError(wanted)
    return plain, user, secret
