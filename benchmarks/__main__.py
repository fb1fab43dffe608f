"""`python -m benchmarks model | data`: the speeds and costs that the project promises, measured on this machine."""

from __future__ import annotations

from data_pipeline.program import Program
from pretrain.cli import end_process

# name -> (module, what it does)
COMMANDS = {
    "model": (
        "benchmarks.command",
        "training, evaluation and checkpoints against reference implementations",
    ),
    "data": ("benchmarks.data_command", "reading, building and fetching a corpus"),
}

main = Program("benchmarks", "Measure ratios of speed and cost in one run.", COMMANDS).main

if __name__ == "__main__":
    end_process(main())
