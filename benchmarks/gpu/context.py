"""What every step gets: where to write, on which device, and in which sizes."""

from __future__ import annotations

import importlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.gpu.report import Report

T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """A step's way to the world. Nothing it does is outside of `out` and the checkout."""

    out: Path
    corpus: Path
    is_dry: bool
    step: str

    @property
    def report(self) -> Report:
        return Report(self.parts)

    @property
    def parts(self) -> Path:
        """The findings of the step in progress."""
        return self.out / f"{self.step}.parts.jsonl"

    @property
    def log(self) -> Path:
        """What the step and its libraries print."""
        return self.out / f"{self.step}.log"

    @property
    def work(self) -> Path:
        """A directory for checkpoints and runs, which goes when the step has ended."""
        return self.out / "work" / self.step

    @property
    def device(self) -> Any:
        """The torch.device that is measured."""
        import torch

        return torch.device("cpu" if self.is_dry else "cuda")

    @property
    def dtype(self) -> Any:
        """The torch.dtype that is measured: bf16 is slow on a CPU."""
        import torch

        return torch.float32 if self.is_dry else torch.bfloat16

    def size(self, full: T, dry: T) -> T:
        """Return `full`, or `dry` in a dry run."""
        return dry if self.is_dry else full


def run_step(target: str, context: Context) -> int:
    """Run "module:function" and return 0; the program of a step's process."""
    module, _, function = target.partition(":")
    shutil.rmtree(context.work, ignore_errors=True)
    context.work.mkdir(parents=True)
    try:
        getattr(importlib.import_module(module), function)(context)
    finally:
        shutil.rmtree(context.work, ignore_errors=True)
    return 0


def wait_for(device: Any) -> None:
    """Return when the device has done what it was given."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
