"""The cells of a sweep: their states, their order, and the tables of what is planned and what came
out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.csv_files import write_csv
from data_pipeline.errors import ConfigError, UserError
from data_pipeline.setting_pages import as_overrides, value_text
from launcher.status.infer_status import State
from launcher.status.run_state import RunState, is_run, submitted_config
from launcher.status.slurm_queue import read_states
from pretrain.config.resolve import with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of
from pretrain.reporting.results import differing_settings
from pretrain.scaling.sweep_file import Cell, Sweep, config_of
from pretrain.scaling.which_runs import other_settings, refuse_others
from pretrain.terminal.text import flops_text, si


@dataclass(frozen=True, kw_only=True)
class CellRun:
    """A cell, its run directory and its state."""

    cell: Cell
    config: RunConfig
    path: Path
    state: RunState

    @property
    def is_done(self) -> bool:
        """Whether a checkpoint holds the last of the steps that the sweep file has now."""
        return self.state.is_done and (self.state.checkpoint or 0) >= self.config.optim.steps

    @property
    def is_waiting(self) -> bool:
        """Whether it has to be started: it is neither done nor active."""
        return not self.is_done and not self.state.is_active


def read_cells(sweep: Sweep, sweep_path: Path, runs: Path) -> list[CellRun]:
    """All cells in the order of the file; Slurm is queried once for all of them.

    Of a run with other settings than its cell's the state says just that, without its numbers.
    """
    paths = [runs / cell.name for cell in sweep.cells]
    started = [path for path in paths if is_run(path)]
    known = {Path(state.path): state for state in read_states(started)}
    cells = []
    for cell, path in zip(sweep.cells, paths, strict=True):
        config = config_of(cell, sweep_path)
        state = known.get(path)
        own = submitted_config(path) if state and state.is_active else None
        other = other_settings(path, config, own)
        if other or not state:
            word = State.OTHER if other else State.NEW
            state = RunState(
                name=cell.name, path=str(path), state=word, reason=other, steps=config.optim.steps
            )
        cells.append(CellRun(cell=cell, config=config, path=path, state=state))
    return cells


def refuse_other_cells(cells: Sequence[CellRun]) -> None:
    """Raise ConfigError if a directory holds another run than its cell."""
    refuse_others(
        (cell.path, cell.state.reason) for cell in cells if cell.state.state is State.OTHER
    )


def longest_first(cells: Sequence[CellRun]) -> list[CellRun]:
    """The cells with the most training FLOPs left first; in the order of the file if that is equal
    or unknown.

    With several cells at a time, a long one that starts last would run alone in the end.
    """
    return sorted(cells, key=_flops_left, reverse=True)


def _flops_left(cell: CellRun) -> float:
    try:
        config = with_vocabulary(cell.config)
    except (
        UserError
    ):  # the corpus, and with it the vocabulary size, is missing; the cell itself will report that
        return 0.0
    return cost_of(config).flops - cost_of(config, min(cell.state.step, config.optim.steps)).flops


def describe(cells: Sequence[CellRun]) -> str:
    """How many cells are done, how many are active, and how the others ended."""
    done, waiting = sum(cell.is_done for cell in cells), [cell for cell in cells if cell.is_waiting]
    counts = {"active": len(cells) - done - len(waiting)}
    for cell in waiting:
        if cell.state.state not in (State.NEW, State.DONE):
            word = str(cell.state.state)
            counts[word] = counts.get(word, 0) + 1
    others = "".join(f", {count} {word}" for word, count in counts.items() if count)
    return f"{done} of {len(cells)} cells are done{others}"


# Of an evaluation's line, what is no result of its own, or is one under another name.
_NOT_RESULTS = ("kind", "step", "seconds", "loss", "bits_per_byte")


def settings_of(cells: Sequence[CellRun]) -> list[dict[str, Any]]:
    """Each cell's values of the settings in which cells differ; defaults are values, too."""
    found = differing_settings([cell.config for cell in cells])
    return [{key: found[key][index] for key in found} for index in range(len(cells))]


def planned(cell: CellRun, settings: Mapping[str, Any]) -> dict[str, str]:
    """A row of `launcher sweep plan`."""
    row = {
        "cell": cell.cell.name,
        "steps": f"{cell.config.optim.steps:,}",
        "parameters": "-",
        "FLOPs": "-",
    }
    try:
        cost = cost_of(with_vocabulary(cell.config))
        row |= {"parameters": si(cost.parameters), "FLOPs": flops_text(cost.flops)}
    except ConfigError:  # the corpus, and with it the vocabulary size, is missing
        pass
    return {**row, "settings": as_overrides(settings)}


def result_of(cell: CellRun, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `launcher sweep collect`: the cell's settings, state and results."""
    state = cell.state
    return {
        "cell": cell.cell.name,
        **{name: value_text(value) for name, value in settings.items()},
        "state": str(state.state),
        "step": state.step,
        **vars(state.results),
        **{
            f"evaluation_{key}": value
            for key, value in (state.evaluation or {}).items()
            if key not in _NOT_RESULTS
        },
    }


def write_results(path: Path, cells: Sequence[CellRun]) -> None:
    """Write one CSV row per cell, atomically; values that a cell does not have are empty."""
    rows = list(map(result_of, cells, settings_of(cells)))
    columns = list(dict.fromkeys(column for row in rows for column in row))
    write_csv(path, columns, rows)
