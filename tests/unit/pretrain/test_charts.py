"""Charts of names that others chose."""

from __future__ import annotations

import re
from pathlib import Path

from pretrain.commands.compare import title_of
from pretrain.reporting.charts import (
    PAGE,
    Panel,
    canvas,
    chart_html,
    panel_html,
    save_panels,
)

NAME = r"runs/$\frac$ at $5"  # in matplotlib's formulas an error


def panel_of(name: str) -> Panel:
    return Panel(name, name, name, lambda axes, palette: axes.loglog([1, 9], [2, 3], label=name))


def test_many_runs_are_counted_in_the_title_of_their_comparison():
    assert title_of(["a", "b"]) == "a / b"
    assert title_of([f"learning_rate_{number}" for number in range(9)]) == "9 runs"


def test_a_dollar_in_a_name_is_a_dollar_in_every_chart(tmp_path: Path) -> None:
    save_panels(tmp_path / "a.png", NAME, [panel_of(NAME)])
    assert (tmp_path / "a.png").stat().st_size > 1000
    svg = panel_html(panel_of(NAME), 2.0, NAME)
    assert svg.count(NAME) >= 4  # both axes, the legend, the description
    figure, axes = canvas(PAGE, 2.0, "x", "y")
    axes.loglog([1e-6, 1e6], [1, 2])
    drawn = re.sub(r"<!--.*?-->", "", chart_html(figure, "ticks"), flags=re.DOTALL)
    assert "mathdefault" not in drawn, "labels of ticks remain formulas"
