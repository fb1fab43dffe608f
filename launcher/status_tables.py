"""Tables of the states of runs, and of the cells of a sweep, for a terminal."""

import os
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from foundation.cli import as_overrides
from foundation.errors import printable
from foundation.progress import duration
from launcher.run_state import RunState
from launcher.run_status import State
from launcher.sweep import CellRun, cell_settings, describe
from pretrain.reporting.results import HEADS
from pretrain.rundir.metric_names import RECENT_SPEED, TRAIN_LOSS
from pretrain.terminal.text import counted, fitted_table, format_number

STYLES = {
    State.RUNNING: "green",
    State.DONE: "bold green",
    State.QUEUED: "yellow",
    State.REQUEUED: "yellow",
    State.PREEMPTED: "yellow",
    State.STOPPED: "cyan",
    State.CANCELED: "magenta",
    State.UNRESPONSIVE: "bold red",
    State.FAILED: "bold red",
    State.OTHER: "bold red",
}
WIDTH_OF_PIPES = 200  # characters
MOST_NODES = 16  # more nodes than this are not named one by one
NUMBERS = ("step", "%", TRAIN_LOSS, "left", "saved")


def console() -> Console:
    """Return where tables go; in a pipe their lines may be WIDTH_OF_PIPES long."""
    return Console(width=None if sys.stdout.isatty() else WIDTH_OF_PIPES, highlight=False)


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")


def runs_table(states: Sequence[RunState], folder: str | os.PathLike[str] = "/") -> Group:
    """Return a row per run, named by its path under `folder`, if all are there, or their common
    parent; the reasons for their states are below the table."""
    table, reasons = _table(), []
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    for head in NUMBERS:
        table.add_column(head, justify="right", no_wrap=True)
    paths = [os.path.abspath(state.path) for state in states]
    parent = os.path.commonpath(map(os.path.dirname, paths))
    if folder != "/" and os.path.commonpath([parent, top := os.path.abspath(folder)]) == top:
        parent = top
    for path, state in zip(paths, states, strict=True):
        name = Text(printable(os.path.relpath(path, parent)))
        table.add_row(
            name,
            _word(state),
            f"{state.step:,}",
            f"{state.fraction_done:.0%}",
            state.results.cells[TRAIN_LOSS],
            _left(state),
            format_number(state.checkpoint, ","),
        )
        if reason := _reason(state):
            reasons.append(Text.assemble(name, ": ", (reason, "dim")))
    return Group(table, *reasons)


def one_run(state: RunState) -> Table:
    """Return everything known about a run, a line each."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in _lines(state):
        grid.add_row(name, Text(printable(value)) if isinstance(value, str) else value)
    return grid


def plain_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Return a table of these rows; the first one names the columns."""
    table = _table()
    *columns, last = rows[0]
    for name in columns:
        table.add_column(name, no_wrap=True)
    table.add_column(last, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(value)) for value in row.values()))
    return table


def age(seconds: float | None) -> str:
    """Return a text such as `5 min ago`; `?` for None."""
    return "?" if seconds is None else f"{duration(seconds)} ago"


def _lines(state: RunState) -> list[tuple[str, str | Text]]:
    word, spent = _word(state), state.time_spent
    if reason := _reason(state):
        word.append(f"  {reason}", style="default")
    attempts = f"{state.attempts}"
    if state.ranks is not None:
        attempts += f", {counted(state.ranks, 'rank')}"
    if state.nodes:
        is_short = len(state.nodes) <= MOST_NODES
        few, many = " ".join(state.nodes), f"{state.nodes[0]} to {state.nodes[-1]}"
        attempts += f" on {few if is_short else f'{len(state.nodes)} nodes, {many}'}"
    goodput, checkpoint = "-", "none yet"
    if spent is not None:
        goodput = f"{spent.goodput:.0%} of {duration(spent.total)}: {spent.description}"
    if state.checkpoint is not None:
        checkpoint = f"step {state.checkpoint:,}, {age(state.checkpoint_age)}"
    lines: list[tuple[str, str | Text]] = [
        ("run", f"{state.name}  {state.path}"),
        ("state", word),
        ("step", f"{state.step:,} of {state.steps:,}  ({state.fraction_done:.0%})"),
        *((name, value) for name, value in state.results.cells.items() if name != "goodput"),
        (RECENT_SPEED, format_number(state.recent_tokens_per_second, ",.0f")),
        ("time left", _left(state)),
        ("goodput", goodput),
        ("checkpoint", checkpoint),
        ("attempts", attempts),
        *(("replaced", description) for description in state.replaced_nodes),
    ]
    if state.mirrored is not None or state.mirror_problem:
        stored = "nothing yet" if state.mirrored is None else f"step {state.mirrored:,}"
        lines.append(("in the store", "; ".join(filter(None, (stored, state.mirror_problem)))))
    if state.job:
        lines.append(("job", state.job))
    if state.last_failure:
        lines.append(("last failure", f"{state.last_failure}, {age(state.last_failure_age)}"))
    return lines


def _reason(state: RunState) -> str:
    """Return why the run is in its state, and whether much of it is not saved."""
    return printable("; ".join(filter(None, (state.reason, state.unsaved))))


def _word(state: RunState) -> Text:
    return Text(str(state.state), style=STYLES.get(state.state, "default"))


def _left(state: RunState) -> str:
    return "-" if state.seconds_left is None else duration(state.seconds_left)


def sweep_status(cells: Sequence[CellRun], width: int | None = None) -> Group:
    """Return the cells' states and, as soon as one has made a step, results, in tables that fit the
    width, by default the terminal's."""
    parts: list[RenderableType] = [runs_table([cell.state for cell in cells])]
    names = [printable(cell.cell.name) for cell in cells]
    if any(cell.state.step for cell in cells):
        results = [cell.state.results.cells for cell in cells]
        rows = [["cell", *HEADS]]
        rows += [
            [name, *(result[head] for head in HEADS)]
            for name, result in zip(names, results, strict=True)
        ]
        parts += ["", Text(fitted_table(rows, width))]
    if any(cell_settings(cells)):
        parts += ["", settings_table(cells)]
    return Group(*parts, Text(describe(cells)))


def settings_table(cells: Sequence[CellRun]) -> Table:
    """Return a row per cell with the settings in which the cells differ."""
    texts = map(as_overrides, cell_settings(cells))
    names = (cell.cell.name for cell in cells)
    return plain_table(
        [{"cell": name, "settings": text} for name, text in zip(names, texts, strict=True)]
    )
