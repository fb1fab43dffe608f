"""The peak that MFU refers to: measured once per run, devices and precision, RUN/matmul_peaks.json.

Measured again at each start it moves by a factor of three where others use the machine, and MFU
with it.
"""

from __future__ import annotations

import logging
import os

import torch

from data_pipeline.errors import os_error_text
from data_pipeline.files import read_json, write_json
from pretrain.config.choices import Precision
from pretrain.costs.throughput import measured_matmul_peak
from pretrain.distributed.world import World, broadcast_value, sum_over_ranks
from pretrain.engines.engine import dtype_of
from pretrain.rundir.run_dir import RunDir

logger = logging.getLogger(__name__)


def peak_of_run(run_dir: RunDir, world: World, precision: Precision) -> float:
    """FLOPs per second of a large matrix product, over all ranks. A collective."""
    # "highest" is PyTorch's word for fp32 without TF32.
    fp32 = torch.get_float32_matmul_precision() if dtype_of(precision) is torch.float32 else ""
    how = f"{precision}{', TF32' if fp32 not in ('', 'highest') else ''}"
    devices = f"{world.world_size} x {_device_name(world.device)}, {how}"
    known = broadcast_value(_known_peaks(run_dir) if world.is_main else {}, dict[str, float])
    if devices in known:
        return known[devices]
    own = measured_matmul_peak(world.device, dtype_of(precision))
    peak = float(sum_over_ranks(torch.tensor([own], dtype=torch.float64, device=world.device)))
    if world.is_main:
        try:
            write_json(run_dir.matmul_peaks, {**known, devices: peak})
        except OSError as error:  # the next start measures again
            logger.warning("measured peak not written: %s", os_error_text(error))
    return peak


def _known_peaks(run_dir: RunDir) -> dict[str, float]:
    try:
        return {
            str(devices): float(peak) for devices, peak in read_json(run_dir.matmul_peaks).items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # none, or damaged: it is measured again


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} of {os.cpu_count()} CPU threads"
