"""A cluster as its users see it: where jobs go, what a node has, what ranks need around them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from data_pipeline.config_loader import load_config
from data_pipeline.errors import ConfigError
from pretrain.costs.devices import NodeConfig

# minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_LONGEST_SHARE_OF_WARNING = 0.5


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(NodeConfig):
    """One file of configs/clusters. Empty text: the cluster's own default."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    cpus_per_rank: int = 1
    time_limit: str = "24:00:00"  # of one job; the run goes on in the next
    signal_seconds: int = (
        180  # notice before the time limit: one step and one checkpoint have to fit
    )
    options: dict[str, str] = field(
        default_factory=dict
    )  # more of sbatch's, such as 'mem: 0' or 'constraint: nvlink'
    modules: tuple[str, ...] = ()  # 'module load' of each
    setup: tuple[
        str, ...
    ] = ()  # shell lines run once on the first host, such as 'source /opt/site.sh'
    environment: dict[str, str] = field(default_factory=dict)  # of every rank
    container_image: str = ""  # the ranks run in it; it has to bring this project's dependencies
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    container_mounts: tuple[
        str, ...
    ] = ()  # host directories seen inside under the same path, such as the corpus'
    container_python: str = "python3"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cpus_per_rank < 1:
            raise ConfigError(f"cpus_per_rank={self.cpus_per_rank} must be 1 or more")
        if (
            self.time_limit.isdecimal()
        ):  # what YAML makes of 24:00:00 without quotes, a number of seconds
            raise ConfigError(
                f"time_limit={self.time_limit} is a mere number; write '24:00:00', in quotes"
            )
        if not 0 < self.signal_seconds <= _LONGEST_SHARE_OF_WARNING * seconds_of(self.time_limit):
            raise ConfigError(
                f"signal_seconds={self.signal_seconds} must be above 0 and at most half of time_limit={self.time_limit}"
            )


def load_cluster(path: Path) -> ClusterConfig:
    """The cluster a file describes; ConfigError lists all that is wrong with it."""
    return load_config(ClusterConfig, path)


def seconds_of(time_limit: str) -> float:
    """A time limit as Slurm writes it, in seconds; infinity for UNLIMITED and the like."""
    if time_limit.upper() in ("UNLIMITED", "INFINITE"):
        return float("inf")
    found = _TIME.fullmatch(time_limit)
    if not found:
        raise ConfigError(
            f"time_limit={time_limit!r} is no time; write it as '24:00:00' or '2-00:00:00'"
        )
    days, *parts = (None if part is None else int(part) for part in found.groups())
    numbers = [part for part in parts if part is not None]
    if days is not None:  # counts from the hours down
        hours, minutes, seconds = (numbers + [0, 0])[:3]
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(numbers) == 3:
        return (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    return numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0)
