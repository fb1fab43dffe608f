"""Pages on disk. One that was made from other runs is not replaced silently."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path

from foundation.files import read_regular, write_text

_log = logging.getLogger(__name__)


def write_page(path: Path, page: str, sources: Iterable[Path]) -> None:
    """Write a page about `sources`; warn if there was one about others."""
    mark = _mark(sources)
    if path.exists() and mark not in _text_of(path):
        _log.warning("%s: replaced a page that was not made from these runs", path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, f"{page}{mark}\n")


def _mark(sources: Iterable[Path]) -> str:
    """A comment that says what a page is about: the same for the same paths in any order."""
    names = sorted(str(source.resolve()) for source in sources)
    return f"<!-- sources {hashlib.sha256(repr(names).encode()).hexdigest()[:16]} -->"


def _text_of(path: Path) -> str:
    try:
        return read_regular(path).decode(errors="replace")
    except ValueError:  # not a regular file; writing it will say so
        return ""
