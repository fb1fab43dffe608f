"""Secrets in URLs: settings name the variable that has one, and all output hides them.

    https://reader:env:STORE_PASSWORD@host/corpus    the variable STORE_PASSWORD has `PASSWORD@host`

The variable names the host, too. Otherwise another user's settings, once run, could send any
variable of the environment to that user's own host.

Errors and logs go through `redacted`, so that no other module has to hide secrets.
"""

import os
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

HIDDEN = "***"
_LONGEST_SHOWN = 200  # characters in a message
_REFERENCE = "env:"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# `https://`; pathlib leaves one of its slashes. A limit on the scheme's length keeps the search
# linear in the length of the text.
_START = r"[A-Za-z][A-Za-z0-9+.-]{1,30}:/+"
# What a URL has before `@`. A password may, wrongly, have any character; `:8080/` is a port.
_USER = re.compile(rf"({_START})([^\s/?#]*|[^\s/?#:@]*:(?!\d+/)[^\s@]*)@")
# Signatures and tokens: everything after `?` or `#`, up to what cannot be in a URL.
_SCHEME = re.compile(_START)
_MARK = re.compile(r"[?#]")
_QUERY = re.compile(r"[^\"'<>]*")
_WORD = re.compile(r"\S+")
# Secrets in URLs that have no scheme, JSON's escaped slashes, or a space in the password; and keys
# of well-known services, wherever they are.
_OTHERS = re.compile(
    r"(?<![:\w/])//(?P<bare>[^\s/?#:@\\]+:[^\s/@]+)@"
    r"|:(?:\\/){2}(?P<json>[^\s/?#:@\\]+:[^\s/@]+)@"
    r"|\b(?:https?|s?ftp|s3)://(?P<space>[^\s/?#:@\\]+:(?!\d+[ /])[^\s/@]+ [^\s/@]+)@"
    r"|\b(?P<key>hf_\w{20,99}|sk-[\w-]{20,199}|gh[opsu]_\w{20,}|AKIA[0-9A-Z]{16})\b"
)
# Images of containers: docker://USER@REGISTRY#IMAGE:TAG@sha256:DIGEST has no secret.
_IMAGES = ("docker", "dockerd", "podman")


def referenced_variable(value: str) -> str | None:
    """Return `NAME` of env:NAME; None for any other value."""
    return value.removeprefix(_REFERENCE) if value.startswith(_REFERENCE) else None


def is_variable_name(name: str) -> bool:
    """Whether an environment variable can have this name."""
    return _NAME.fullmatch(name) is not None


def redacted(text: str) -> str:
    """Return the text, with `***` for users, passwords, queries and fragments of the URLs in it.

    References (`env:NAME`) stay. The text may be anything; the time is linear in its length.
    """
    text = _OTHERS.sub(_hidden, text)
    if ":/" not in text:
        return text
    return _WORD.sub(lambda word: _without_queries(_without_users(word[0])), text)


def _hidden(match: re.Match[str]) -> str:
    secret = match[match.lastgroup or 0]
    return match[0] if _is_reference(secret) else match[0].replace(secret, HIDDEN)


def _without_users(word: str) -> str:
    kept, position = [], 0
    for match in _users_in(word):
        if not _is_reference(match[2]):
            kept += [word[position : match.start(2)], HIDDEN]
            position = match.end(2)
    return "".join(kept) + word[position:]


def _users_in(word: str) -> list[re.Match[str]]:
    """Return matches of _USER in the word, except in the name of a container's image."""
    matches = _USER.finditer(word, 0, word.rfind("@") + 1)
    return [match for match in matches if not _is_of_image(match)]


def _is_of_image(match: re.Match[str]) -> bool:
    digest = match.string.startswith("sha256:", match.end())
    return _scheme_of(match[1]) in _IMAGES and (digest or ":" not in match[2])


def _scheme_of(start: str) -> str:
    return start.partition(":")[0].lower()


def _without_queries(word: str) -> str:
    kept, position = [], 0
    while (start := _SCHEME.search(word, position)) and (mark := _MARK.search(word, start.end())):
        kept.append(word[position : mark.end()])
        position = mark.end()
        query = _QUERY.match(word, position)
        if query and query[0] and not (mark[0] == "#" and _scheme_of(start[0]) in _IMAGES):
            kept.append(HIDDEN)
            position = query.end()
    return "".join(kept) + word[position:]


def _is_reference(user: str) -> bool:
    name, _, password = user.partition(":")
    wanted = referenced_variable(password)
    return bool(name) and wanted is not None and is_variable_name(wanted)


def problem_of(text: str) -> str | None:
    """Return why a URL in the text may not be in settings or command lines; None if all may."""
    words = [word for word in text.split() if ":/" in word]
    users = [match for word in words for match in _users_in(word)]
    if not all(user[1].startswith("http") and _is_reference(user[2]) for user in users):
        return (
            f"found a user or password in {_shown(text)}, which files and logs would show; "
            "name a variable that has PASSWORD@HOST: https://USER:env:NAME@HOST/... "
            "(object stores: the variables of their SDK)"
        )
    if any(_without_queries(word) != word for word in words):
        return (
            f"found a query in {_shown(text)}, expected the URL of a directory: a signature or "
            "token in it is valid for one file, and files and logs would show it; "
            "use https://USER:env:NAME@HOST/..."
        )
    return None


def _shown(text: str) -> str:
    text = redacted(text)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def user_and_password(url: str, variables: Mapping[str, str] = os.environ) -> tuple[str, str, str]:
    """Return the URL without a user, the user, and the password from the variable it names.

    KeyError, with the variable's name, if the variable has no password for the URL's host.
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
