"""LAMB and Muon under every ZeRO stage against plain torch; per-layer norms of all optimizers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import pytest

from pretrain.config.choices import OptimizerName, Precision
from pretrain.engines.engine import cpu_has_fp16
from tests.helpers.engine_cells import (
    STAGES,
    Results,
    cell,
    engine_settings,
    largest_difference,
    read_result,
    train_cells,
)

STEPS, HALF = 12, 6
PRECISIONS = [kind for kind in get_args(Precision) if kind != "fp16" or cpu_has_fp16()]
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}
RATES = {"lamb": 0.01, "muon": 0.003}
LAYERS = ("shared", "embedding", "layer.0", "layer.1", "output")


def settings_of(stage: int, precision: str, micro: int) -> dict[str, Any]:
    scale = {"loss_scale": (2.0**12, 1000)} if precision == "fp16" else {}
    return {**engine_settings(stage, precision, "none", micro), **scale}


ON_TWO = {
    f"zero{stage}-{precision}{'-offload' if more else ''}": {
        **settings_of(stage, precision, micro=2),
        **more,
    }
    for stage in STAGES
    for precision in PRECISIONS
    for more in ({}, {"offload_optimizer": True})
    if not more or (precision == "fp32" and stage in (1, 3))
}
# Stage 3 updates a group part by part if it is large.
ON_TWO["zero3-fp32-parts"] = {**ON_TWO["zero3-fp32"], "zero": {"sub_group_size": 4000}}
ALONE = {f"zero{stage}-alone": settings_of(stage, "fp32", micro=0) for stage in STAGES}
PLAIN = {f"torch-{kind}": {"kind": "torch", **settings_of(1, kind, micro=0)} for kind in PRECISIONS}


def precision_of(name: str) -> str:
    return next((precision for precision in PRECISIONS if precision in name), "fp32")


def long_cell(optimizer: str, name: str, engine: dict[str, Any], **more: Any) -> dict[str, Any]:
    return cell(
        f"{optimizer}-{name}",
        engine,
        optim={
            "name": optimizer,
            "learning_rate": RATES[optimizer],
        },
        **{"until": STEPS, "save_at": [], "measure_at": [STEPS], **more},
    )


def adamw_cell(name: str, engine: dict[str, Any]) -> dict[str, Any]:
    """With muP, so that roles have rates, weight decays and epsilons of their own."""
    more = {"model": {"base_width": 8}, "optim": {"weight_decay": 0.1}}
    times = {"until": 3, "save_at": [], "measure_at": [3]}
    return {"name": f"adamw-{name}", "engine": engine, **more, **times}


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Results:
    """Losses, norms and norms per layer by cell and step, of one optimizer."""
    optimizer: str = request.param
    found = train_all(optimizer, tiny_corpus, tmp_path_factory.mktemp(optimizer))
    return {name.removeprefix(f"{optimizer}-"): steps for name, steps in found.items()}


def train_all(optimizer: str, corpus: Path, output: Path) -> Results:
    if optimizer in RATES:
        half, stage_1 = f"{optimizer}-half", ON_TWO["zero1-fp32"]
        on_two, on_one = (
            [long_cell(optimizer, name, settings) for name, settings in named.items()]
            for named in (ON_TWO, ALONE | PLAIN)
        )
        on_two.append(
            long_cell(optimizer, "half", stage_1, until=HALF, save_at=[HALF], measure_at=[])
        )
        on_two.append(long_cell(optimizer, "resumed-on-two", stage_1, resume=half))
        on_one.append(long_cell(optimizer, "resumed-on-one", ALONE["zero3-alone"], resume=half))
    else:
        on_two, on_one = (
            [adamw_cell(name, settings) for name, settings in named.items()]
            for named in (ON_TWO, ALONE | PLAIN)
        )
    train_cells(corpus, output, on_two, num_ranks=2)
    train_cells(corpus, output, on_one, num_ranks=1)
    return {each["name"]: read_result(output / f"{each['name']}.json") for each in on_two + on_one}


@pytest.mark.slow
@pytest.mark.parametrize("results", RATES, indirect=True)
@pytest.mark.parametrize("name", [*ON_TWO, *ALONE])
def test_each_stage_agrees_with_plain_torch(results: Results, name: str) -> None:
    precision = precision_of(name)
    found, plain = results[name], results[f"torch-{precision}"]
    assert len(found["losses"]) == STEPS
    assert largest_difference(found["losses"], plain["losses"]) < TOLERANCE[precision]
    assert found["losses"][STEPS] < found["losses"][1] - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("results", RATES, indirect=True)
def test_a_run_resumes_bitwise(results: Results) -> None:
    whole, half, resumed = (results[name] for name in ("zero1-fp32", "half", "resumed-on-two"))
    assert {**half["losses"], **resumed["losses"]} == whole["losses"]
    assert {key: resumed[key] for key in resumed if "/" in key} == {
        key: whole[key] for key in whole if "/" in key
    }


@pytest.mark.slow
@pytest.mark.parametrize("results", RATES, indirect=True)
def test_a_run_of_two_ranks_resumes_with_one_under_another_stage(results: Results) -> None:
    resumed, whole = results["resumed-on-one"], results["zero1-fp32"]
    assert sorted(resumed["losses"]) == list(range(HALF + 1, STEPS + 1))
    assert largest_difference(resumed["losses"], whole["losses"]) < TOLERANCE["fp32"]


@pytest.mark.slow
@pytest.mark.parametrize("results", get_args(OptimizerName), indirect=True)
@pytest.mark.parametrize("name", [*ON_TWO, *ALONE, *PLAIN])
def test_per_layer_norms_are_those_of_all_ranks_together(results: Results, name: str) -> None:
    """Squares add up to the global norm's; ratios are those of the weights before and after."""
    found = results[name]
    step = max(found["losses"])
    precision = precision_of(name)
    squares = sum(found[f"grad_norm/{layer}"][step] ** 2 for layer in LAYERS)
    assert math.sqrt(squares) == pytest.approx(found["norms"][step], rel=1e-5)
    plain = results[f"torch-{precision}"]
    for layer in LAYERS:
        seen = found[f"seen_ratio/{layer}"][step]
        assert found[f"update_ratio/{layer}"][step] == pytest.approx(seen, rel=1e-4)
        for key in (f"grad_norm/{layer}", f"update_ratio/{layer}"):
            assert found[key][step] == pytest.approx(
                plain[key][step], rel=1e-4 if precision == "fp32" else 1e-2
            )
