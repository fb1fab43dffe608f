"""The prepared half hour, dry: every step in its real process, with tiny sizes, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.gpu.steps import STEPS
from pretrain.kernels.triton.tiling import KERNELS

# What each step has to have found.
PARTS = {
    "environment": {"packages", "tools", "machine", "rates", "cores", "recorder"},
    "kernels": {"dropout, torch.float32", "everything, torch.float32"},
    "determinism": {"two runs, auto", "two runs, sdpa"},
    "stages": {"ZeRO 0, fp16", "ZeRO 2, offloaded memories", "ZeRO 3, all of it"},
    "resume": {"ZeRO 1"},
    "memory": {"default"},
    "tiles": {"table"},
    "attention": {"head width 16, segment 12, memory 7, 2 heads, 2 lanes"},
    "mfu": {"default"},
    "profile": {str(number) for number in range(1, 11)},
    "training": {"kill", "losses", "speed", "saves"},
}


@pytest.mark.slow
def test_every_step_of_the_half_hour_runs_and_is_not_run_again(tmp_path: Path, capsys) -> None:
    arguments = ["gpu", "--dry-run", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        capture_output=True,
        text=True,
        env=environment,
    )
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert done.returncode == 0, (done.stdout, done.stderr, lines)
    assert [line["step"] for line in lines] == [step.name for step in STEPS]
    for line in lines:
        assert (line["status"], line["device"], line["error"]) == ("ok", "cpu", ""), line
        assert PARTS[line["step"]] <= line["found"].keys(), line
        assert (tmp_path / f"{line['step']}.log").exists()
    assert list((tmp_path / "work").iterdir()) == []
    table = json.loads((tmp_path / "tiles.json").read_text())
    assert {row["kernel"] for row in table["tiles"]} == set(KERNELS)

    assert main(arguments) == 0
    assert capsys.readouterr().out.count("has a result") == len(STEPS)
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == len(STEPS)
