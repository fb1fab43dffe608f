"""The part of the peak that cells of a plan will use: measured on runs by size, else assumed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_pipeline.errors import ConfigError
from pretrain.config.resolve import with_precision
from pretrain.costs.devices import Hardware, device_named
from pretrain.costs.flops import computed_flops_of_step, parameters_of
from pretrain.rundir.ledger import last_of
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.training_events import TrainingBegan
from pretrain.scaling.intervals import amount
from pretrain.scaling.which_runs import runs_of
from pretrain.terminal.text import counted

_WITHOUT_GPU = {"none": "cpu"}  # what such a run noted as its GPU
NEAR = 2.0  # a size within this factor of the measured ones has a measured utilization


@dataclass(frozen=True)
class Utilization:
    """MFU by size: of the nearest measured runs, between them a line over ln N; or one number."""

    assumed: float
    measured: tuple[tuple[float, float], ...] = ()  # (N, MFU), by size

    def of(self, parameters: float) -> float:
        """The MFU of a run of that size."""
        if not self.measured:
            return self.assumed
        sizes, values = zip(*self.measured, strict=True)
        return float(np.interp(math.log(parameters), np.log(sizes), values))

    def is_measured(self, parameters: float) -> bool:
        """Whether runs of about that size were measured."""
        if not self.measured:
            return False
        return self.measured[0][0] / NEAR <= parameters <= self.measured[-1][0] * NEAR

    def describe(self, parameters: Sequence[float]) -> str:
        """Which numbers a plan of these sizes rests on, in one line."""
        if not self.measured:
            words = "assumed at every size; small models use less: --measured RUN ... takes it from"
            return f"MFU: {self.assumed:.0%} {words} runs"
        (low, first), (high, last) = self.measured[0], self.measured[-1]
        text = f"MFU: measured on {counted(len(self.measured), 'size')} from {amount(low)} "
        text += f"({first:.1%}) to {amount(high)} ({last:.1%})"
        if beyond := sum(not self.is_measured(each) for each in parameters):
            text += f"; {counted(beyond, 'cell')} over {NEAR:g}x beyond are assumed to use as much"
            text += " as the nearest"
        return text


def measured_utilization(paths: Sequence[Path], hardware: Hardware, assumed: float) -> Utilization:
    """The MFU of runs on this hardware; ConfigError for one on other devices or without speeds."""
    by_size: dict[int, list[float]] = {}
    for path in runs_of(paths):
        size, value = _measured(RunDir.open(path), path, hardware)
        by_size.setdefault(size, []).append(value)
    found = ((float(size), statistics.median(each)) for size, each in sorted(by_size.items()))
    return Utilization(assumed, tuple(found))


def _measured(run_dir: RunDir, path: Path, hardware: Hardware) -> tuple[int, float]:
    """Parameters and MFU, by the definition of `describe`: all FLOPs, of the data sheet's peak."""
    start = last_of(run_dir.ledger.read(), TrainingBegan)
    if start is None:
        raise ConfigError(f"--measured {path}: has not started, so it measured no speed")
    gpu = start.environment.get("GPU", "")
    found = device_named(gpu) or _WITHOUT_GPU.get(gpu, "")
    if gpu and found != hardware.name:
        raise ConfigError(
            f"--measured {path}: was trained on {found or gpu}, and the plan is for "
            f"{hardware.name}; name runs on such devices, or use --mfu"
        )
    speeds = [
        line["tokens_per_second"]
        for line in run_dir.read_metrics()
        if line.get("kind") == "train" and line.get("tokens_per_second")
    ]
    if not speeds:
        raise ConfigError(f"--measured {path}: has no tokens_per_second in its metrics")
    run = with_precision(run_dir.config, best="bf16" if hardware.on_gpu else "fp32")
    seconds = run.tokens_per_step / statistics.median(speeds)
    flops = computed_flops_of_step(run, start.world_size)
    peak = hardware.device.peak(run.engine) * start.world_size
    return parameters_of(run.model).total, flops / seconds / peak
