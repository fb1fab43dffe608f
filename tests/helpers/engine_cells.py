"""Cells of the engine tests: what each trains, run by one group of ranks, and their results."""

import json
import math
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint import directory as files
from pretrain.checkpoint.index import Checkpoint
from pretrain.checkpoint.verify import verify
from pretrain.rundir.compare_runs import difference_lines, differing_state
from tests.helpers.engine_worker import train_rank
from tests.helpers.forked_ranks import run_ranks

STEPS = 6
HALF = 4
STAGES = (0, 1, 2, 3)

Steps = dict[int, float]
Results = dict[str, dict[str, Steps]]


def engine_settings(
    stage: int, precision: str, checkpointing: str = "none", micro: int = 2, **more: Any
) -> dict[str, Any]:
    more = {"activation_checkpointing": checkpointing, "micro_batch_lanes": micro, **more}
    return {"zero_stage": stage, "precision": precision, **more}


def plain_torch(precision: str, micro: int = 0, **more: Any) -> dict[str, Any]:
    return {"kind": "torch", **engine_settings(1, precision, micro=micro, **more)}


def cell(name: str, engine: dict[str, Any], ranks: int = 2, **more: Any) -> dict[str, Any]:
    """What a group of ranks trains; nothing is saved unless `save_at` says so."""
    return {
        "name": name, "engine": engine, "ranks": ranks, "until": STEPS, "save_at": [], **more
    }  # fmt: skip


def whole_and_resumed(
    name: str, engine: dict[str, Any], half: int = HALF, until: int = STEPS, **more: Any
) -> list[dict[str, Any]]:
    """Return a run that saves half-way and at its end, and one that resumes from the half."""
    whole = cell(name, engine, **more, until=until, save_at=[half, until])
    again = {"name": f"{name}-resumed", "resume": name, "resume_at": half, "save_at": [until]}
    return [whole, {**whole, **again}]


def train_cells(corpus: Path, output: Path, cells: list[dict[str, Any]]) -> Results:
    """Train the cells, each run of those with as many ranks in one group; what they found."""
    for ranks, group in groupby(cells, key=itemgetter("ranks")):
        run_ranks(ranks, partial(train_rank, corpus, output, list(group)), output)
    return {each["name"]: read_result(output / f"{each['name']}.json") for each in cells}


def saved(output: Path, cell: str, step: int) -> Checkpoint:
    """A checkpoint that a cell has saved."""
    return verify(files.step_directory(output / cell, step))


def read_result(path: Path) -> dict[str, Steps]:
    tree = json.loads(path.read_text())
    del tree["findings"]
    return {
        kind: {int(step): float.fromhex(steps[step]) for step in steps}
        for kind, steps in tree.items()
    }


def findings_of(output: Path, name: str) -> dict[str, Any]:
    """What a cell found besides values of steps: which ranks' files it opened, for one."""
    return json.loads((output / f"{name}.json").read_text())["findings"]


def largest_difference(left: Steps, right: Steps) -> float:
    """Of the finite values of steps; the same ones of both are finite."""
    assert left.keys() <= right.keys()
    finite = [step for step in left if math.isfinite(left[step])]
    assert finite == [step for step in left if math.isfinite(right[step])]
    return max(abs(left[step] - right[step]) for step in finite)


def assert_resumed_bitwise(results: Results, output: Path, name: str) -> None:
    whole, resumed = results[name], results[f"{name}-resumed"]
    for kind in ("losses", "norms", "scales"):
        assert resumed[kind].items() <= whole[kind].items()
    last = max(resumed["losses"])
    assert last == max(whole["losses"])
    problems = differing_state(*(saved(output, each, last) for each in (name, f"{name}-resumed")))
    assert not problems, difference_lines(problems)


def assert_layers_agree(found: dict[str, Steps], plain: dict[str, Steps], rtol: float) -> None:
    """Norms per layer: squares add up to the global norm's, ratios are those of the weights."""
    names = [key.removeprefix("grad_norm/") for key in found if key.startswith("grad_norm/")]
    assert names
    (step,) = found[f"grad_norm/{names[0]}"]
    squares = sum(found[f"grad_norm/{name}"][step] ** 2 for name in names)
    assert math.sqrt(squares) == pytest.approx(found["norms"][step], rel=1e-5)
    for name in names:
        seen = found[f"seen_ratio/{name}"][step]
        assert found[f"update_ratio/{name}"][step] == pytest.approx(seen, rel=1e-4)
        for key in (f"grad_norm/{name}", f"update_ratio/{name}"):
            assert found[key][step] == pytest.approx(plain[key][step], rel=rtol)
