"""The number formats a run may compute in, and which of them a device has."""

from __future__ import annotations

import torch

from data_pipeline.errors import ConfigError
from pretrain.config.run import Precision

DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def check_precision(precision: Precision, device: torch.device) -> None:
    """ConfigError if the device cannot compute in this precision. Every GPU and CPU has the others than fp16."""
    if precision == "fp16" and device.type == "cpu" and not cpu_has_fp16():
        raise ConfigError(
            f"engine.precision=fp16: found a CPU without half-precision arithmetic "
            f"({torch.backends.cpu.get_cpu_capability()}), expected one with AVX512-FP16 or a GPU; "
            "use engine.precision=bf16"
        )


def cpu_has_fp16() -> bool:
    """What torch's CPU library says, which DeepSpeed goes by as well."""
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
