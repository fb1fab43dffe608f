"""fp16 under every ZeRO stage: its losses, its overflows, and resuming with the loss scale.

On a CPU without fp16 a run is rejected, and every test here then asserts that.
"""

import math
import os
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pretrain.cli import main
from pretrain.engines import engine
from pretrain.engines.engine import cpu_has_fp16
from pretrain.processes.local_ranks import train_command
from pretrain.rundir.run_dir import RunDir
from tests.helpers.engine_cells import (
    STAGES,
    STEPS,
    Results,
    assert_resumed_bitwise,
    cell,
    engine_settings,
    largest_difference,
    plain_torch,
    saved,
    train_cells,
    whole_and_resumed,
)
from tests.integration.test_checkpoint_failures import SETTINGS

TOLERANCE = 1e-3  # of losses around 5, to plain torch in fp16 and in fp32
FITTING = 2.0**12
TOO_LARGE = 2.0**24  # overflows for some steps, then comes to and fro: doubled after 4 updates
HALF, LONG = 8, 14
INFINITE, NAN = STEPS - 2, STEPS - 1  # steps in which one rank's gradients, or loss, are such
FAULTS = [{"step": INFINITE, "kind": "inf"}, {"step": NAN, "kind": "nan"}]
TINY = ["engine.precision=fp16", *(each for each in SETTINGS if not each.startswith("optim.steps"))]


def half(stage: int, scale: float, window: int = 1000, **more: Any) -> dict[str, Any]:
    return engine_settings(stage, "fp16", loss_scale=(scale, window), **more)


def assert_rejected(corpus: Path, directory: Path, cpu: str = "DEFAULT") -> None:
    """Start a run without fp16 and check that it is rejected."""
    experiment = directory / "half.yaml"
    experiment.write_text(f"data: {{path: {corpus}}}\n")
    command = train_command(experiment, directory / "run", *TINY)
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": cpu}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for precision in ("fp16", "bf16"):
        assert f"engine.precision={precision}" in done.stderr
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
    faulty: dict[str, Any] = {"faults": FAULTS, "skips": [NAN]}
    cells = [
        cell("offloaded", half(1, FITTING, offload_optimizer=True), **faulty),
        cell("torch-fp16", plain_torch("fp16", loss_scale=(FITTING, 1000)), ranks=1, **faulty),
        cell("torch-fp32", plain_torch("fp32"), ranks=1, until=INFINITE - 1),
    ]
    for stage in STAGES:
        cells.append(cell(f"zero{stage}", half(stage, FITTING), **faulty))
        large = half(stage, TOO_LARGE, window=4)
        cells += whole_and_resumed(f"zero{stage}-large", large, half=HALF, until=LONG)
    resumed = {"resume": "zero3-large", "resume_at": HALF, "save_at": [HALF], "until": HALF + 1}
    cells.append(cell("on-one", half(0, FITTING), ranks=1, **resumed))
    return train_cells(tiny_corpus, output, cells)


@pytest.mark.slow
def test_every_stage_agrees_with_plain_torch(results: Results) -> None:
    """Also after steps that fail: with an offloaded optimizer, too, nothing of them remains."""
    names = ("offloaded", *(f"zero{stage}" for stage in STAGES)) if results else ()
    for name in names:
        found, plain, precise = (results[each] for each in (name, "torch-fp16", "torch-fp32"))
        assert len(found["losses"]) == STEPS
        assert largest_difference(found["losses"], plain["losses"]) < TOLERANCE
        assert largest_difference(found["norms"], plain["norms"]) < 10 * TOLERANCE
        assert largest_difference(precise["losses"], found["losses"]) < TOLERANCE
        assert largest_difference(precise["norms"], found["norms"]) < 10 * TOLERANCE


@pytest.mark.slow
def test_gradients_infinite_on_a_rank_halve_the_scale_and_a_nan_loss_does_not(results: Results):
    """The worker compares every bit of both ranks before and after each skipped step."""
    for stage in STAGES if results else ():
        found = results[f"zero{stage}"]
        for kind, steps in (("losses", [NAN]), ("norms", [INFINITE, NAN])):
            values = found[kind].items()
            assert [step for step, value in values if not math.isfinite(value)] == steps
        scales = [FITTING] * INFINITE + [FITTING / 2] * (STEPS - INFINITE)
        assert list(found["scales"].values()) == scales


@pytest.mark.slow
def test_too_large_a_scale_halves_until_it_fits_and_doubles_again(results: Results) -> None:
    for stage in STAGES if results else ():
        found = results[f"zero{stage}-large"]
        overflowed = [not math.isfinite(norm) for norm in found["norms"].values()]
        assert overflowed[:4] == [True] * 4
        assert not all(overflowed[:HALF])
        ratios = [after / before for before, after in pairwise(found["scales"].values())]
        assert [ratio == 0.5 for ratio in ratios] == overflowed[:-1]
        assert 2.0 in ratios


@pytest.mark.slow
def test_a_resumed_run_repeats_losses_state_and_scale_bitwise(results: Results, output: Path):
    for stage in STAGES if results else ():
        assert_resumed_bitwise(results, output, f"zero{stage}-large")


@pytest.mark.slow
def test_another_world_size_and_stage_continue_with_the_scale(results: Results, output: Path):
    if not results:
        return
    names = ("zero3-large", "on-one")
    before, after = (saved(output, name, HALF).index["loss_scale"] for name in names)
    assert before == after
    assert before["scale"] not in (FITTING, TOO_LARGE)
    assert results["on-one"]["scales"][HALF + 1] == before["scale"]


@pytest.mark.slow
def test_the_search_for_a_loss_scale_is_shown_and_ends_no_run(tiny_corpus, tmp_path, monkeypatch):
    if not cpu_has_fp16():
        assert_rejected(tiny_corpus, tmp_path)
        return
    monkeypatch.setattr(engine, "INITIAL_SCALE", TOO_LARGE)
    experiment = tmp_path / "half.yaml"
    experiment.write_text(f"data: {{path: {tiny_corpus}}}\n")
    more = ["metrics.interval=1", "optim.steps=5"]  # more than half of them overflow
    run_dir = RunDir(tmp_path / "run")
    assert main(["train", str(experiment), *TINY, *more, "--run-dir", str(run_dir.path)]) == 0
    lines = [line for line in run_dir.read_metrics() if line["kind"] == "train"]
    assert [line["overflowed"] for line in lines[:3]] == [True] * 3
    assert [line["skipped"] for line in lines] == [line["overflowed"] for line in lines]
    assert [line["loss_scale"] for line in lines[:3]] == [TOO_LARGE, TOO_LARGE / 2, TOO_LARGE / 4]
    # A segment whose gradients overflow is remembered.
    assert all("memory_norm/layer.0" in line for line in lines)


def test_a_run_on_a_cpu_without_fp16_is_rejected_in_one_line(tiny_corpus: Path, tmp_path: Path):
    assert_rejected(tiny_corpus, tmp_path, cpu="AVX2")
