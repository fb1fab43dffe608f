from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure

from pretrain.reporting import charts
from pretrain.reporting.charts import COLORS, FIRST, Panel, canvas, chart_html, save_panels
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
        self.links += [
            value for name, value in attrs if name in ("src", "href", "xlink:href") and value
        ]

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


def test_the_same_numbers_give_the_same_drawing():
    assert chart() == chart()


@pytest.mark.parametrize("name", ["a-run-with-a-very-long-name-" * 8, "long words " * 20])
def test_a_long_title_is_broken_into_lines_that_fit_the_figure(tmp_path, monkeypatch, name):
    saved: list[Figure] = []
    monkeypatch.setattr(charts, "save_png", lambda path, figure: saved.append(figure))
    panel = Panel("Loss", "step", "loss", lambda axes: axes.plot([1, 2], [2, 1]))
    save_panels(tmp_path / "report.png", name, [panel])
    (figure,) = saved
    figure.draw_without_rendering()
    title = figure._suptitle
    assert title
    assert title.get_text().replace("\n", "").replace(" ", "") == name.replace(" ", "")
    box = title.get_window_extent()
    assert figure.bbox.x0 <= box.x0
    assert box.x1 <= figure.bbox.x1
    assert box.y0 >= figure.axes[0].get_window_extent().y1
