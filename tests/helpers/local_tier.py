"""Two-rank runs with local checkpoints, killed and resumed; in a process of its own, which forks.

    python -m tests.helpers.local_tier CORPUS OUTPUT

OUTPUT/NAME is a run, OUTPUT/NAME-disk what its nodes' disks have, OUTPUT/NAME-logs what it said.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from pathlib import Path

from pretrain.cli import main
from pretrain.recovery.faults import VARIABLE
from tests.helpers.forked_ranks import fork_ranks, import_everything

STEPS, KILLED_AT = 12, 11
SETTINGS = (
    "model.num_layers=2", "model.d_model=32", "model.num_heads=2", "model.memory_length=8",
    "model.dropout=0.1", "data.lanes=4", "data.segment_length=8", f"optim.steps={STEPS}",
    "engine.micro_batch_lanes=1", "engine.zero_stage=2",
    "checkpoint.interval=6", "checkpoint.local_interval=2", "checkpoint.asynchronous=false",
    "evaluation.interval=0", "evaluation.max_tokens=200", "metrics.interval=5",
    "metrics.tensorboard=false",
)  # fmt: skip


class Runs:
    def __init__(self, corpus: Path, output: Path) -> None:
        self.output = output
        self.experiment = output / "experiment.yaml"
        self.experiment.write_text(f"data: {{path: {corpus}}}\n")

    def train(self, name: str, *more: str, ranks: int = 2, killed_at: int = 0) -> None:
        """Start the run NAME, or resume it, and wait until its ranks end."""
        logs = self.output / f"{name}-logs"
        logs.mkdir(exist_ok=True)
        disk = f"checkpoint.local={self.output / f'{name}-disk'}"
        settings = [*SETTINGS, disk, *more, f"--run-dir={self.output / name}"]
        os.environ[VARIABLE] = f"sigkill@{killed_at}" if killed_at else ""

        def program() -> int:
            logging.disable(logging.NOTSET)
            return main(["train", str(self.experiment), *settings])

        for pid in fork_ranks(ranks, program, logs):
            _, status = os.waitpid(pid, 0)
            if os.waitstatus_to_exitcode(status) != (-9 if killed_at else 0):
                raise SystemExit(f"{name}: a rank ended with {status}; see {logs}")

    def copy(self, old: str, new: str) -> Path:
        """Give the run NEW all that OLD has; its nodes' disk."""
        for suffix in ("", "-disk"):
            shutil.copytree(self.output / f"{old}{suffix}", self.output / f"{new}{suffix}")
        (folder,) = (self.output / f"{new}-disk").iterdir()
        return folder


def run_all(corpus: Path, output: Path) -> None:
    runs = Runs(corpus, output)
    runs.train("uninterrupted")
    runs.train("killed", killed_at=KILLED_AT)

    runs.copy("killed", "resumed")
    runs.train("resumed")

    damaged = runs.copy("killed", "damaged") / "rank-00001/step-00000010/rank-00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    runs.train("damaged")

    # One node is another one; then the old one is back, with steps that the run has made again.
    folder = runs.copy("killed", "moved")
    shutil.rmtree(folder / "rank-00001")
    runs.train("moved", killed_at=9)
    shutil.copytree(runs.output / "moved", runs.output / "moved-once")
    old = runs.copy("killed", "old")
    for rank in ("rank-00000", "rank-00001"):
        shutil.copytree(old / rank / "step-00000010", folder / rank / "step-00000010")
    runs.train("moved")

    runs.copy("killed", "one-rank")
    runs.train("one-rank", ranks=1)
    runs.copy("killed", "stage")
    runs.train("stage", "engine.zero_stage=1")


if __name__ == "__main__":
    import_everything()
    run_all(Path(sys.argv[1]), Path(sys.argv[2]))
