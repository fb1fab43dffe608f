"""The cells of a sweep and how each stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import UserError
from launcher.status.infer_status import State
from launcher.status.run_state import RunState, is_run
from launcher.status.slurm_queue import read_states
from pretrain.config.resolve import with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of
from pretrain.scaling.sweep_file import Cell, Sweep, config_of


@dataclass(frozen=True, kw_only=True)
class CellRun:
    """A cell, its run's directory, and how that stands."""

    index: int  # in the sweep file, and in arrays
    cell: Cell
    config: RunConfig
    path: Path
    state: RunState

    @property
    def is_done(self) -> bool:
        """Whether it made all steps that the sweep file asks for now."""
        return self.state.state is State.DONE and self.state.step >= self.config.optim.steps

    @property
    def is_waiting(self) -> bool:
        """Whether it has to be started: neither done nor on its way."""
        return not self.is_done and not self.state.is_active


def read_cells(sweep: Sweep, sweep_path: Path, runs: Path) -> list[CellRun]:
    """All cells in the order of the file; Slurm is asked once for all that it has."""
    paths = [runs / cell.name for cell in sweep.cells]
    begun = [path for path in paths if is_run(path)]
    known = {Path(state.path): state for state in read_states(begun)}
    cells = []
    for index, (cell, path) in enumerate(zip(sweep.cells, paths, strict=True)):
        config = config_of(cell, sweep_path)
        state = known.get(path) or RunState(
            name=cell.name, path=str(path), state=State.NEW, steps=config.optim.steps
        )
        cells.append(CellRun(index=index, cell=cell, config=config, path=path, state=state))
    return cells


def longest_first(cells: Sequence[CellRun]) -> list[CellRun]:
    """The cells that have most training FLOPs left first; in the order of the file where that is equal or unknown.

    With several cells at a time, a long one that is begun last would be left to run alone.
    """
    return sorted(cells, key=_flops_left, reverse=True)


def _flops_left(cell: CellRun) -> float:
    try:
        config = with_vocabulary(cell.config)
    except (
        UserError
    ):  # the corpus, and with it the vocabulary, is not there; the cell itself will say so
        return 0.0
    return cost_of(config).flops - cost_of(config, min(cell.state.step, config.optim.steps)).flops


def describe(cells: Sequence[CellRun]) -> str:
    """How many are done and on their way."""
    done, waiting = sum(cell.is_done for cell in cells), sum(cell.is_waiting for cell in cells)
    on_their_way = len(cells) - done - waiting
    return f"{done} of {len(cells)} cells are done" + (
        f", {on_their_way} on their way" if on_their_way else ""
    )
