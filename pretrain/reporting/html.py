"""Self-contained HTML pages: no network, light and dark, readable on a phone. Torch-free."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

# Quiet, one column. The variables named like the fields of `charts.Palette` color the charts, too.
STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f5f2; --surface: #ffffff; --ink: #22252a; --faint: #6d727b; --grid: #e4e2dc;
  --first: #b9c7dd; --second: #2456a6; --alarm: #c2410c; --good: #1a7f4b;
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
  --mono: ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #16181c; --surface: #1e2126; --ink: #e6e4df; --faint: #9aa0aa; --grid: #33373e;
    --first: #47587a; --second: #8ab6ff; --alarm: #fb923c; --good: #6fd19f;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.6 var(--sans);
  -webkit-text-size-adjust: 100%; }
main { max-width: 800px; margin: 0 auto; padding: 40px 20px 64px; }
h1 { font-size: clamp(28px, 5.5vw, 40px); line-height: 1.15; letter-spacing: -.02em;
  margin: 6px 0 12px; overflow-wrap: anywhere; }
h2 { font-size: 20px; letter-spacing: -.01em; margin: 0 0 4px; }
p { margin: 0 0 12px; max-width: 68ch; }
.kicker { color: var(--faint); font-size: 13px; letter-spacing: .06em;
  text-transform: uppercase; margin: 0; }
.lead { font-size: 17px; }
.faint, .lead { color: var(--faint); }
.alarm { color: var(--alarm); }
section, .card { background: var(--surface); border: 1px solid var(--grid); border-radius: 12px; }
section { padding: 24px; margin-top: 20px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 14px;
  margin-top: 28px; }
.card { padding: 18px 20px; }
.card b { display: block; font-size: 28px; line-height: 1.2; letter-spacing: -.02em;
  white-space: nowrap; }
.card.bad b { color: var(--alarm); }
.card span { color: var(--faint); font-size: 14px; line-height: 1.45; display: block;
  margin-top: 6px; }
svg { display: block; width: 100%; max-width: 620px; height: auto; margin: 14px auto 6px; }
svg text { font-family: var(--sans); }
.scroll { overflow-x: auto; margin: 12px 0 4px; }
table { border-collapse: collapse; width: 100%; font-size: 14px;
  font-variant-numeric: tabular-nums; }
th, td { text-align: right; white-space: nowrap; padding: 6px 0 6px 18px; }
th { font-weight: 600; color: var(--faint); font-size: 12.5px; }
td { border-top: 1px solid var(--grid); }
th:first-child, td:first-child { padding-left: 0; }
.named th:first-child, .named td:first-child, .words th, .words td { text-align: left; }
.named th:first-child, .named td:first-child { position: sticky; left: 0;
  background: var(--surface); }
.words td { white-space: normal; vertical-align: top; }
.words td:first-child { color: var(--faint); white-space: nowrap; }
.words tr:first-child td { border-top: 0; }
pre { font: 13px/1.55 var(--mono); background: var(--page); border-radius: 8px; padding: 16px;
  margin: 12px 0 0; overflow-x: auto; }
footer { color: var(--faint); font-size: 13px; margin-top: 28px; }
@media (max-width: 520px) {
  main { padding: 24px 14px 40px; }
  section { padding: 18px 16px; }
  svg { width: calc(100% + 20px); margin-left: -10px; }
  .scroll { margin: 12px 0 4px; padding: 0; }
  th, td { padding-left: 12px; }
  .named td:first-child, .words td:first-child, .ranges td { white-space: normal; }
  .ranges th, .ranges td { white-space: normal; padding-left: 6px; font-size: 11px; }
  .ranges th:first-child, .ranges td:first-child { padding-left: 0; }
}
@media print { body { background: #fff; } section, .card { break-inside: avoid; } }
"""


@dataclass(frozen=True)
class Card:
    """A number in large type and what it says. `mood` is bad or empty."""

    number: str
    words: str
    mood: str = ""


def page(
    title: str, kicker: str, lead: str, cards: Sequence[Card], sections: Sequence[str], footer: str
) -> str:
    """The whole document; `sections` are HTML already, everything else is text."""
    rendered = "".join(
        f'<div class="card {card.mood}"><b>{text(card.number)}</b>'
        f"<span>{text(card.words)}</span></div>"
        for card in cards
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{STYLE}</style></head><body><main>"
        f'<p class="kicker">{text(kicker)}</p><h1>{text(title)}</h1>'
        f'<p class="lead">{text(lead)}</p><div class="cards">{rendered}</div>'
        f"{''.join(sections)}<footer>{text(footer)}</footer></main></body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A titled box; `parts` are HTML."""
    return f"<section><h2>{text(title)}</h2>{''.join(parts)}</section>\n"


def paragraph(words: str, style: str = "faint") -> str:
    return f'<p class="{style}">{text(words)}</p>'


def folded(summary: str, *parts: str) -> str:
    """What a click on the summary shows; `parts` are HTML."""
    return f"<details><summary>{text(summary)}</summary>{''.join(parts)}</details>"


def text(value: str) -> str:
    """Text as HTML shows it; bytes of a file's name that are no text are escaped."""
    return html.escape(value.encode(errors="backslashreplace").decode())


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], style: str = "") -> str:
    """A table of texts that scrolls sideways where it is too wide."""
    head = "".join(f"<th>{text(cell)}</th>" for cell in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll"><table class="{style}">'
        f"<thead>{f'<tr>{head}</tr>' if heads else ''}</thead><tbody>{body}</tbody></table></div>"
    )
