"""What the ranks of a preflight write, and into which files.

Torch-free, because the launcher reads it.
"""

from dataclasses import dataclass

END = "end"


@dataclass(frozen=True, kw_only=True)
class RankMeasurement:
    """What a rank measured alone.

    Rates are per second; only a node's first rank measures the disk. `missing` is what the fused
    kernels need on a GPU and did not find. `problem` says why the rank cannot train at all.
    """

    rank: int
    node: str
    device: str
    matmul_flops: float
    disk_bytes: float | None
    missing: str = ""
    problem: str = ""
    memlock: int | None = None  # bytes that may be locked, as InfiniBand needs; None: any number
    shared_memory: int = 0  # bytes free in /dev/shm, over which NCCL talks within a node


@dataclass(frozen=True, kw_only=True)
class LinkMeasurement:
    """What a rank measured in its group.

    `problem` says why there is no rate, or that sums were wrong.
    """

    bytes_per_second: float | None
    problem: str = ""


def measurement_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def round_file(number: int) -> str:
    return f"round-{number:03d}.json"


def link_file(number: int, rank: int) -> str:
    return f"round-{number:03d}-rank-{rank:05d}.json"
