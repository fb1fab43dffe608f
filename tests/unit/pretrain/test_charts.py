"""Charts of names that others chose."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pretrain.reporting import charts
from pretrain.reporting.charts import (
    Panel,
    panel_html,
    save_panels,
)

NAME = r"runs/$\frac$ at $5"  # in matplotlib's formulas an error


def panel_of(name: str) -> Panel:
    return Panel(name, name, name, lambda axes: axes.loglog([1, 9], [2, 3], label=name))


def test_a_dollar_in_a_name_is_a_dollar_in_every_chart(tmp_path: Path) -> None:
    save_panels(tmp_path / "a.png", NAME, [panel_of(NAME)])
    assert (tmp_path / "a.png").stat().st_size > 1000
    svg = panel_html(panel_of(NAME), 2.0, NAME)
    assert svg.count(NAME) >= 4  # both axes, the legend, the description


def test_a_legend_is_outside_of_the_curves_however_many_there_are(monkeypatch, tmp_path: Path):
    def draw(axes: Axes) -> None:
        for number in range(12):
            axes.plot([1, 2], [number, number], label=f"a run of a rather long name {number}")

    drawn: list[Figure] = []
    for name in ("chart_html", "save_png"):
        monkeypatch.setattr(charts, name, lambda *given: drawn.extend(given) or "")
    panel = Panel("Speed", "step", "tokens per second", draw)
    panel_html(panel, 2.0, "speed")
    save_panels(tmp_path / "a.png", "runs", [panel, panel])
    page, picture = (item for item in drawn if isinstance(item, Figure))
    for figure in (page, picture):
        figure.draw_without_rendering()
        legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
        for shown in filter(None, legends):
            box = shown.get_window_extent()
            assert not any(box.shrunk(0.99, 0.99).overlaps(axes.bbox) for axes in figure.axes)
            assert box.x1 <= figure.bbox.x1
    assert page.axes[0].bbox.height > 100


def test_every_value_has_a_color_of_its_own_between_the_same_ends():
    for count in (1, 3, 8, 12, 30):
        colors = charts.spread_colors(count)
        assert len({*colors}) == count
        assert all(re.fullmatch("#[0-9a-f]{6}", color) for color in colors)
        assert colors[0] == charts.SPECTRUM[0]
        assert count == 1 or colors[-1] == charts.SPECTRUM[-1]


def test_ordered_colors_are_told_apart_in_grey_and_a_dozen_by_their_markers():
    grey = [
        sum(part * int(color[at : at + 2], 16) for part, at in ((0.3, 1), (0.59, 3), (0.11, 5)))
        for color in charts.spread_colors(12)
    ]
    assert all(second - first > 3 for first, second in pairwise(grey))
    assert len({*charts.spread_markers(12)}) == 12
    assert len(charts.spread_markers(30)) == 30
