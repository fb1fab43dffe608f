"""What a rank can run on, from the makers' data sheets. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config.run import Precision

GIB = 1 << 30
USABLE = 0.92  # of a device's memory; the rest goes to the driver, communication buffers and fragmentation
CPU_MFU = 0.25
GPU_MFU = 0.35


@dataclass(frozen=True)
class Device:
    """Dense matrix-product peaks of one device, in FLOPs per second, and its memory in bytes."""

    bf16: float  # and fp16
    fp32: float  # without TF32, which PyTorch leaves off and nothing here turns on
    memory: float
    origin: str = "data sheet, dense"

    def peak(self, precision: Precision) -> float:
        """FLOPs per second in this precision."""
        return self.fp32 if precision == "fp32" else self.bf16

    def peak_in_words(self, precision: Precision) -> str:
        """Where the peak comes from."""
        return f"{precision}{', TF32 off' if self.bf16 > self.fp32 and precision == 'fp32' else ''}; {self.origin}"


DEVICES = {
    "H200": Device(bf16=989e12, fp32=67e12, memory=141e9),  # SXM, as the next two
    "H100": Device(bf16=989e12, fp32=67e12, memory=80e9),
    "A100": Device(bf16=312e12, fp32=19.5e12, memory=80e9),
    "cpu": Device(
        bf16=100e9, fp32=100e9, memory=0.0, origin="a core's order of magnitude"
    ),  # memory: this machine's
}
