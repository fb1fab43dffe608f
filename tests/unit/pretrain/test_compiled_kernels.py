"""The fused kernels compiled for sm_80 and sm_90: tiles fit shared memory and spill little."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10}  # bytes a program may have
LARGEST_SPILL = 1024  # bytes per thread and kernel, stores and loads together
KERNELS = ("forward", "query_gradient", "key_gradient", "position_gradient")
PLAIN = [
    f"{kernel}:{width}:{target}"
    for kernel in KERNELS
    for width in (64, 128)
    for target in SHARED_MEMORY
]
OPTIONS = [
    f"{kernel}:64:90:{option}"
    for kernel in KERNELS
    for option in ("documents,dropout", "distance_bias,no_position", "grouped")
]
WANTED = [
    *PLAIN,
    *OPTIONS,
    "query_gradient:64:90:adds_positions",
    "query_gradient:128:90:adds_positions",
]


pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def resources() -> dict[str, dict[str, int]]:
    """Registers, spills and shared memory of every kernel, in a process without the interpreter."""
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.helpers.compiled_kernels", *WANTED],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", WANTED)
def test_tiles_fit_and_spills_are_bounded(resources, wanted):
    target = int(wanted.split(":")[2])
    assert resources[wanted]["shared"] <= SHARED_MEMORY[target]
    assert resources[wanted]["spilled"] <= LARGEST_SPILL
