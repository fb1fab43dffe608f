"""Runs whose ranks fail, are stopped or killed, and resume.

OUTPUT/NAME is a run, OUTPUT/NAME-disk what its nodes' disks have, OUTPUT/NAME-logs what it said.
"""

import contextlib
import os
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.checkpointer import Checkpointer
from pretrain.cli import main
from pretrain.engines.torch_engine import TorchEngine
from pretrain.recovery.faults import VARIABLE
from tests.helpers.checkpoints import flip_a_bit
from tests.helpers.forked_ranks import ForkedRanks
from tests.helpers.memory_limit import memory_limit

STEPS, KILLED_AT = 12, 11
SETTINGS = (
    "model.num_layers=2", "model.d_model=32", "model.num_heads=2", "model.memory_length=8",
    "model.dropout=0.1", "data.lanes=4", "data.segment_length=8", f"optim.steps={STEPS}",
    "engine.micro_batch_lanes=1", "engine.zero_stage=2",
    "checkpoint.interval=6", "checkpoint.local_interval=2", "checkpoint.asynchronous=false",
    "evaluation.interval=0", "evaluation.max_tokens=200", "metrics.interval=5",
    "metrics.tensorboard=false",
)  # fmt: skip
PLAIN = ("engine.kind=torch", "engine.zero_stage=0", "engine.micro_batch_lanes=0")
FAILS_AT = 40
ENDLESS = (
    *PLAIN, f"checkpoint.interval={FAILS_AT}", "checkpoint.storage_patience_seconds=0",
    "optim.steps=100000",
)  # fmt: skip
# An evaluation every other step, and a save at steps 4 and 8.
EVALUATED = (
    *PLAIN, "optim.steps=8", "checkpoint.interval=4", "checkpoint.keep_last=1",
    "evaluation.interval=2", "evaluation.lanes=2", "metrics.interval=3",
)  # fmt: skip


def too_much(*_: Any) -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def in_backward(engine: TorchEngine, *_: Any) -> None:
    next(engine.module.parameters()).register_hook(too_much)


def run_out_at(place: str) -> None:
    """In the first call; of saves because later threads may get the stacks of ended ones."""
    match place:
        case "save":
            where, name, act = Checkpointer, "save", None
        case "backward":
            where, name, act = TorchEngine, "forward_backward", in_backward
        case _:
            where, name, act = TorchEngine, place, too_much
    real = getattr(where, name)

    def calling(*arguments: Any, **options: Any) -> Any:
        setattr(where, name, real)
        with contextlib.nullcontext() if act else memory_limit(1 << 20):
            if act:
                act(*arguments)
            return real(*arguments, **options)

    setattr(where, name, calling)


def out_of_memory(rank: int) -> None:
    for place in ("save", "backward", "step", "evaluate"):
        run_out_at(place)


def disk_of_rank_1_is_full(rank: int) -> None:
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 10, resource.RLIM_INFINITY))


def train_rank(
    train: Sequence[str], run_dirs: Sequence[Path], first: Callable[[int], None] | None
) -> int:
    """Do `first`, then train in the directory of this rank, which is the last one from there on."""
    rank = int(os.environ["RANK"])
    if first is not None:
        first(rank)
    return main([*train, f"--run-dir={run_dirs[min(rank, len(run_dirs) - 1)]}"])


