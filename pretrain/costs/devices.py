"""What computes: devices by their data sheets, and the nodes of a cluster. Torch-free."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import Literal

from foundation.errors import ConfigError
from foundation.settings import Range, check_ranges, setting
from pretrain.config.engine import EngineConfig

GIB = 1 << 30
MOST_RANKS = 1024  # of a node
MOST_NODES = 65_536  # of a cluster: Slurm's own limit
# Fraction of a device's memory; the rest goes to driver, communication buffers and fragmentation.
USABLE = 0.92
CPU_MFU = 0.25  # assumed where nothing was measured, as is the next
GPU_MFU = 0.35
_GPUS = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*:)?[0-9]{1,4}")


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
    # memory 0: that of the machine this runs on
    "cpu": Device(bf16=100e9, fp32=100e9, memory=0.0, origin="a core's order of magnitude"),
}


def device_named(text: str) -> str:
    """The name in DEVICES of a GPU as Slurm or its driver calls it; empty if it is none of them."""
    letters = re.sub("[^A-Z0-9]", "", text.upper())
    found = next((name for name in DEVICES if name.replace("-", "") in letters), "")
    smaller = f"{found}-40GB"
    return smaller if smaller in DEVICES and "40GB" in letters else found


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The ranks that costs are estimated for."""

    nodes: int
    ranks_per_node: int
    name: str  # of DEVICES
    node: NodeConfig | None = None  # of the cluster file, if there is one
    memory: float = 0.0  # bytes of a GPU, where they are not the data sheet's
    flops: float = 0.0  # peak of a GPU, the same

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def on_gpu(self) -> bool:
        return self.name != "cpu"

    @property
    def device(self) -> Device:
        device = DEVICES[self.name]
        memory, peak = self.memory or device.memory, self.flops
        if self.on_gpu and peak:
            return Device(bf16=peak, fp32=peak, memory=memory, origin="as given")
        return replace(device, memory=memory)

    def describe(self) -> str:
        """What is assumed of a GPU, in one line."""
        device = self.device
        return (
            f"{self.nodes} x {self.ranks_per_node} {self.name}: {device.memory / 1e9:,.0f} GB, "
            f"{USABLE:.0%} of it usable, and {device.bf16 / 1e12:,.0f} TFLOP/s in bf16 each "
            f"({device.origin}); --gpu-memory and --gpu-flops change them"
        )

    @property
    def usable_memory(self) -> float:
        """Bytes that a rank can use; on a CPU its part of this machine's."""
        if self.on_gpu:
            return USABLE * self.device.memory
        host_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return USABLE * host_memory / self.ranks_per_node

    def assumed_mfu(self, given: float | None = None) -> float:
        """The part of the peak that a run is assumed to use; ConfigError for no such part."""
        if given is None:
            return GPU_MFU if self.on_gpu else CPU_MFU
        if not 0 < given <= 1:
            raise ConfigError(f"--mfu={given} must be above 0 and at most 1")
        return given


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """What a node of a cluster has: the settings of a cluster file that costs depend on.

    ClusterConfig adds Slurm's.
    """

    gpus_per_node: str = "0"
    """GPUs of a node, a rank each: 8, or h100:8 with Slurm's type; 0: a CPU cluster."""
    gpu: Literal["", "A100", "A100-40GB", "B200", "H100", "H200", "L40S", "MI300X", "RTX4090"] = ""
    """Kind of GPU, to estimate memory and time; empty: what `gpus_per_node` names."""
    gpu_memory: float = setting(0.0, Range(0, 1e15), unit="bytes")
    """Memory of a GPU, such as 40GiB; 0: the data sheet's."""
    gpu_flops: float = setting(0.0, Range(0, 1e18), unit="FLOPs per second")
    """Peak of a GPU in every precision, such as 400T; 0: the data sheet's."""
    ranks_per_node: int = setting(0, Range(0, MOST_RANKS), unit="ranks")
    """Processes on each node; 0: one per GPU."""
    mtbf_hours: float = setting(0.0, Range(0, 1e9), unit="hours")
    """Mean time between failures of one node, for the best checkpoint interval; 0: not known."""
    disk_mib_per_second: float = setting(500.0, Range(1, 1e9), unit="MiB per second")
    """What a node writes to the run directory and reads from it, all nodes at once."""

    def __post_init__(self) -> None:
        check_ranges("", self)  # those of a subclass, too
        if not _GPUS.fullmatch(self.gpus_per_node) or self.num_gpus > MOST_RANKS:
            raise ConfigError(
                f"gpus_per_node: found {self.gpus_per_node!r}, expected a number or a type and a "
                "number; write 8, or h100:8"
            )
        if self.tasks_per_node < 1:
            raise ConfigError(
                f"gpus_per_node={self.gpus_per_node} and ranks_per_node={self.ranks_per_node} "
                "leave nothing to run on; give nodes GPUs or ranks"
            )
        if self.num_gpus and self.tasks_per_node != self.num_gpus:
            raise ConfigError(
                f"ranks_per_node={self.ranks_per_node} but gpus_per_node={self.gpus_per_node}; "
                "use one rank per GPU"
            )
        if self.gpu and not self.num_gpus:
            raise ConfigError(f"gpu={self.gpu} but gpus_per_node=0; set the GPUs of a node")
        if self.gpu and self._named_by_type not in ("", self.gpu):
            raise ConfigError(
                f"gpu={self.gpu} but gpus_per_node={self.gpus_per_node}; give one kind of GPU"
            )

    @property
    def num_gpus(self) -> int:
        """GPUs of each node."""
        return int(self.gpus_per_node.rpartition(":")[2])

    @property
    def gpu_model(self) -> str:
        """The name in DEVICES of each GPU; empty if neither `gpu` nor the type names it."""
        return self.gpu or self._named_by_type

    @property
    def tasks_per_node(self) -> int:
        """Ranks on each node."""
        return self.ranks_per_node or self.num_gpus

    @property
    def _named_by_type(self) -> str:
        """`H100` of h100:8 or nvidia_h100_80gb_hbm3:8."""
        return device_named(self.gpus_per_node.rpartition(":")[0])
