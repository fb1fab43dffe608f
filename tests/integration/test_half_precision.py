"""fp16 under every ZeRO stage: its losses, its overflows, and resuming with the loss scale.

On a CPU without fp16 a run is rejected, and every test here then asserts that.
"""

from __future__ import annotations

import math
import os
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from pretrain.cli import main
from pretrain.engines import engine
from pretrain.engines.engine import cpu_has_fp16
from pretrain.processes.local_ranks import train_command
from pretrain.rundir.run_dir import RunDir
from tests.helpers.engine_cells import (
    HALF,
    STAGES,
    STEPS,
    Results,
    assert_resumed_bitwise,
    cell,
    engine_settings,
    largest_difference,
    read_result,
    train_cells,
    whole_and_resumed,
)
from tests.integration.test_checkpoint_failures import SETTINGS

TOLERANCE = 1e-3  # of losses around 5 over 20 steps, to plain torch in fp16 and in fp32
FITTING = 2.0**12
TOO_LARGE = 2.0**24  # overflows for some steps, then comes to and fro: doubled after 4 updates
TINY = ["engine.precision=fp16", *(each for each in SETTINGS if not each.startswith("optim.steps"))]


def half(stage: int, scale: float, window: int = 1000) -> dict:
    settings = engine_settings(stage, "fp16", "none", micro=2)
    return {**settings, "loss_scale": (scale, window)}


def assert_rejected(corpus: Path, directory: Path, cpu: str = "DEFAULT") -> None:
    """Start a run without fp16 and check that it is rejected."""
    experiment = directory / "half.yaml"
    experiment.write_text(f"data: {{path: {corpus}}}\n")
    command = train_command(experiment, directory / "run", *TINY)
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": cpu}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "engine.precision=fp16: found a CPU without half-precision arithmetic" in done.stderr
    assert "use engine.precision=bf16" in done.stderr
    assert not (directory / "run").exists()


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("half")


@pytest.fixture(scope="module")
def results(tiny_corpus: Path, output: Path) -> Results:
    """Every stage on two ranks, plain torch on one; nothing where the CPU has no fp16."""
    if not cpu_has_fp16():
        assert_rejected(tiny_corpus, output)
        return {}
    on_two = []
    for stage in STAGES:
        on_two.append(cell(f"zero{stage}-fitting", half(stage, FITTING), save_at=[]))
        on_two += whole_and_resumed(f"zero{stage}-large", half(stage, TOO_LARGE, window=4))
        for kind, skips in (("inf", []), ("nan", [3])):
            fault = {"step": 3, "kind": kind}
            on_two.append(
                cell(
                    f"zero{stage}-{kind}",
                    half(stage, FITTING),
                    fault=fault,
                    skips=skips,
                    until=4,
                    save_at=[],
                )
            )
    offloaded = {**half(1, FITTING), "offload_optimizer": True}
    on_two.append(
        cell("offloaded-inf", offloaded, fault={"step": 3, "kind": "inf"}, until=6, save_at=[])
    )
    plain = {
        "kind": "torch",
        **engine_settings(1, "fp16", "none", micro=0),
        "loss_scale": (FITTING, 1000),
    }
    on_one = [
        cell("torch-fp16", plain, save_at=[]),
        cell("torch-fp32", {**plain, "precision": "fp32"}, save_at=[]),
        cell("on-one", half(0, FITTING), resume="zero3-large-half", save_at=[HALF], until=HALF + 1),
    ]
    train_cells(tiny_corpus, output, on_two, num_ranks=2)
    train_cells(tiny_corpus, output, on_one, num_ranks=1)
    return {each["name"]: read_result(output / f"{each['name']}.json") for each in on_two + on_one}


@pytest.mark.slow
def test_every_stage_agrees_with_plain_torch(results: Results) -> None:
    for stage in STAGES if results else ():
        for yardstick in ("torch-fp16", "torch-fp32"):
            found, plain = results[f"zero{stage}-fitting"], results[yardstick]
            assert len(found["losses"]) == STEPS
            assert largest_difference(found["losses"], plain["losses"]) < TOLERANCE
            assert largest_difference(found["norms"], plain["norms"]) < 10 * TOLERANCE
        assert set(results[f"zero{stage}-fitting"]["scales"].values()) == {FITTING}


