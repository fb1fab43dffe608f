"""Cells of the engine tests: what each trains, run by one group of ranks, and their results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from foundation.own_programs import own_command
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from pretrain.commands.same_run import differing_state, summary
from pretrain.processes.local_ranks import RankGroup, describe_failure

STEPS = 20
HALF = 10
STAGES = (0, 1, 2, 3)

Results = dict[str, dict[str, dict[int, float]]]


def engine_settings(
    stage: int, precision: str, checkpointing: str, micro: int = 4
) -> dict[str, Any]:
    return {
        "zero_stage": stage,
        "precision": precision,
        "activation_checkpointing": checkpointing,
        "micro_batch_lanes": micro,
    }


def cell(name: str, engine: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "engine": engine, "until": STEPS, "save_at": [STEPS], **more}


def whole_and_resumed(name: str, engine: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """The same run twice: in one go, and to the half, then on from the checkpoint there."""
    return [
        cell(f"{name}-whole", engine, **more),
        cell(f"{name}-half", engine, **{**more, "until": HALF, "save_at": [HALF]}),
        cell(f"{name}-resumed", engine, resume=f"{name}-half", **more),
    ]


def train_cells(corpus: Path, output: Path, cells: list[dict[str, Any]], num_ranks: int) -> None:
    path = output / f"cells-{num_ranks}-{cells[0]['name']}.json"
    path.write_text(json.dumps(cells))
    words = (str(corpus), str(output), str(path))
    command = own_command("tests.helpers.engine_worker", *words)
    with RankGroup(command, num_ranks, output / f"logs-{cells[0]['name']}") as group:
        statuses = group.wait()
    assert not any(statuses), describe_failure(statuses, group.logs)


def run_helper(module: str, output: Path, *words: str) -> None:
    """Run a program of `tests.helpers` that forks ranks; `words` are its arguments.

    It writes into `output`, also the ranks' logs.
    """
    command = [sys.executable, "-m", f"tests.helpers.{module}", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    logs = (log.read_text() for log in output.rglob("*.log"))
    assert done.returncode == 0, done.stderr + "".join(logs)


def losses_of(output: Path, name: str) -> dict[int, float]:
    """Return the losses of a cell, by step."""
    tree = json.loads((output / f"{name}.json").read_text())
    return {int(step): float.fromhex(loss) for step, loss in tree["losses"].items()}


def read_result(path: Path) -> dict[str, dict[int, float]]:
    tree = json.loads(path.read_text())
    return {
        key: {int(step): float.fromhex(value) for step, value in steps.items()}
        for key, steps in tree.items()
        if key != "opened"
    }


def opened_files(path: Path) -> list[list[int]]:
    """Return the ranks whose engine files each rank of a resumed cell opened."""
    return json.loads(path.read_text())["opened"]


def largest_difference(left: dict[int, float], right: dict[int, float]) -> float:
    assert left.keys() <= right.keys()
    return max(abs(left[step] - right[step]) for step in left)


def assert_resumed_bitwise(results: Results, output: Path, name: str) -> None:
    whole, half, resumed = (results[f"{name}-{part}"] for part in ("whole", "half", "resumed"))
    assert {**half["losses"], **resumed["losses"]} == whole["losses"]
    assert {**half["norms"], **resumed["norms"]} == whole["norms"]
    ends = [
        marker.verify(files.step_directory(output / f"{name}-{part}", STEPS))
        for part in ("whole", "resumed")
    ]
    problems = differing_state(*ends)
    assert not problems, summary(problems)
