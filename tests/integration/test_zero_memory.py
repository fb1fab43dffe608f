"""What DeepSpeed's optimizers keep in real steps of three ranks, against what `describe` counts."""

from __future__ import annotations

from typing import Any

import pytest

from foundation.settings import parse_config
from pretrain.config.run import RunConfig
from pretrain.costs.device_memory import memory_parts, offloaded_bytes, total_bytes
from pretrain.costs.zero_buffers import optimizer_of
from tests.helpers.live_tensors import measured_by_ranks

RANKS = 3
# Weights outweigh everything else; the largest bucket is half of the model.
MODEL = {"vocab_size": 2000, "num_layers": 2, "d_model": 128, "num_heads": 2, "d_inner": 128}
LARGEST = 2000 * 128
SHARDED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
BUCKET = {"zero_optimization": {**SHARDED["zero_optimization"], "reduce_bucket_size": LARGEST}}


def cell(stage: int, precision: str, lanes: int = 1, **engine: Any) -> dict[str, Any]:
    sizes = {"lanes": RANKS * lanes, "segment_length": 4}
    settings = {"zero_stage": stage, "precision": precision, "deepspeed_extra": BUCKET, **engine}
    return {"model": MODEL, "data": sizes, "engine": {"micro_batch_lanes": 1, **settings}}


CELLS = {
    **{f"zero{stage}-bf16": cell(stage, "bf16") for stage in range(4)},
    **{f"zero{stage}-fp32": cell(stage, "fp32") for stage in (1, 2)},
    "zero2-offloaded": cell(2, "bf16", offload_optimizer=True),
    "zero3-shared": cell(3, "bf16", secondary_shard_ranks=RANKS),
    "zero3-segments": {**cell(3, "bf16"), "optim": {"gradient_segments": 3}},
}

SENT = {
    name: {**tree, "data": {"lanes": 4, "segment_length": 4}}
    for name, tree in {
        **{f"zero{stage}-fp32": cell(stage, "fp32") for stage in (1, 2)},
        # Without a small bucket the weights stay gathered from the forward to the backward pass.
        "zero3-fp32": cell(3, "fp32", deepspeed_extra=SHARDED),
        "zero2-bf16": cell(2, "bf16"),
    }.items()
}


@pytest.mark.slow
def test_gradients_and_weights_travel_as_in_one_reduce_scatter_and_one_all_gather(tmp_path) -> None:
    for name, ranks in measured_by_ranks(SENT, 4, tmp_path).items():
        # Of four quarters, three are another rank's; sums are fp32, weights in the precision.
        minimum = 3 / 4 * ranks[0]["whole"] * (2.0 if name.endswith("fp32") else 1.5)
        for found in ranks:
            assert found["sent"] == pytest.approx(minimum, rel=0.1), name


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
    expected = total_bytes(memory_parts(run, RANKS)) + offloaded_bytes(run, RANKS)
    for found in measured[name]:
        assert found["peak_of_training"] == pytest.approx(expected, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_the_optimizer_that_results_is_the_expected_one(
    measured: dict[str, list[dict[str, Any]]], name: str
) -> None:
    expected = optimizer_of(parse_config(RunConfig, CELLS[name], name))
    assert {found["optimizer"] for found in measured[name]} == {expected}
