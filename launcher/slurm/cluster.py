"""The settings of a cluster: where jobs go, what a node has, what the ranks' environment is."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from data_pipeline.config_loader import load_config
from data_pipeline.errors import ConfigError
from pretrain.costs.devices import NodeConfig

# minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes,
# days-hours:minutes:seconds
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_LARGEST_SIGNAL_FRACTION = 0.5


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(NodeConfig):
    """A file of configs/clusters. Empty text stands for the cluster's default."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    cpus_per_rank: int = 1
    time_limit: str = "24:00:00"  # of one job; the run continues in the next one
    signal_seconds: int = (
        180  # signal before the time limit: one step and one checkpoint have to fit
    )
    options: dict[str, str] = field(
        default_factory=dict
    )  # other options of sbatch, such as 'mem: 0' or 'constraint: nvlink'
    modules: tuple[str, ...] = ()  # 'module load' of each
    setup: tuple[
        str, ...
    ] = ()  # shell lines run once on the first node, such as 'source /opt/site.sh'
    environment: dict[str, str] = field(default_factory=dict)  # of every rank
    container_image: str = ""  # the ranks run in it; it has to contain this project's dependencies
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    container_mounts: tuple[
        str, ...
    ] = ()  # host directories mounted under the same path, such as the corpus'
    container_python: str = "python3"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cpus_per_rank < 1:
            raise ConfigError(f"cpus_per_rank={self.cpus_per_rank} must be 1 or more")
        if (
            self.time_limit.isdecimal()
        ):  # what YAML makes of 24:00:00 without quotes, a number of seconds
            raise ConfigError(
                f"time_limit={self.time_limit} is a number; write '24:00:00', in quotes"
            )
        if not 0 < self.signal_seconds <= _LARGEST_SIGNAL_FRACTION * seconds_of(self.time_limit):
            raise ConfigError(
                f"signal_seconds={self.signal_seconds} must be above 0 and at most half of "
                f"time_limit={self.time_limit}"
            )


def load_cluster(path: Path) -> ClusterConfig:
    """Read a cluster file; ConfigError lists all its errors."""
    return load_config(ClusterConfig, path)


def seconds_of(time_limit: str) -> float:
    """A time limit as Slurm writes it, in seconds; infinity for UNLIMITED and the like."""
    if time_limit.upper() in ("UNLIMITED", "INFINITE"):
        return float("inf")
    found = _TIME.fullmatch(time_limit)
    if not found:
        raise ConfigError(
            f"time_limit={time_limit!r} is not a time; write it as '24:00:00' or '2-00:00:00'"
        )
    days, *parts = (None if part is None else int(part) for part in found.groups())
    numbers = [part for part in parts if part is not None]
    if days is not None:  # counts from the hours down
        hours, minutes, seconds = (numbers + [0, 0])[:3]
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(numbers) == 3:
        return (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    return numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0)