class Runs:
    def __init__(self, corpus: Path, output: Path) -> None:
        self.output = output
        self.experiment = output / "experiment.yaml"
        self.experiment.write_text(f"data: {{path: {corpus}}}\n")

    def train(
        self,
        name: str,
        *more: str,
        ends: Sequence[int] = (0, 0),
        fault: str = "",
        first: Callable[[int], None] | None = None,
        others: Sequence[Path] = (),
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the run NAME, or resume it, and wait until its ranks end with these statuses.

        `first` is done by each rank at its start; `others` are the directory as later ranks see it.
        """
        logs = self.output / f"{name}-logs"
        logs.mkdir(exist_ok=True)
        train = ("train", str(self.experiment), *SETTINGS, *more)
        program = partial(train_rank, train, (self.output / name, *others), first)
        ranks = ForkedRanks(len(ends), program, logs, **{VARIABLE: fault})
        meanwhile()
        assert ranks.wait() == list(ends), [log.read_text() for log in logs.iterdir()]

    def on_disk(self, name: str, killed_at: int = 0) -> None:
        """The same with local checkpoints; all ranks are killed at a step."""
        disk = f"checkpoint.local={self.output / f'{name}-disk'}"
        fault, end = (f"sigkill@{killed_at}", -9) if killed_at else ("", 0)
        self.train(name, disk, ends=(end, end), fault=fault)

    def copy(self, old: str, new: str) -> Path:
        """Give the run NEW all that OLD has; its nodes' disk."""
        for suffix in ("", "-disk"):
            shutil.copytree(self.output / f"{old}{suffix}", self.output / f"{new}{suffix}")
        (folder,) = (self.output / f"{new}-disk").iterdir()
        return folder


def with_local_checkpoints(runs: Runs) -> None:
    runs.on_disk("uninterrupted")
    runs.on_disk("killed", killed_at=KILLED_AT)

    runs.copy("killed", "resumed")
    runs.on_disk("resumed")

    damaged = runs.copy("killed", "damaged") / "rank-00001/step-00000010/rank-00000.safetensors"
    flip_a_bit(damaged)
    runs.on_disk("damaged")

    # One node is another one; then the old one is back, with steps that the run has made again.
    folder = runs.copy("killed", "moved")
    shutil.rmtree(folder / "rank-00001")
    runs.on_disk("moved", killed_at=9)
    shutil.copytree(runs.output / "moved", runs.output / "moved-once")
    old = runs.copy("killed", "old")
    for rank in ("rank-00000", "rank-00001"):
        shutil.copytree(old / rank / "step-00000010", folder / rank / "step-00000010")
    runs.on_disk("moved")


def that_fail(runs: Runs) -> None:
    runs.train("cannot-write", *ENDLESS, ends=(74, 74), first=disk_of_rank_1_is_full)

    # As under a lost mount: rank 1's path leads to an empty directory from one moment on.
    run_dir, view, later = (runs.output / name for name in ("lost", "lost-view", "lost-later"))
    for directory in (run_dir, runs.output / "lost-empty"):
        directory.mkdir()
    view.symlink_to(run_dir)
    later.symlink_to(runs.output / "lost-empty")

    def switch() -> None:
        metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 300
        while not (metrics.exists() and metrics.stat().st_size):
            assert time.monotonic() < deadline, "lost: nothing was trained"
            time.sleep(0.01)
        later.rename(view)

    runs.train("lost", *ENDLESS, ends=(74, 74), others=[view], meanwhile=switch)
    more = ("data.lanes=8", "optim.steps=4", "checkpoint.interval=2", "evaluation.interval=2")
    more = (*PLAIN, *more, "checkpoint.asynchronous=true")
    runs.train("no-memory", *more, ends=(0,), first=out_of_memory)


def that_end_in_an_evaluation(runs: Runs) -> None:
    runs.train("evaluated", *EVALUATED, ends=(0,))
    runs.train("killed-evaluating", *EVALUATED, ends=(-9,), fault="sigkill-in-evaluation@8")
    # A signal to the last rank.
    runs.train("stopped", *EVALUATED, ends=(75, 75), fault="sigterm-in-evaluation@4")
    runs.train("stopped-6", *EVALUATED, ends=(75,), fault="sigterm-in-evaluation@6")


def make_runs(corpus: Path, output: Path) -> None:
    """Make all of them."""
    runs = Runs(corpus, output)
    with_local_checkpoints(runs)
    that_fail(runs)
    that_end_in_an_evaluation(runs)
