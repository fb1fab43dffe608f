"""Kills at random moments, in a separate process: it forks, so it must not have threads yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_run_disturbed_and_killed_at_random_moments_ends_bitwise_as_the_uninterrupted_one(
    tiny_corpus: Path, tmp_path: Path
):
    command = [
        sys.executable,
        "-m",
        "tests.helpers.chaos",
        "--kills=4",
        "--seed=4",
        f"--corpus={tiny_corpus}",
    ]
    done = subprocess.run([*command, f"--work-dir={tmp_path}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 kills" in done.stdout
    for trouble in ("disk full", "unwritable", "suspended"):
        assert f": {trouble} for" in done.stdout
    assert "identical: 120 losses, evaluations, final state" in done.stdout
