from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from pretrain.processes import device_variables
from pretrain.processes.device_variables import set_device_variables

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
    monkeypatch.setattr(device_variables, "version", lambda name: "2.11.0")
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