@pytest.mark.slow
def test_gradients_infinite_on_one_rank_are_skipped_by_all_and_the_scale_halves(
    results: Results,
) -> None:
    """The worker compares every bit of both ranks before and after each skipped step."""
    for stage in STAGES if results else ():
        found, fitting = results[f"zero{stage}-inf"], results[f"zero{stage}-fitting"]
        assert list(found["scales"].values()) == [FITTING, FITTING, FITTING, FITTING / 2]
        assert all(found["losses"][step] == fitting["losses"][step] for step in (1, 2, 3))
        assert [math.isfinite(norm) for norm in found["norms"].values()] == [
            True,
            True,
            False,
            True,
        ]


@pytest.mark.slow
def test_with_an_offloaded_optimizer_nothing_of_an_overflow_remains(results: Results) -> None:
    if results:
        found, usual = results["offloaded-inf"], results["zero1-inf"]
        assert [math.isfinite(norm) for norm in found["norms"].values()] == [
            True,
            True,
            False,
            True,
            True,
            True,
        ]
        assert abs(found["losses"][4] - usual["losses"][4]) < TOLERANCE


@pytest.mark.slow
def test_a_nan_loss_does_not_change_the_scale(results: Results) -> None:
    for stage in STAGES if results else ():
        assert set(results[f"zero{stage}-nan"]["scales"].values()) == {FITTING}


@pytest.mark.slow
def test_too_large_a_scale_halves_until_it_fits_and_doubles_again(results: Results) -> None:
    for stage in STAGES if results else ():
        found = results[f"zero{stage}-large-whole"]
        overflowed = [not math.isfinite(norm) for norm in found["norms"].values()]
        assert overflowed[:4] == [True] * 4
        assert not all(overflowed[:HALF])
        ratios = [after / before for before, after in pairwise(found["scales"].values())]
        assert [ratio == 0.5 for ratio in ratios] == overflowed[:-1]
        assert 2.0 in ratios


@pytest.mark.slow
def test_a_resumed_run_repeats_losses_state_and_scale_bitwise(
    results: Results, output: Path
) -> None:
    for stage in STAGES if results else ():
        assert_resumed_bitwise(results, output, f"zero{stage}-large")
        whole, resumed = (
            results[f"zero{stage}-large-{part}"]["scales"] for part in ("whole", "resumed")
        )
        assert resumed == {step: scale for step, scale in whole.items() if step > HALF}


@pytest.mark.slow
def test_another_world_size_and_stage_continue_with_the_scale(
    results: Results, output: Path
) -> None:
    if not results:
        return
    before, after = (
        marker.verify(files.step_directory(output / name, HALF)).index["loss_scale"]
        for name in ("zero3-large-half", "on-one")
    )
    assert before == after
    assert before["scale"] not in (FITTING, TOO_LARGE)
    assert results["on-one"]["scales"][HALF + 1] == before["scale"]


@pytest.mark.slow
def test_the_search_for_a_loss_scale_at_the_start_is_reported_and_does_not_end_the_run(
    tiny_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cpu_has_fp16():
        assert_rejected(tiny_corpus, tmp_path)
        return
    monkeypatch.setattr(engine, "INITIAL_SCALE", TOO_LARGE)
    experiment = tmp_path / "half.yaml"
    experiment.write_text(f"data: {{path: {tiny_corpus}}}\n")
    more = [
        "metrics.interval=1",
        "optim.steps=5",  # more than half of them overflow
    ]
    run_dir = RunDir(tmp_path / "run")
    assert main(["train", str(experiment), *TINY, *more, "--run-dir", str(run_dir.path)]) == 0
    lines = [line for line in run_dir.read_metrics() if line["kind"] == "train"]
    assert [line["overflowed"] for line in lines[:3]] == [True] * 3
    assert [line["skipped"] for line in lines] == [line["overflowed"] for line in lines]
    assert [line["loss_scale"] for line in lines[:3]] == [TOO_LARGE, TOO_LARGE / 2, TOO_LARGE / 4]
    assert all("memory_norm/layer.0" in line for line in lines), (
        "a segment whose gradients overflow is remembered"
    )


def test_a_run_on_a_cpu_without_fp16_is_rejected_in_one_line(
    tiny_corpus: Path, tmp_path: Path
) -> None:
    assert_rejected(tiny_corpus, tmp_path, cpu="AVX2")
