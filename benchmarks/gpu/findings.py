"""What a step gets, and what it finds: a line per finding, written at once, in one file."""

from __future__ import annotations

import importlib
import json
import math
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from foundation.errors import DataError
from foundation.files import append_whole, lines_of
from foundation.typed_values import parse_json

T = TypeVar("T")
END = "end"  # the part that says how a step ended
CPU = "cpu"  # the device of a dry run


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the file of results."""

    step: str
    part: str
    fingerprint: str  # of the code that the step depends on
    device: str
    date: str
    values: dict[str, Any]


def findings_in(path: Path) -> list[Finding]:
    """Return all findings; DataError for a line that is not a finding, such as one cut short."""
    found = []
    for number, line in enumerate(lines_of(path), start=1):
        try:
            found.append(Finding(**parse_json(line)))
        except (ValueError, TypeError):
            raise DataError(
                f"{path}: line {number} is damaged, expected a finding of a step; remove the line "
                "and run the same command again"
            ) from None
    return found


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a step may use. It writes to `out` and appends to `results`, nowhere else."""

    out: Path
    results: Path
    corpus: Path
    step: str
    case: str = ""  # which of several things the step's function measures
    fingerprint: str = ""
    device_name: str = CPU
    seconds: float = math.inf  # after which the step is killed
    nvidia: Path | None = None  # the folder of NVIDIA's Transformer-XL

    def add(self, part: str, **values: Any) -> None:
        """Record a finding; if it has `passed=False`, the step counts as missed."""
        finding = Finding(
            step=self.step,
            part=part,
            fingerprint=self.fingerprint,
            device=self.device_name,
            date=time.strftime("%Y-%m-%d"),
            values=_finite(values),
        )
        line = json.dumps(asdict(finding), default=str) + "\n"
        append_whole(self.results, line.encode(), sync=True)
        print(line, end="", flush=True)

    @property
    def is_dry(self) -> bool:
        return self.device_name == CPU

    @property
    def log(self) -> Path:
        """What the step and its libraries print."""
        return self.out / f"{self.step}.log"

    @property
    def work(self) -> Path:
        """A directory for checkpoints, which is deleted when the step ends."""
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
    """Return when the device has finished its work."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _finite(value: Any) -> Any:
    """Return the value as JSON can hold it: NaN and infinity as text."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
