"""Tables of runs' states, and of the cells of a sweep: states, results and settings.

Nothing outside the commands imports rich.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from foundation.cli import as_overrides
from foundation.errors import printable
from foundation.progress import duration
from launcher.status.infer_status import State
from launcher.status.run_state import RunState
from launcher.sweep import CellRun, describe, settings_of
from pretrain.reporting.results import HEADS
from pretrain.rundir.metric_names import RECENT_SPEED, TRAIN_LOSS
from pretrain.terminal.text import counted, fitted_table, number

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
WIDTH_OF_PIPES = 200
MOST_NODES = 16  # that are named one by one
NUMBERS = ("step", "%", TRAIN_LOSS, "left", "saved")


def console() -> Console:
    """Where tables go; lines in a pipe are not wrapped at the terminal's width."""
    return Console(width=None if sys.stdout.isatty() else WIDTH_OF_PIPES, highlight=False)


def render(states: Sequence[RunState], in_full: bool) -> Group:
    """One run in full if requested, else a table."""
    return one_run(states[0]) if in_full and len(states) == 1 else runs_table(states)


def runs_table(states: Sequence[RunState]) -> Group:
    """A row per run, named by its path under the common parent of all runs; the reasons for their
    states below the table."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("run", header_style="dim", overflow="fold")
    table.add_column("state", no_wrap=True, header_style="dim")
    for name in NUMBERS:
        table.add_column(name, justify="right", no_wrap=True, header_style="dim")
    reasons = []
    for path, state in zip(_short_names([state.path for state in states]), states, strict=True):
        name, cells = Text(printable(path)), _cells(state)
        table.add_row(name, _word(state), *(cells[column] for column in NUMBERS))
        if reason := _reason(state):
            reasons.append(Text.assemble(name, ": ", (reason, "dim")))
    return Group(table, *reasons)


def _cells(state: RunState) -> dict[str, str]:
    saved = state.checkpoint
    return {
        **state.results.cells,
        "step": f"{state.step:,}",
        "%": f"{state.fraction_done:.0%}",
        "left": _left(state),
        "saved": "-" if saved is None else f"{saved:,}",
    }


def one_run(state: RunState) -> Group:
    """Everything known about a run, a line each."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in _lines(state):
        grid.add_row(name, Text(printable(value)) if isinstance(value, str) else value)
    return Group(grid)


def plain_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """A row each; the columns are named by the first one."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    *columns, last = rows[0]
    for name in columns:
        table.add_column(name, no_wrap=True, header_style="dim")
    table.add_column(last, overflow="fold", header_style="dim")
    for row in rows:
        table.add_row(*(Text(printable(value)) for value in row.values()))
    return table


def age(seconds: float | None) -> str:
    """How long ago; `?` for unknown."""
    return "?" if seconds is None else f"{duration(seconds)} ago"


def _short_names(paths: Sequence[str]) -> list[str]:
    parents = [os.path.dirname(os.path.abspath(path)) for path in paths]
    return [os.path.relpath(os.path.abspath(path), os.path.commonpath(parents)) for path in paths]


def _lines(state: RunState) -> list[tuple[str, str | Text]]:
    ranks = "" if state.ranks is None else f", {counted(state.ranks, 'rank')}"
    nodes = f" on {_nodes(state.nodes)}" if state.nodes else ""
    checkpoint = "none yet"
    if state.checkpoint is not None:
        checkpoint = f"step {state.checkpoint:,}, {age(state.checkpoint_age)}"
    lines: list[tuple[str, str | Text]] = [
        ("run", f"{state.name}  {state.path}"),
        (
            "state",
            _word(state)
            if not _reason(state)
            else _word(state).append(f"  {_reason(state)}", style="default"),
        ),
        ("step", f"{state.step:,} of {state.steps:,}  ({state.fraction_done:.0%})"),
        *((name, value) for name, value in state.results.cells.items() if name != "goodput"),
        (RECENT_SPEED, number(state.recent_tokens_per_second, ",.0f")),
        ("time left", _left(state)),
        (
            "goodput",
            "-"
            if state.time_spent is None
            else f"{state.time_spent.goodput:.0%} of {duration(state.time_spent.total)}: "
            f"{state.time_spent.description}",
        ),
        ("checkpoint", checkpoint),
        ("attempts", f"{state.attempts}{ranks}{nodes}"),
    ]
    lines += [("replaced", description) for description in state.replaced_nodes]
    if state.mirrored is not None or state.mirror_problem:
        stored = "nothing yet" if state.mirrored is None else f"step {state.mirrored:,}"
        lines.append(("in the store", "; ".join(filter(None, (stored, state.mirror_problem)))))
    if state.job:
        lines.append(("job", state.job))
    if state.last_failure:
        ago = ""
        if state.last_failure_age is not None:
            ago = f", {age(state.last_failure_age)}"
        lines.append(("last failure", f"{state.last_failure}{ago}"))
    return lines


def _nodes(names: Sequence[str]) -> str:
    if len(names) <= MOST_NODES:
        return " ".join(names)
    return f"{len(names)} nodes, {names[0]} to {names[-1]}"


def _reason(state: RunState) -> str:
    """Why the run is in its state, and whether much of it is not saved."""
    return printable("; ".join(filter(None, (state.reason, state.unsaved))))


def _word(state: RunState) -> Text:
    return Text(str(state.state), style=STYLES.get(state.state, "default"))


def _left(state: RunState) -> str:
    return "-" if state.seconds_left is None else duration(state.seconds_left)


def sweep_status(cells: Sequence[CellRun], width: int | None = None) -> Group:
    """How the cells stand, and as soon as one has made a step, their results, in tables that fit
    the width, by default the terminal's."""
    parts: list[RenderableType] = [runs_table([cell.state for cell in cells])]
    names = [printable(cell.cell.name) for cell in cells]
    if any(cell.state.step for cell in cells):
        results = [cell.state.results.cells for cell in cells]
        rows = [["cell", *HEADS]]
        rows += [
            [name, *(each[head] for head in HEADS)]
            for name, each in zip(names, results, strict=True)
        ]
        parts += ["", Text(fitted_table(rows, width))]
    if any(settings_of(cells)):
        parts += ["", settings_table(cells)]
    return Group(*parts, Text(describe(cells)))


def settings_table(cells: Sequence[CellRun]) -> Table:
    """A row per cell: the settings in which the cells differ."""
    texts = map(as_overrides, settings_of(cells))
    names = (cell.cell.name for cell in cells)
    return plain_table(
        [{"cell": name, "settings": text} for name, text in zip(names, texts, strict=True)]
    )
