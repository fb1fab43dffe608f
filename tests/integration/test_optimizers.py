"""LAMB and Muon under every ZeRO stage against plain torch, and their norms per layer."""

from pathlib import Path
from typing import Any, get_args

import pytest

from pretrain.config.model import Precision
from pretrain.engines.engine import cpu_has_fp16
from tests.helpers.engine_cells import (
    HALF,
    STAGES,
    STEPS,
    Results,
    assert_layers_agree,
    assert_resumed_bitwise,
    cell,
    engine_settings,
    largest_difference,
    plain_torch,
    train_cells,
    whole_and_resumed,
)

PRECISIONS = [kind for kind in get_args(Precision) if kind != "fp16" or cpu_has_fp16()]
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}
SCALE: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {}, "fp16": {"loss_scale": (4096.0, 1000)}}
RATES = {"lamb": 0.01, "muon": 0.003}
# Every stage in fp32; half precision, which DeepSpeed gives wrappers of its own, with one of the
# two optimizers each.
HALVES = {"lamb": {"bf16": (1, 3), "fp16": (0, 2)}, "muon": {"bf16": (0, 2), "fp16": (1, 3)}}
OFFLOADED = {"lamb": 1, "muon": 3}
LEARNED = 0.05  # nats, at least, most of them in warm-up
RESUMED = "zero1-fp32"  # on two ranks, then on one at stage 3


def engines_of(optimizer: str) -> dict[str, dict[str, Any]]:
    """Return the engines on two ranks."""
    stages = {"fp32": STAGES, **HALVES[optimizer]}
    return {
        **{
            f"zero{stage}-{precision}": engine_settings(stage, precision, **SCALE[precision])
            for precision in PRECISIONS
            for stage in stages[precision]
        },
        "offload-fp32": engine_settings(OFFLOADED[optimizer], "fp32", offload_optimizer=True),
        # Stage 3 updates a group part by part if it is large.
        "parts-fp32": engine_settings(3, "fp32", zero={"sub_group_size": 4000}),
    }


def cells_of(optimizer: str) -> list[dict[str, Any]]:
    """Cells whose names start with the optimizer's."""
    optim = {"name": optimizer, "learning_rate": RATES[optimizer]}
    more: dict[str, Any] = {"optim": optim, "measure_at": [STEPS]}
    cells, whole = [], f"{optimizer}-{RESUMED}"
    for name, engine in engines_of(optimizer).items():
        if name == RESUMED:
            cells += whole_and_resumed(whole, engine, **more)
        else:
            cells.append(cell(f"{optimizer}-{name}", engine, **more))
    alone = {"ranks": 1, "resume": whole, "resume_at": HALF, **more}
    cells.append(cell(f"{optimizer}-alone-fp32", engine_settings(3, "fp32", micro=0), **alone))
    for kind in PRECISIONS:
        plain = plain_torch(kind, **SCALE[kind])
        cells.append(cell(f"{optimizer}-torch-{kind}", plain, ranks=1, **more))
    return cells


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("optimizers")


@pytest.fixture(scope="module")
def results(tiny_corpus: Path, output: Path) -> Results:
    """Losses, norms and norms per layer by cell and step."""
    return train_cells(tiny_corpus, output, [*cells_of("lamb"), *cells_of("muon")])


@pytest.mark.slow
def test_each_stage_agrees_with_plain_torch_also_in_norms_per_layer(results: Results) -> None:
    for name, found in results.items():
        optimizer, _, precision, *_ = name.split("-")
        plain = results[f"{optimizer}-torch-{precision}"]
        assert largest_difference(found["losses"], plain["losses"]) < TOLERANCE[precision], name
        assert plain["losses"][STEPS] < plain["losses"][1] - LEARNED
        assert_layers_agree(found, plain, 1e-4 if precision == "fp32" else 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", RATES)
def test_a_run_resumes_bitwise(results: Results, output: Path, optimizer: str) -> None:
    name = f"{optimizer}-{RESUMED}"
    assert_resumed_bitwise(results, output, name)
    whole, resumed = results[name], results[f"{name}-resumed"]
    assert all(resumed[key] == whole[key] for key in whole if "/" in key)
