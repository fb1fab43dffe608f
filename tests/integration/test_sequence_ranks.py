"""Sequence parallelism (`engine.sequence_ranks`): ranks that share lanes train as one rank does."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from pretrain.checkpoint.elastic_reader import load_memory
from pretrain.commands.same_run import (
    STATE_TOLERANCE,
    differing_progress,
    differing_state,
    differing_values,
    summary,
)
from pretrain.rundir.events import Finished, TrainingBegan
from pretrain.rundir.run_dir import RunDir
from tests.helpers.engine_cells import largest_difference, losses_of, run_helper
from tests.helpers.sequence_cells import CASES, CHAIN, END, chain_cells

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def output(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("sequence")
    run_helper("sequence_cells", output, str(tiny_corpus), str(output))
    return output


def checkpoint_of(output: Path, name: str, step: int) -> marker.Checkpoint:
    return marker.verify(files.step_directory(output / name, step))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_in_float64_losses_gradients_and_memories_are_those_of_one_rank(
    output: Path, name: str
) -> None:
    for rank in range(4):
        found = json.loads((output / f"models-{rank}.json").read_text())[name]
        assert found.pop("sent") == found.pop("expected") > 0
        assert {key: size for key, size in found.items() if not size < 1e-13} == {}


@pytest.mark.slow
def test_a_chain_of_shares_and_world_sizes_keeps_losses_and_state(output: Path) -> None:
    whole, *links = chain_cells()
    expected = losses_of(output, whole["name"])
    losses = {
        step: loss for link in links for step, loss in losses_of(output, link["name"]).items()
    }
    assert losses.keys() == expected.keys() == set(range(1, END + 1))
    assert largest_difference(losses, expected) < TOLERANCE
    left, right = (checkpoint_of(output, each["name"], END) for each in (whole, links[-1]))
    assert not differing_progress(left, right)
    assert not differing_values(left, right, STATE_TOLERANCE)


@pytest.mark.slow
def test_whole_lanes_are_saved_whoever_shares_them(output: Path) -> None:
    links = chain_cells()[1:]
    for (before, after), (*_, step) in zip(itertools.pairwise(links), CHAIN, strict=False):
        left, right = (checkpoint_of(output, each["name"], step) for each in (before, after))
        assert not differing_progress(left, right)
        ours, theirs = (load_memory(each, range(8)) for each in (left, right))
        assert ours is not None
        assert theirs is not None
        assert {part.shape[:2] for part in ours.values()} == {(8, 12)}
        assert all(torch.equal(part, theirs[name]) for name, part in ours.items())


@pytest.mark.slow
def test_a_resumed_run_of_ranks_that_share_lanes_is_bitwise(output: Path) -> None:
    through, resumed = (losses_of(output, name) for name in ("through", "resumed"))
    assert len(resumed) == 3
    assert largest_difference(resumed, through) == 0.0
    left, right = (checkpoint_of(output, name, 6) for name in ("through", "resumed"))
    problems = differing_state(left, right)
    assert not problems, summary(problems)


@pytest.mark.slow
def test_a_group_may_have_fewer_lanes_than_ranks(output: Path) -> None:
    saved = checkpoint_of(output, "few", 2)
    assert [report["num_lanes"] for report in saved.rank_reports] == [0, 1, 0, 1]
    losses = {**losses_of(output, "few"), **losses_of(output, "few-resumed")}
    assert len(losses) == 4
    assert largest_difference(losses, losses_of(output, "few-alone")) < TOLERANCE


@pytest.mark.slow
def test_in_bf16_losses_are_those_of_one_rank_to_its_rounding(output: Path) -> None:
    alone, shared = (losses_of(output, name) for name in ("rounded-alone", "rounded"))
    assert len(shared) == 6
    assert largest_difference(shared, alone) < 3e-2


def lines_of(path: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["step"]: line for line in lines if line["kind"] == "train"}


COUNTED = ("tokens", "documents_started", "lane_epochs_started", "learning_rate")
MEASURED = ("loss", "grad_norm", "memory_norm/layer.0", "memory_norm/layer.1")


@pytest.mark.slow
def test_a_run_killed_and_resumed_from_its_nodes_disks_measures_what_one_rank_does(
    output: Path,
) -> None:
    alone, shared = (lines_of(output / name / "metrics.jsonl") for name in ("alone", "shared"))
    assert shared.keys() == alone.keys() == set(range(1, 13))
    for step, line in shared.items():
        assert [line[key] for key in COUNTED] == [alone[step][key] for key in COUNTED]
        for key in MEASURED:
            assert math.isclose(line[key], alone[step][key], rel_tol=TOLERANCE), (step, key)
    ledgers = [RunDir.open(output / name).ledger.read() for name in ("alone", "shared")]
    ends = [next(each for each in ledger if isinstance(each, Finished)) for ledger in ledgers]
    assert ends[0].tokens_of_corpora == ends[1].tokens_of_corpora
    starts = [each for each in ledgers[1] if isinstance(each, TrainingBegan)]
    assert [each.step for each in starts] == [0, 8]
    left, right = (checkpoint_of(output / name, "checkpoints", 12) for name in ("alone", "shared"))
    assert not differing_values(left, right, STATE_TOLERANCE)


@pytest.mark.slow
def test_memories_are_rebuilt_by_the_ranks_that_share_them(output: Path) -> None:
    """With weights that stand still the losses are those before the kill, to rounding."""
    before, after = (lines_of(output / name) for name in ("before.jsonl", "rebuilt/metrics.jsonl"))
    assert len(before) == 8
    for step in (7, 8):  # after the checkpoint of step 6
        assert after[step]["time"] > before[step]["time"]
        for key in ("loss", "grad_norm"):
            assert math.isclose(after[step][key], before[step][key], rel_tol=1e-6), (step, key)
