"""An engine starts with the weights that the seed draws, under ZeRO-3 without a whole model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.live_tensors import measured_by_ranks
from tests.helpers.models import VARIANTS

RANKS = 3  # no part of a parameter then is as large as another whole one
DEEP: dict[str, Any] = {
    "vocab_size": 64,
    "num_layers": 9,
    "d_model": 64,
    "num_heads": 2,
    "d_inner": 64,
}
SHARING = (  # or not, in each its own way; and members that draw weights in theirs
    "untied_embedding",
    "adaptive_div2",
    "narrow_embedding",
    "compressive",
    "members_together",
)
TIED: dict[str, Any] = {
    "vocab_size": 37,
    "num_layers": 2,
    "d_model": 16,
    "num_heads": 2,
    "memory_length": 8,
}


def settings(stage: int, precision: str, model: dict[str, Any]) -> dict[str, Any]:
    engine = {"zero_stage": stage, "precision": precision}
    return {
        "seed": 7,
        "model": model,
        "data": {"lanes": RANKS, "segment_length": 4},
        "engine": engine,
    }


CELLS = {
    **{
        f"zero{stage}-{kind}": settings(stage, kind, DEEP)
        for stage in (2, 3)
        for kind in ("fp32", "bf16")
    },
    **{
        f"zero{stage}-{kind}": settings(stage, kind, TIED)
        for stage in (0, 1)
        for kind in ("fp32", "bf16")
    },
    **{f"{name}-zero3": settings(3, "bf16", {**TIED, **VARIANTS[name]}) for name in SHARING},
}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return the findings of every rank in each cell."""
    return measured_by_ranks(CELLS, RANKS, tmp_path_factory.mktemp("started"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_initial_weights_are_bitwise_those_that_the_seed_draws(
    started: dict[str, list[dict[str, Any]]], name: str
) -> None:
    assert all(each["as_drawn"] and each["random_state_as_drawn"] for each in started[name])


@pytest.mark.slow
def test_under_zero_3_at_most_a_few_parameters_are_whole_at_a_time(
    started: dict[str, list[dict[str, Any]]],
) -> None:
    for precision in ("fp32", "bf16"):
        for each in started[f"zero3-{precision}"]:
            assert each["whole"] > 20 * each["largest"]
            assert each["peak"] <= 3 * each["largest"]  # as drawn, as rounded, as it is handed on


@pytest.mark.slow
def test_the_same_measurement_finds_the_whole_model_under_zero_2(
    started: dict[str, list[dict[str, Any]]],
) -> None:
    assert all(each["peak"] > 0.9 * each["whole"] for each in started["zero2-fp32"])
