"""Engines of three ranks: which weights they start with, and what they keep in memory.

Under ZeRO-3 no rank builds a whole model, and yet each starts with the weights that the seed draws.
What DeepSpeed's optimizers keep in real steps is what `describe` counts.
"""

from typing import Any

import pytest

from benchmarks.static import TABLE
from foundation.files import read_json
from foundation.settings import parse_config
from pretrain.config.run import RunConfig
from pretrain.costs.device_memory import Footprint, deepspeed_optimizer
from tests.helpers.live_tensors import (
    AS_ON_A_GPU,
    measured_by_ranks,
    sending_cells,
    sent_over_minimum,
    zero_cell,
)
from tests.helpers.models import VARIANTS

RANKS = 3  # no part of a parameter then is as large as another whole one
Found = dict[str, list[dict[str, Any]]]  # of every rank, by cell

DEEP = {"vocab_size": 64, "num_layers": 9, "d_model": 64, "num_heads": 2, "d_inner": 64}
TIED = {"vocab_size": 37, "num_layers": 2, "d_model": 16, "num_heads": 2, "memory_length": 8}
# Or not, in each its own way; and members that draw weights in theirs.
SHARING = ("adaptive_div2", "narrow_embedding", "compressive", "members_together")


def drawn(stage: int, precision: str, model: dict[str, Any]) -> dict[str, Any]:
    data = {"lanes": RANKS, "segment_length": 4}
    engine = {"zero_stage": stage, "precision": precision}
    return {"seed": 7, "model": model, "data": data, "engine": engine}


DRAWN = {
    "deep-zero2-fp32": drawn(2, "fp32", DEEP),
    "deep-zero2-bf16": drawn(2, "bf16", DEEP),
    "deep-zero3-fp32": drawn(3, "fp32", DEEP),
    "deep-zero3-bf16": drawn(3, "bf16", DEEP),
    **{f"{name}-zero3": drawn(3, "bf16", {**TIED, **VARIANTS[name]}) for name in SHARING},
}
SENDING = sending_cells(RANKS)
COUNTED = {
    **{name: cell for name, cell in SENDING.items() if name != "zero3-fp32"},
    **{f"zero{stage}-bf16": zero_cell(stage, "bf16") for stage in (0, 3)},
    f"zero2{AS_ON_A_GPU}": zero_cell(2, "bf16"),
    "zero2-offloaded": zero_cell(2, "bf16", offload_optimizer=True),
    "zero3-segments": {**zero_cell(3, "bf16"), "optim": {"gradient_segments": 3}},
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return measured_by_ranks(DRAWN | COUNTED | SENDING, RANKS, tmp_path_factory.mktemp("memory"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DRAWN, *COUNTED, "zero3-fp32"])
def test_initial_weights_are_bitwise_those_that_the_seed_draws(measured: Found, name: str) -> None:
    assert all(each["as_drawn"] and each["random_state_as_drawn"] for each in measured[name])


@pytest.mark.slow
def test_under_zero_3_at_most_a_few_parameters_are_whole_at_a_time(measured: Found) -> None:
    for precision in ("fp32", "bf16"):
        for each in measured[f"deep-zero3-{precision}"]:
            assert each["whole"] > 20 * each["largest"]
            assert each["peak"] <= 3 * each["largest"]  # as drawn, as rounded, as it is handed on
    assert all(each["peak"] > 0.9 * each["whole"] for each in measured["deep-zero2-fp32"])


@pytest.mark.slow
def test_the_host_has_the_drawn_weights_once(measured: Found) -> None:
    """Here beside those in bf16, which on GPUs are on the device."""
    for each in measured["deep-zero2-bf16"]:
        assert each["peak"] <= 1.5 * each["whole"] + 2 * each["largest"]


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTED)
def test_the_estimate_of_a_passes_peak_is_within_15_per_cent(measured: Found, name: str) -> None:
    run = parse_config(RunConfig, COUNTED[name], name)
    expected = Footprint(run, RANKS, on_gpu=name.endswith(AS_ON_A_GPU)).device
    expected += Footprint(run, RANKS, on_gpu=True).offloaded
    for found in measured[name]:
        assert found["peak_of_training"] == pytest.approx(expected, rel=0.15)
        assert found["optimizer"] == deepspeed_optimizer(run)


@pytest.mark.slow
@pytest.mark.parametrize("name", SENDING)
def test_a_step_sends_no_more_than_the_table_of_static_costs_has(measured: Found, name: str):
    assert sent_over_minimum(name, measured[name]) <= read_json(TABLE)["engines"][name]["sent"]
