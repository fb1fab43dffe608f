"""What DeepSpeed's optimizers keep in real steps of three ranks, against what `describe` counts."""

from __future__ import annotations

from typing import Any

import pytest

from foundation.settings import parse_config
from pretrain.config.run import RunConfig
from pretrain.costs.memory import Footprint, optimizer_of
from tests.helpers.live_tensors import measured_by_ranks, zero_cell

RANKS = 3

CELLS = {
    **{f"zero{stage}-bf16": zero_cell(stage, "bf16") for stage in range(4)},
    **{f"zero{stage}-fp32": zero_cell(stage, "fp32") for stage in (1, 2)},
    "zero2-offloaded": zero_cell(2, "bf16", offload_optimizer=True),
    "zero3-segments": {**zero_cell(3, "bf16"), "optim": {"gradient_segments": 3}},
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The findings of every rank in each cell."""
    return measured_by_ranks(CELLS, RANKS, tmp_path_factory.mktemp("memory"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_the_estimate_of_a_passes_peak_is_within_15_per_cent(
    measured: dict[str, list[dict[str, Any]]], name: str
) -> None:
    run = parse_config(RunConfig, CELLS[name], name)
    expected = Footprint(run, RANKS).device + Footprint(run, RANKS, on_gpu=True).offloaded
    for found in measured[name]:
        assert found["peak_of_training"] == pytest.approx(expected, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_the_optimizer_that_results_is_the_expected_one(
    measured: dict[str, list[dict[str, Any]]], name: str
) -> None:
    expected = optimizer_of(parse_config(RunConfig, CELLS[name], name))
    assert {found["optimizer"] for found in measured[name]} == {expected}
