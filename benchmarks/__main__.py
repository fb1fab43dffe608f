"""`python -m benchmarks model | data | kernels | static | gpu | gpu-bundle | peers | recovery |
scale`."""

from __future__ import annotations

from foundation.cli import Program
from pretrain.cli import end_process

# name -> (module, what it does)
COMMANDS = {
    "model": (
        "benchmarks.model.command",
        "attention, training, evaluation and checkpoints against reference implementations",
    ),
    "data": ("benchmarks.data.command", "reading, planning, fetching and building a corpus"),
    "kernels": (
        "benchmarks.kernels",
        "registers, shared memory and tensor-core work of the fused kernels, without a GPU",
    ),
    "static": (
        "benchmarks.static",
        "what each model costs a GPU, counted without one; --check fails if a number is worse",
    ),
    "gpu": (
        "benchmarks.gpu.command",
        "speed, profile, attention, quality and tiles on an NVIDIA GPU",
    ),
    "gpu-bundle": ("benchmarks.gpu.bundle", "what a GPU machine without a network lacks"),
    "recovery": (
        "benchmarks.recovery",
        "false alarms and detected loss spikes of automatic recovery, on small runs",
    ),
    "scale": (
        "benchmarks.scale.command",
        "how costs grow with the number of ranks, and what failing nodes cost",
    ),
    "peers": (
        "benchmarks.peers",
        "speed and losses against checkouts of the original's code and of NVIDIA's",
    ),
}

main = Program("benchmarks", "Measure ratios of speed and cost in one run.", COMMANDS).main

if __name__ == "__main__":
    end_process(main())
