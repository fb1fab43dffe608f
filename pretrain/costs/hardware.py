"""The ranks that costs are estimated for: how many, on which devices. Torch-free."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from foundation.errors import ConfigError
from pretrain.config.cluster import MOST_RANKS, ClusterConfig, fixed_nodes, load_cluster
from pretrain.config.devices import DEVICES, Device

GIB = 1 << 30
# Fraction of a device's memory; the rest goes to driver, communication buffers and fragmentation.
USABLE = 0.92
CPU_MFU = 0.25  # assumed if not measured, like GPU_MFU
GPU_MFU = 0.35


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The ranks that costs are estimated for."""

    nodes: int
    ranks_per_node: int
    name: str  # of the device in DEVICES
    node: ClusterConfig | None = None  # the cluster file, if one is given
    memory: float = 0.0  # bytes of a GPU; 0: as in the data sheet
    flops: float = 0.0  # peak FLOPs per second of a GPU; 0: as in the data sheet

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
        """Return what is assumed of a GPU, in one line."""
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
        """Return the part of the peak that a run is assumed to use; ConfigError unless valid."""
        if given is None:
            return GPU_MFU if self.on_gpu else CPU_MFU
        if not 0 < given <= 1:
            raise ConfigError(f"--mfu={given} must be above 0 and at most 1")
        return given


def chosen_hardware(
    *,
    cluster: Path | None,
    nodes: str,
    ranks_per_node: int | None,
    gpu: str | None,
    memory: float,
    flops: float,
) -> Hardware:
    """Return the hardware; other arguments override the `cluster` file, if one is given."""
    num_nodes, node = fixed_nodes(nodes).least, None
    if ranks_per_node is not None and not 1 <= ranks_per_node <= MOST_RANKS:
        raise ConfigError(f"--gpus-per-node={ranks_per_node} must be from 1 to {MOST_RANKS:,}")
    if cluster is not None:
        node = load_cluster(cluster)
        if node.num_gpus and not (gpu or node.gpu_model):
            raise ConfigError(
                f"{cluster}: found no gpu, expected one of "
                f"{', '.join(name for name in DEVICES if name != 'cpu')}; set it, or use --gpu"
            )
        ranks_per_node, gpu = ranks_per_node or node.tasks_per_node, gpu or node.gpu_model
    if (memory or flops) and not gpu:
        raise ConfigError("--gpu-memory and --gpu-flops are of a GPU; add --gpu, or --cluster FILE")
    return Hardware(
        nodes=num_nodes,
        ranks_per_node=ranks_per_node or 1,
        name=gpu or "cpu",
        node=node,
        memory=memory or (node.gpu_memory if node else 0.0),
        flops=flops or (node.gpu_flops if node else 0.0),
    )
