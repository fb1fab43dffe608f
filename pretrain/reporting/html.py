"""Self-contained HTML pages: no network, light and dark, readable on a phone. Torch-free.

`page.html` is the only template. Its style sheet has a variable for each color of `charts.COLORS`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from foundation.files import make_directory, write_text


@dataclass(frozen=True)
class Card:
    """A number in large type and what it says. `mood` is bad or empty."""

    number: str
    words: str
    mood: str = ""


def page(
    title: str, kicker: str, lead: str, cards: Sequence[Card], sections: Sequence[str], footer: str
) -> str:
    """Return the whole document; `sections` are HTML already, everything else is text."""
    document = _macros().page(title, kicker, lead, cards, sections, footer)
    # A file's name may have bytes that are not text.
    return str(document).encode(errors="backslashreplace").decode()


def write_page(path: Path, document: str) -> None:
    """Write a page and the directories above it."""
    make_directory(path.parent)
    write_text(path, document)


def section(title: str, *parts: str) -> str:
    """Return a titled box; `parts` are HTML."""
    return str(_macros().section(title, parts))


def paragraph(words: str, style: str = "faint") -> str:
    return str(_macros().paragraph(words, style))


def preformatted(words: str) -> str:
    return str(_macros().preformatted(words))


def folded(summary: str, part: str) -> str:
    """Return `part`, which is HTML, hidden until a reader clicks on the summary."""
    return str(_macros().folded(summary, part))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], style: str = "") -> str:
    """Return a table of texts that scrolls sideways where it is too wide."""
    return str(_macros().table(heads, rows, style))


@cache
def _macros() -> Any:
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    return environment.get_template("page.html").module
