"""What runs first on a GPU, dry: a step of each kind in its real process, tiny, on the CPU."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.gpu.findings import END, findings_in
from benchmarks.gpu.resume import CELLS
from benchmarks.gpu.steps import STEPS
from foundation.programs import own_command
from pretrain.kernels.triton.tiling import KERNELS

# NVIDIA's code is not here, and others differ from one of their kind in the model alone.
LEFT_OUT = {"nvidia", "speed-relative", "speed-1b-compiled", "speed-1b-atomic", "speed-gpt"}
LEFT_OUT |= {"zero-0", "zero-1", "speed-hybrid"}
STEPS_HERE = [step.name for step in STEPS if step.name not in LEFT_OUT]
# What steps have to have found.
PARTS = {
    **{name: {"step", "classes"} for name in STEPS_HERE if name.startswith(("speed", "zero"))},
    "attention": {"640 programs, head width 16, segment 12, memory 7, 2 heads (1), 2 lanes"},
    "deltanet": {"ours"},
    "evaluation": {"torch.bfloat16", "torch.float32"},
    "quality": {"equal FLOPs", "equal seconds"},
    "tiles": {f"{kernel}, head width 16, segment 16, memory 16, 1 heads (1), 1 lanes"
              for kernel in KERNELS},
    "resume": {*CELLS},
}  # fmt: skip


@pytest.mark.slow
def test_a_step_of_each_kind_runs_and_is_not_run_again(tmp_path: Path, capsys) -> None:
    arguments = ["gpu", "--dry-run", "--out", str(tmp_path), "--steps", ",".join(STEPS_HERE)]
    command = own_command("benchmarks", *arguments)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    found = findings_in(tmp_path / "results.jsonl")
    assert done.returncode == 0, (done.stdout, done.stderr, found)
    ends = [each for each in found if each.part == END]
    assert [each.step for each in ends] == STEPS_HERE
    for end in ends:
        assert (end.values["status"], end.device, end.values["error"]) == ("ok", "cpu", ""), end
        parts = {each.part for each in found if each.step == end.step}
        assert PARTS.get(end.step, set()) <= parts, end
    assert list((tmp_path / "work").iterdir()) == []
    table = json.loads((tmp_path / "tiles.json").read_text())
    assert {row["kernel"] for row in table["tiles"]} == set(KERNELS)

    assert main(arguments) == 0
    assert capsys.readouterr().out.count("| known ") == len(STEPS_HERE)
    assert findings_in(tmp_path / "results.jsonl") == found
