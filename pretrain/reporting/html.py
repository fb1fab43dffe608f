"""Self-contained HTML reports: one file, no network, light and dark, readable on a phone. Torch-free.

Charts are matplotlib's, inlined as SVG. Their colours are names that the page's style sheet gives a value, so that they
follow the reader's light or dark setting.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pretrain.reporting.style import STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES = 5.6
# Stand-ins in the drawing -> names in the style sheet.
INK, FAINT, GRID, FIRST, SECOND, ALARM, SURFACE = (
    "#010101",
    "#020202",
    "#030303",
    "#040404",
    "#050505",
    "#060606",
    "#070707",
)
NAMES = {
    INK: "--ink",
    FAINT: "--faint",
    GRID: "--grid",
    FIRST: "--first",
    SECOND: "--second",
    ALARM: "--alarm",
    SURFACE: "--surface",
}


@dataclass(frozen=True)
class Card:
    """A number in large type and what it says. `mood` is good, bad or empty."""

    number: str
    words: str
    mood: str = ""


def page(
    title: str, kicker: str, lead: str, cards: Sequence[Card], sections: Sequence[str], footer: str
) -> str:
    """The whole document; `sections` are HTML already, everything else is text."""
    rendered = "".join(
        f'<div class="card {card.mood}"><b>{text(card.number)}</b><span>{text(card.words)}</span></div>'
        for card in cards
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{STYLE}</style></head><body><main>"
        f'<p class="kicker">{text(kicker)}</p><h1>{text(title)}</h1><p class="lead">{text(lead)}</p>'
        f'<div class="cards">{rendered}</div>{"".join(sections)}<footer>{text(footer)}</footer></main></body></html>\n'
    )


def section(title: str, *parts: str) -> str:
    """A titled box; `parts` are HTML."""
    return f"<section><h2>{text(title)}</h2>{''.join(parts)}</section>\n"


def paragraph(words: str, style: str = "faint") -> str:
    return f'<p class="{style}">{text(words)}</p>'


def text(value: str) -> str:
    """Text as HTML shows it."""
    return html.escape(value)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], style: str = "") -> str:
    """A table of texts that scrolls sideways where it is too wide."""
    head = "".join(f"<th>{text(cell)}</th>" for cell in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return wrapped_table(f"<tr>{head}</tr>" if heads else "", body, style)


def wrapped_table(head: str, body: str, style: str = "") -> str:
    """A table of rows that are HTML already."""
    return f'<div class="scroll"><table class="{style}"><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def new_chart(height_inches: float, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """A figure with quiet axes in the page's colours, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x_label, color=FAINT, fontsize=8.5)
    axes.set_ylabel(y_label, color=FAINT, fontsize=8.5)
    axes.tick_params(colors=FAINT, labelsize=8.5, length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)
    return figure, axes


def legend(axes: Axes, **options: Any) -> None:
    """A legend without a frame."""
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, handlelength=1.6, **options)


def chart_html(figure: Figure, alternative: str) -> str:
    """The drawing as inline SVG; `alternative` says in words what it shows."""
    import matplotlib

    buffer = io.StringIO()
    # Text stays text, and the same drawing gives the same bytes.
    options: Any = {"svg.fonttype": "none", "svg.hashsalt": alternative}
    with matplotlib.rc_context(options):
        figure.savefig(
            buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    svg = re.sub(r"^.*?<svg", "<svg", buffer.getvalue(), flags=re.DOTALL)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(alternative)}"', 1)
    for stand_in, name in NAMES.items():
        svg = svg.replace(stand_in, f"var({name})")
    return svg
