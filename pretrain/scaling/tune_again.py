"""The command that adds rates to a sweep of learning rates."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from pretrain.scaling.sweep_file import Sweep
from pretrain.scaling.tune import Tuned

_PLANNED = ("name", "seed", "optim.learning_rate")  # what a plan sets by its flags


def advice_to_add_rates(sweep: Sweep, file: Path, found: Sequence[Tuned]) -> list[str]:
    """How to plan the sweep in `file` again with the rates that are missing; [] if none is.

    The new plan has the old cells as they were, so their finished runs count.
    """
    added = {rate for item in found for rate in item.optimum.missing_rates}
    if not added:
        return []
    if len({cell.facts["tokens_per_step"] for cell in sweep.cells}) > 1:
        # each batch size has other steps and another warm-up, so no one line of overrides gives all
        return [
            "to add rates (finished runs are kept): plan again with all rates, the other flags as "
            f"before and --output {file}"
        ]
    return [f"to add rates (finished runs are kept): {_command(sweep, file, added)}"]


def _command(sweep: Sweep, file: Path, added: set[float]) -> str:
    experiment = Path(os.path.relpath((file.parent / sweep.cells[0].experiment).resolve()))
    overrides = [dict(each.split("=", 1) for each in cell.overrides) for cell in sweep.cells]
    rates = sorted({cell.facts["tuned_rate"] for cell in sweep.cells} | added)
    words = ["pretrain", "scale", "tune", "plan", str(experiment)]
    words += [f"{name}={value}" for name, value in overrides[0].items() if name not in _PLANNED]
    words += ["--rates", *(f"{rate:.12g}" for rate in rates)]
    if seeds := sorted({int(each["seed"]) for each in overrides if "seed" in each}):
        words += ["--seeds", *map(str, seeds)]
    if sweep.name != file.stem:
        words += ["--name", sweep.name]
    return shlex.join([*words, "--output", str(file)])
