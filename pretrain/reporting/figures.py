"""Several pictures in one PNG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.files import atomic_write
from pretrain.reporting.run_charts import PRINT, Colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 130
PANEL_INCHES = (6.0, 3.2)
GRID = "#e4e2dc"


@dataclass(frozen=True)
class Panel:
    """A picture's title, the labels of its axes, and what draws it."""

    title: str
    x_label: str
    y_label: str
    draw: Callable[[Axes, Colours], None]


def save_panels(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Draw the panels, two in a row, into a PNG that appears whole or not at all."""
    from matplotlib.figure import Figure

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(
        figsize=(PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows + 0.4), layout="constrained"
    )
    figure.suptitle(title, fontsize=13, color=PRINT.ink)
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, number)
        axes.set_title(panel.title, fontsize=10.5, color=PRINT.ink, loc="left")
        axes.set_xlabel(panel.x_label, color=PRINT.faint, fontsize=8.5)
        axes.set_ylabel(panel.y_label, color=PRINT.faint, fontsize=8.5)
        axes.tick_params(colors=PRINT.faint, labelsize=8.5, length=0)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(GRID)
        panel.draw(axes, PRINT)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False, fontsize=8.5, labelcolor=PRINT.ink, handlelength=1.6)
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
