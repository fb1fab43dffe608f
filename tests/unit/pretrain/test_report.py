from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pretrain.reporting import charts
from pretrain.reporting.charts import COLORS, FIRST, Panel, canvas, chart_html, panel_html
from pretrain.reporting.html import Card, page, paragraph, section, table

VOID = {"meta", "br", "use", "path", "rect", "image", "hr", "img", "link", "input"}


class _Checker(HTMLParser):
    """Collects what the page refers to and complains about tags that do not close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.links += [
            value for name, value in attrs if name in ("src", "href", "xlink:href") and value
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def checked(document: str) -> _Checker:
    checker = _Checker()
    checker.feed(document)
    assert checker.open == []
    return checker


def chart() -> str:
    figure, axes = canvas(2.0, "step", "loss")
    axes.plot([1, 2, 3], [3.0, 2.0, 1.5], color=FIRST)
    return chart_html(figure, "a falling <loss>")


def test_a_page_is_well_formed_and_refers_to_nothing_outside_itself():
    document = page(
        "Title", "kicker", "lead", [Card("1", "one", "good")], [section("Chart", chart())], "foot"
    )
    checker = checked(document)
    assert all(link.startswith("#") for link in checker.links)
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", document)
    assert not re.search(
        r"https?:|//|@import|url\((?!#)", re.sub(r"<!doctype[^>]*>", "", without_namespaces)
    )


def test_text_from_a_model_or_a_corpus_cannot_become_markup():
    hostile = "<script>alert(1)</script>&amp;"
    assert "\\udce9 caf\u00e9" in page("\udce9 caf\u00e9", "", "", [], [], "")
    parts = [section(hostile, paragraph(hostile), table((hostile,), [(hostile,)]))]
    document = page(hostile, hostile, hostile, [Card(hostile, hostile)], parts, hostile)
    assert "<script" not in document
    assert checked(document).text.count(hostile) == 11  # nothing was lost either


def test_a_chart_scales_follows_the_pages_colors_and_keeps_its_words_as_text():
    svg = chart()
    opening = re.match(r"<svg[^>]*>", svg)
    assert opening
    assert "viewBox" in opening[0]
    assert not re.search(r'\b(width|height)="', opening[0])
    assert "var(--first)" in svg
    assert not any(color in svg for color in COLORS.values())
    assert ">loss<" in svg
    assert 'aria-label="a falling &lt;loss&gt;"' in svg


def test_a_panel_is_also_a_figure_for_a_paper_with_its_numbers(tmp_path: Path) -> None:
    panel = Panel("By layer", "tokens", "loss", lambda axes: axes.plot([0, 2e5], [2000, 3000]))
    svg = panel_html(panel, 2.0, tmp_path, "small: Transformer-XL, AdamW")
    ticks = re.findall(r">([\d,.]+ ?k?)</text>", svg)
    assert {"100 k", "200 k", "2,000", "3,000"} <= {*ticks}
    files = {path.suffix: path for path in tmp_path.iterdir()}
    assert {*files} == {".png", ".svg", ".pdf", ".csv"}
    assert {path.stem for path in files.values()} == {"by-layer"}
    assert "small: Transformer-XL, AdamW" in files[".svg"].read_text()
    assert files[".csv"].read_text().splitlines()[1].endswith(",0,2000")


def test_a_legend_is_outside_of_the_curves_however_many_there_are(monkeypatch, tmp_path: Path):
    def draw(axes: Axes) -> None:
        for number in range(12):
            axes.plot([1, 2], [number, number], label=f"a run of a rather long name {number}")

    drawn: list[Figure] = []
    monkeypatch.setattr(charts, "chart_html", lambda figure, words: drawn.append(figure) or "")
    panel_html(Panel("Speed", "step", "tokens per second", draw), 2.0, tmp_path, "speed")
    (figure,) = drawn
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert not box.shrunk(0.99, 0.99).overlaps(figure.axes[0].bbox)
    assert box.x1 <= figure.bbox.x1
    assert figure.axes[0].bbox.height > 100
