"""`launcher sweep status`: the states of a sweep's cells, their results and their settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from foundation.cli import as_overrides
from foundation.errors import printable
from launcher.commands.tables import RunsTable, plain_table
from launcher.sweep import CellRun, describe, settings_of
from pretrain.reporting.results import HEADS
from pretrain.terminal.text import column_groups

GAP = 2  # between columns


def sweep_status(cells: Sequence[CellRun]) -> Group:
    """How the cells stand, and as soon as one has made a step, their results."""
    return Group(*_parts(cells))


def _parts(cells: Sequence[CellRun]) -> Iterator[RenderableType]:
    yield RunsTable([cell.state for cell in cells])
    if any(cell.state.step for cell in cells):
        yield from ("", ResultsTable(cells))
    settings = settings_of(cells)
    if any(settings):
        names = (cell.cell.name for cell in cells)
        texts = map(as_overrides, settings)
        rows = [{"cell": name, "settings": text} for name, text in zip(names, texts, strict=True)]
        yield from ("", plain_table(rows))
    yield Text(describe(cells))


@dataclass(frozen=True)
class ResultsTable:
    """A row per cell; on a narrow terminal several tables, one below the other."""

    cells: Sequence[CellRun]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = [cell.state.results.cells for cell in self.cells]
        longest = max(len(printable(cell.cell.name)) for cell in self.cells)
        room = options.max_width - min(longest, options.max_width // 4)
        widths = [max(map(len, [head, *(each[head] for each in cells)])) + GAP for head in HEADS]
        for number, group in enumerate(column_groups(widths, room)):
            if number:
                yield ""
            yield self._table([HEADS[index] for index in group])

    def _table(self, heads: Sequence[str]) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("cell", header_style="dim", overflow="fold")
        for head in heads:
            table.add_column(head, justify="right", no_wrap=True, header_style="dim")
        for cell in self.cells:
            values = cell.state.results.cells
            table.add_row(Text(printable(cell.cell.name)), *(values[head] for head in heads))
        return table
