"""`engine.precision: auto` is settled once; the fused kernel follows from the settings."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from torch.utils import deterministic

from pretrain.config.engine import Attention, EngineConfig, attention_in
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.kernels.triton.settings import DTYPES
from pretrain.model.attention_paths import path_for
from pretrain.model.parameters import dtype_of
from pretrain.processes import device
from pretrain.processes.device import (
    set_determinism,
    set_device_variables,
    with_precision_of_run,
)
from pretrain.rundir.run_dir import RunDir
from pretrain.weights.trained_model import precision_on
from tests.helpers.choices import choices_of

GPU = torch.device("cuda", 0)


def run_in(precision: str, **engine) -> RunConfig:
    return RunConfig(engine=EngineConfig(precision=precision, **engine))  # type: ignore[arg-type]


def test_a_new_run_on_a_cpu_gets_fp32_for_auto(world, tmp_path):
    assert with_precision_of_run(run_in("auto"), tmp_path / "run", world) == run_in("fp32")
    assert with_precision_of_run(run_in("bf16"), tmp_path / "run", world) == run_in("bf16")


@pytest.mark.parametrize(
    ("precision", "on_gpu"),
    [("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("auto", "fp32")],
)
def test_a_trained_model_computes_as_its_run_on_a_gpu_and_in_float32_on_a_cpu(precision, on_gpu):
    run = run_in(precision, attention_kernel="plain")
    assert precision_on(GPU, run) == on_gpu
    assert precision_on(torch.device("cpu"), run) == "fp32"


def test_auto_keeps_the_precision_that_a_run_has_recorded_on_another_device(
    world, tmp_path, caplog
):
    RunDir.create(tmp_path / "run", run_in("bf16"))  # as a GPU would have
    with caplog.at_level(logging.INFO):
        kept = with_precision_of_run(run_in("auto"), tmp_path / "run", world)
    assert kept == run_in("bf16")
    assert "bf16, as the run has it, although fp32 suits this device" in caplog.text
    changed = with_precision_of_run(run_in("fp32"), tmp_path / "run", world)
    assert changed == run_in("fp32")  # a change that the user asks for is logged by the directory


@pytest.mark.parametrize(
    ("kernel", "device", "is_bitwise"),
    [
        ("auto", GPU, True),
        ("plain", GPU, True),
        ("atomic", GPU, False),
        ("auto", torch.device("cpu"), False),
    ],
)
def test_a_gpu_repeats_its_bits_unless_atomic_sums_are_asked_for(
    monkeypatch, caplog, kernel, device, is_bitwise
):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    fills = deterministic.fill_uninitialized_memory
    try:
        set_determinism(run_in("bf16", attention_kernel=kernel), device)
        assert torch.are_deterministic_algorithms_enabled() == is_bitwise
        assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == is_bitwise
        assert ("not bitwise" in caplog.text) == (kernel == "atomic")
    finally:
        torch.use_deterministic_algorithms(False)
        deterministic.fill_uninitialized_memory = fills
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.parametrize(("kernel", "is_bitwise"), [("auto", True), ("atomic", False)])
def test_the_fused_kernel_sums_in_a_fixed_order_unless_told_otherwise(
    monkeypatch, kernel, is_bitwise
):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # else no kernel fits this machine
    path = path_for(kernel, ModelConfig(), torch.device("cpu"), torch.float32)
    assert path.keywords == {"is_bitwise": is_bitwise}  # type: ignore[attr-defined]


@pytest.mark.parametrize("precision", dict(choices_of(EngineConfig))["precision"])
def test_settings_and_tensors_agree_on_which_precisions_the_fused_kernel_takes(precision):
    run = run_in(precision)
    takes = dtype_of(run.engine.number_format) in DTYPES
    assert (attention_in(run.engine, run.model, on_gpu=True)[0] is Attention.FUSED) == takes


TASK = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
SETTINGS = "expandable_segments:True,pinned_max_round_threshold_mb:1"
GROWING = {"PYTORCH_CUDA_ALLOC_CONF": SETTINGS}


@pytest.mark.parametrize(
    ("given", "caches"),
    [
        ({}, False),
        (TASK, True),
        ({**TASK, "TRITON_CACHE_DIR": "/mine"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, False),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, False),
    ],
)
def test_a_rank_gets_what_nobody_has_set(
    tmp_path: Path, given: dict[str, str], caches: bool
) -> None:
    environment = dict(given)
    set_device_variables(environment, tmp_path)
    own = {} if any("ALLOC" in name for name in given) else dict(GROWING)
    cache = tmp_path / f"triton-{os.getuid()}"
    own |= {"TRITON_CACHE_DIR": str(cache)} if caches else {}
    assert environment == {**given, **own}
    assert cache.exists() == caches


def test_torch_takes_the_settings_of_its_allocator() -> None:
    torch._C._accelerator_setAllocatorSettings(SETTINGS)


def test_an_older_torch_gets_no_setting_that_it_does_not_know(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(device, "version", lambda name: "2.11.0")
    environment: dict[str, str] = {}
    set_device_variables(environment, tmp_path)
    assert environment == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("kind", ["link", "file", "open to others"])
def test_a_cache_that_another_user_may_have_made_is_not_used(tmp_path: Path, kind: str) -> None:
    cache = tmp_path / f"triton-{os.getuid()}"
    (tmp_path / "elsewhere").mkdir()
    match kind:
        case "link":
            cache.symlink_to(tmp_path / "elsewhere")
        case "file":
            cache.touch()
        case _:
            cache.mkdir()
            cache.chmod(0o777)
    environment = dict(TASK)
    set_device_variables(environment, tmp_path)
    assert "TRITON_CACHE_DIR" not in environment
