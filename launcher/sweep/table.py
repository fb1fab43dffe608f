"""A sweep's cells as tables: what it is about to run, and what came out."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_pipeline.errors import ConfigError
from data_pipeline.files import write_text
from launcher.sweep.cells import CellRun
from pretrain.config.resolve import with_vocabulary
from pretrain.costs.flops import cost_of
from pretrain.rundir.run_dir import RunDir
from pretrain.terminal.text import si

_NOT_RESULTS = ("kind", "step")


def planned(cell: CellRun) -> dict[str, str]:
    """A row of `launcher sweep plan`."""
    row = {
        "cell": cell.cell.name,
        "steps": f"{cell.config.optim.steps:,}",
        "parameters": "-",
        "FLOPs": "-",
    }
    try:
        cost = cost_of(with_vocabulary(cell.config))
        row |= {"parameters": si(cost.parameters), "FLOPs": f"{cost.flops:.3g}"}
    except ConfigError:  # the corpus, and with it the vocabulary, is not there yet
        pass
    return {**row, "settings": " ".join(f"{key}={value}" for key, value in _settings(cell).items())}


def result_of(cell: CellRun) -> dict[str, Any]:
    """A row of `launcher sweep collect`: the cell's own settings, how it stands, and its last evaluation."""
    state = cell.state
    evaluations = [
        line for line in RunDir(cell.path).read_metrics() if line.get("kind") == "evaluation"
    ]
    last = evaluations[-1] if evaluations else {}
    return {
        "cell": cell.cell.name,
        **_settings(cell),
        "state": str(state.state),
        "step": state.step,
        "train_loss": state.loss,
        "tokens_per_second": state.tokens_per_second,
        **{f"evaluation_{key}": value for key, value in last.items() if key not in _NOT_RESULTS},
    }


def write_results(path: Path, cells: Sequence[CellRun]) -> None:
    """One CSV row per cell, whole or not at all; what a cell does not have stays empty."""
    rows = [result_of(cell) for cell in cells]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text.getvalue())


def _settings(cell: CellRun) -> dict[str, str]:
    settings = dict(override.split("=", 1) for override in cell.cell.overrides)
    return {key: value for key, value in settings.items() if key != "name"}
