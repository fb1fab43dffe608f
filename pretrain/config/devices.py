"""Devices that compute, by their data sheets. Torch-free."""

import re
from dataclasses import dataclass

from pretrain.config.engine import EngineConfig


@dataclass(frozen=True)
class Device:
    """Peaks of dense products (FLOPs per second) and bytes of memory, as the vendor gives them."""

    bf16: float  # and fp16
    fp32: float
    memory: float
    origin: str = "data sheet, dense"

    def peak(self, engine: EngineConfig) -> float:
        """Return the FLOPs per second in the engine's precision."""
        return self.bf16 if engine.number_format != "fp32" else self.fp32


DEVICES = {
    "B200": Device(bf16=2250e12, fp32=75e12, memory=180e9),
    "H200": Device(bf16=989e12, fp32=67e12, memory=141e9),  # SXM, as the next two
    "H100": Device(bf16=989e12, fp32=67e12, memory=80e9),
    "A100": Device(bf16=312e12, fp32=19.5e12, memory=80e9),
    "A100-40GB": Device(bf16=312e12, fp32=19.5e12, memory=40e9),
    "L40S": Device(bf16=362e12, fp32=91.6e12, memory=48e9),
    "MI300X": Device(bf16=1307e12, fp32=163e12, memory=192e9),
    "RTX4090": Device(bf16=165e12, fp32=82.6e12, memory=24e9),  # with sums in fp32
    # memory 0: what this machine has
    "cpu": Device(bf16=100e9, fp32=100e9, memory=0.0, origin="a core's order of magnitude"),
}


def device_named(text: str) -> str:
    """Return the name in DEVICES of a GPU as Slurm or its driver calls it; empty if unknown."""
    letters = re.sub("[^A-Z0-9]", "", text.upper())
    device = next((name for name in DEVICES if name.replace("-", "") in letters), "")
    smaller = f"{device}-40GB"
    return smaller if smaller in DEVICES and "40GB" in letters else device
