"""Corpora are named by paths; a URL may stand in the place of one, in settings and on command lines."""

from __future__ import annotations

import re
from pathlib import Path

_URL = re.compile(r"([a-z][a-z0-9-]+):/+(.*)")


def url_of(path: Path | str) -> str | None:
    """The URL that `path` is, or None for a directory. pathlib folds the slashes of `s3://`: here they return."""
    match = _URL.fullmatch(str(path))
    return f"{match[1]}://{match[2]}" if match else None


def shown(path: Path | str) -> str:
    """`path` as the user wrote it."""
    return url_of(path) or str(path)


def absolute(path: Path) -> Path:
    """The same place, named so that it is found from every directory."""
    return path if url_of(path) else path.resolve()
