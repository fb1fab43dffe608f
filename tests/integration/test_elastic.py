"""A run that resumes with other world sizes and ZeRO stages, again and again."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from pretrain.checkpoint.elastic_reader import FragmentReader, load_memory
from pretrain.commands.same_run import differing_progress

LANES = range(8)
# (ranks, ZeRO stage, last step)
CHAIN = ((2, 1, 4), (4, 3, 7), (1, 0, 10), (2, 2, 13))
END = CHAIN[-1][-1]


def chain_cells() -> list[dict[str, Any]]:
    """The run in one go, then the chain; each link saves what it loaded before its first step."""
    cells = [cell("whole", 2, 1, until=END, save_at=[END])]
    begin = 0
    for ranks, stage, end in CHAIN:
        link = cell(f"{ranks}-ranks-zero-{stage}", ranks, stage, until=end, save_at=[end])
        if begin:
            link |= {"resume": cells[-1]["name"], "save_at": [begin, end]}
        cells.append(link)
        begin = end
    return cells


def cell(name: str, ranks: int, stage: int, **more: Any) -> dict[str, Any]:
    engine = {
        "zero_stage": stage,
        "precision": "fp32",
        "activation_checkpointing": "none",
        "micro_batch_lanes": 2,
    }
    return {"name": name, "ranks": ranks, "engine": engine, **more}


@pytest.fixture(scope="module")
def output(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("elastic")
    path = output / "cells.json"
    path.write_text(json.dumps(chain_cells()))
    command = [
        sys.executable,
        "-m",
        "tests.helpers.engine_worker",
        str(tiny_corpus),
        str(output),
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr + "".join(
        log.read_text() for log in output.glob("*.log")
    )
    return output


def losses_of(output: Path, name: str) -> dict[int, float]:
    tree = json.loads((output / f"{name}.json").read_text())
    return {int(step): float.fromhex(loss) for step, loss in tree["losses"].items()}


@pytest.mark.slow
def test_a_chain_of_world_sizes_and_stages_keeps_the_losses(output: Path) -> None:
    whole, *links = chain_cells()
    expected = losses_of(output, whole["name"])
    losses = {
        step: loss for link in links for step, loss in losses_of(output, link["name"]).items()
    }
    assert losses.keys() == expected.keys() == set(range(1, END + 1))
    assert max(abs(losses[step] - expected[step]) for step in expected) < 1e-5


@pytest.mark.slow
def test_each_link_of_the_chain_loads_every_bit(output: Path) -> None:
    """Before its first step it saved what it had loaded: sharded over other files, but equal."""
    links = chain_cells()[1:]
    for (before, after), (_, _, step) in zip(itertools.pairwise(links), CHAIN, strict=False):
        left, right = (
            marker.verify(files.step_directory(output / each["name"], step))
            for each in (before, after)
        )
        assert left.index["world_size"] != right.index["world_size"]
        assert not differing_progress(left, right)
        assert_same_tensors(load_memory(left, LANES), load_memory(right, LANES))
        with FragmentReader(left) as ours, FragmentReader(right) as theirs:
            assert ours.parameter_names() == theirs.parameter_names()
            for parameter in ours.parameter_names():
                for kind in ("weight", "exp_avg", "exp_avg_sq"):
                    assert torch.equal(
                        whole_vector(ours, parameter, kind), whole_vector(theirs, parameter, kind)
                    )


def assert_same_tensors(
    left: tuple[torch.Tensor, ...] | None, right: tuple[torch.Tensor, ...] | None
) -> None:
    assert left is not None
    assert right is not None
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(left, right, strict=True))


def whole_vector(reader: FragmentReader, parameter: str, kind: str) -> torch.Tensor:
    whole = torch.full((reader.num_elements(parameter),), torch.nan)
    reader.copy_into(whole, parameter, 0, kind)
    return whole
