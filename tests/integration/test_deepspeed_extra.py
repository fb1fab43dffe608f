"""What `engine.deepspeed_extra` may add: losses stay as they are, and a resume is bitwise."""

from pathlib import Path
from typing import Any

import pytest

from foundation.settings import parse_config
from pretrain.config.run import RunConfig
from pretrain.engines.deepspeed_engine import TRIED
from tests.helpers.engine_cells import (
    Results,
    assert_resumed_bitwise,
    engine_settings,
    train_cells,
    whole_and_resumed,
)

BUCKET = {"reduce_bucket_size": 20_000}
GATHERED = {
    "stage3_max_live_parameters": 9000,
    "stage3_max_reuse_distance": 1000,
    "stage3_prefetch_bucket_size": 1000,
    "sub_group_size": 5000,
}
KEPT = {"stage3_param_persistence_threshold": 500, "stage3_model_persistence_threshold": 900}
# ZeRO stage, ranks and what is added to zero_optimization; in order of the ranks.
CELLS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "zero2": (2, 2, {}),
    "summed to all": (2, 2, {"use_multi_rank_bucket_allreduce": True, **BUCKET}),
    "overlapping": (2, 2, {"overlap_comm": True, **BUCKET}),
    "in fragments": (2, 2, {"contiguous_gradients": False, "reduce_scatter": False}),
    "gathered": (3, 2, GATHERED),
    "kept": (3, 2, KEPT),
    "offloaded": (3, 2, {"offload_param": {"device": "cpu", "pin_memory": True}}),
    "of two in two": (3, 2, {"zero_hpz_partition_size": 2}),
    "zero3 of four": (3, 4, {}),
    "of two in four": (3, 4, {"zero_hpz_partition_size": 2}),
}
EVERY_CELL = pytest.mark.parametrize("name", CELLS)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("extra")


@pytest.fixture(scope="module")
def results(tiny_corpus: Path, output: Path) -> Results:
    cells = []
    for name, (stage, ranks, zero) in CELLS.items():
        engine = engine_settings(stage, "bf16", micro=4 // ranks, zero=zero)
        cells += whole_and_resumed(name, engine, ranks=ranks)
    return train_cells(tiny_corpus, output, cells)


def test_every_key_that_is_taken_is_tried() -> None:
    tried = {key for _, _, zero in CELLS.values() for key in zero} - {"offload_param"}
    assert {*tried, "offload_param.device=cpu", "offload_param.pin_memory"} == TRIED


@pytest.mark.slow
@EVERY_CELL
def test_losses_are_those_without_it_and_a_resume_is_bitwise(results, output, name: str) -> None:
    assert_resumed_bitwise(results, output, name)
    plain = "zero3 of four" if CELLS[name][1] == 4 else "zero2"
    assert results[name]["losses"] == results[plain]["losses"]


def test_a_file_may_set_what_is_true_or_false() -> None:
    tree = {"engine": {"deepspeed_extra": {"zero_optimization": {"overlap_comm": False}}}}
    run = parse_config(RunConfig, tree, "run.yaml")
    assert run.engine.deepspeed_extra["zero_optimization"] == {"overlap_comm": False}
