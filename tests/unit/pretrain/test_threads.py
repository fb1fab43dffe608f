from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from foundation.own_programs import own_command
from pretrain.distributed.threads import WAITING, describe_waiting
from pretrain.recovery.starts import environment_changes, environment_of_rank
from pretrain.run import set_threads_of_rank
from pretrain.rundir.code_version import PACKAGES, code_version


def test_the_openmp_of_a_command_spins_for_a_thousand_rounds_and_no_longer():
    shown = subprocess.run(
        own_command("pretrain", "evaluate", "missing"),
        env={**os.environ, "OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True,
    )  # fmt: skip
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in shown.stderr
    assert "GOMP_SPINCOUNT = '1000'" in shown.stderr


def test_the_environment_of_a_run_tells_how_its_threads_wait_and_calls_no_start_different_for_it(
    monkeypatch,
):
    for name, value in WAITING.items():
        monkeypatch.setenv(name, value)
    found = environment_of_rank(torch.device("cpu"))
    assert found["threads wait"] == "passive, spin 1000"
    assert describe_waiting({}) == "as OpenMP decides"
    assert not environment_changes({**found, "threads wait": "active"}, found)
    assert environment_changes({**found, "threads": "97"}, found)


def test_a_rank_takes_the_threads_of_its_environment_else_its_part_of_the_cores(monkeypatch):
    torch.set_num_threads(3)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    set_threads_of_rank()
    assert torch.get_num_threads() == 3, "torch has read the variable itself"
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    set_threads_of_rank()
    assert torch.get_num_threads() == 2


ROOT = Path(__file__).parents[3]


def version_of(copy: Path) -> str:
    code = "from pretrain.rundir.code_version import code_version; print(code_version())"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=copy, env={"PYTHONPATH": str(copy)}, stdout=subprocess.PIPE, check=True  # noqa: E501
    ).stdout.decode().strip()  # fmt: skip


def test_a_copy_of_the_code_has_its_version_and_an_edit_another(tmp_path):
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    assert re.fullmatch(r"[\w.]+\+[0-9a-f]{12}", code_version())
    assert version_of(tmp_path) == code_version()
    with open(tmp_path / "pretrain" / "schedule.py", "a") as file:
        file.write("# a change\n")
    assert version_of(tmp_path) != code_version()
