"""The settings of a cluster: where jobs go, what a node has, what the ranks' environment is.

`pretrain` reads them to estimate costs, `launcher` to submit jobs; one reader refuses the same
files. Torch-free.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from foundation.credentials import is_variable_name, referenced_variable
from foundation.errors import ConfigError
from foundation.settings import MOST_THREADS, Range, load_config, setting, to_tree
from foundation.yaml_files import did_you_mean, find_config
from pretrain.costs.devices import MOST_NODES, NodeConfig

_NODES = re.compile(r"([0-9]{1,20})(?:([:+])([0-9]{1,20}))?")


@dataclass(frozen=True)
class NodeRange:
    """How many nodes a run uses: as many as are free, from `least` to `most`; and how many more its
    job has, to replace those that fail."""

    least: int
    most: int
    spare: int = 0

    @property
    def least_of_job(self) -> int:
        """The fewest nodes that the job needs."""
        return self.least + self.spare

    def __str__(self) -> str:
        """What Slurm is asked for."""
        least, most = self.least_of_job, self.most + self.spare
        return str(least) if least == most else f"{least}-{most}"


def parse_nodes(text: str) -> NodeRange:
    """`4`, `4:16` or `4+1`."""
    if match := _NODES.fullmatch(text):
        first, second = int(match[1]), int(match[3] or match[1])
        if match[2] == "+":
            nodes, is_valid = NodeRange(first, first, spare=second), second > 0
        else:
            nodes, is_valid = NodeRange(first, second), first <= second
        if is_valid and first >= 1 and nodes.most + nodes.spare <= MOST_NODES:
            return nodes
    raise ConfigError(
        f"--nodes={text[:40]}: expected a number from 1 to {MOST_NODES:,}, 4:16 for 4 to 16, or "
        "4+1 for 4 and a spare one"
    )


def fixed_nodes(text: str) -> NodeRange:
    """`4` or `4+1`; ConfigError for a range, whose number Slurm chooses."""
    nodes = parse_nodes(text)
    if nodes.least != nodes.most:
        raise ConfigError(
            f"--nodes={text}: found a range, expected one number of nodes, or 4+1 with a spare "
            f"one; write {nodes.least} or {nodes.most}"
        )
    return nodes


EXAMPLES = Path("configs/clusters")
# minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes,
# days-hours:minutes:seconds
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_LARGEST_SIGNAL_FRACTION = 0.5
_OPTION = re.compile(r"[a-z][a-z0-9-]+")
# Names of secrets, such as HF_PAT, WANDB_APIKEY, DB_CONNECTION_STRING, AUTH_HEADER.
_SECRET = re.compile(
    r"(^|_)((API|SECRET|ACCESS|PRIVATE|AUTH)?(KEY|TOKEN)|SECRET|PASSWORD|PASSWD|PASSPHRASE"
    r"|CREDENTIALS?|CONNECTION_?STRING|AUTH(_?HEADER)?|AUTHORIZATION|PAT|PWD|PASS|DSN)(_ID)?$",
    re.IGNORECASE,
)
_OF_THE_LAUNCHER = (
    "nodes ntasks ntasks-per-node cpus-per-task nodelist jobid kill-on-bad-exit wait label "
    "distribution export overlap container-image container-mounts container-workdir output "
    "error input multi-prog pty test-only"
)
# Options that would break a run -> why, and what to write instead.
_REFUSED: Mapping[str, Mapping[str, str]] = {
    "options": {
        "array": "starts the run several times; 'launcher sweep submit' starts a sweep's cells",
        "error": "keeps the job's errors from 'launcher logs'; remove it",
        "gpus": "counts GPUs of the whole job; use the setting gpus_per_node",
        "ntasks": "is nodes times ranks; use --nodes and the setting ranks_per_node",
        "test-only": "submits nothing; use 'launcher submit --dry-run'",
        "time-min": "lets Slurm shorten all later starts; use a shorter time_limit",
        "wrap": "replaces the batch script; use the setting setup",
    },
    "srun_options": dict.fromkeys(
        _OF_THE_LAUNCHER.split(), "is decided by the launcher; remove it"
    ),
}


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(NodeConfig):
    """A file of configs/clusters. Empty text stands for the cluster's default."""

    partition: str = ""
    """Partition, or several (main,urgent): the first that can start the job."""
    cpus_per_rank: int = setting(1, Range(1, MOST_THREADS), unit="cores")
    """Cores of each rank."""
    time_limit: str = "24:00:00"
    """Limit of one job, as Slurm writes it; the run continues in the next job."""
    signal_seconds: int = setting(180, Range(1, 1_000_000), unit="seconds")
    """Warning before the time limit: two steps and a checkpoint have to fit."""
    options: dict[str, str | None] = field(default_factory=dict)
    """Other options of sbatch, such as 'account: X', 'mem: "0"' or 'exclusive:'."""
    srun_options: dict[str, str | None] = field(default_factory=dict)
    """Other options of the ranks' srun, such as 'cpu-bind: none' or 'no-container-mount-home:'."""
    setup: tuple[str, ...] = ()
    """Shell lines run once on the first node, such as 'module load cuda'."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of every rank; env:NAME takes the submitter's NAME, for secrets."""
    container_image: str = ""
    """Image of the ranks, started by apptainer if it is a .sif file, else by pyxis; empty: none."""
    container_mounts: tuple[str, ...] = ()
    """Host directories mounted under the same path, such as the corpus'."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_texts(self)
        _check_references(self.environment)
        if self.time_limit.isdecimal():  # to Slurm minutes, to most people seconds
            raise ConfigError(f"time_limit={self.time_limit} has no unit; write it as 24:00:00")
        if self.signal_seconds > _LARGEST_SIGNAL_FRACTION * seconds_of(self.time_limit):
            raise ConfigError(
                f"signal_seconds={self.signal_seconds} must be at most half of "
                f"time_limit={self.time_limit}"
            )


def _check_texts(cluster: ClusterConfig) -> None:
    """ConfigError for names and values that would be something else in a script, or break a run."""
    if wrong := [name for name in cluster.environment if not is_variable_name(name)]:
        expected = "a variable's name, such as NCCL_DEBUG"
        raise ConfigError(f"environment: found the name {wrong[0]!r}, expected {expected}")
    for name_of, refused in _REFUSED.items():
        for name in getattr(cluster, name_of):
            if not _OPTION.fullmatch(name):
                expected = "the long name of an option, such as mem"
                raise ConfigError(f"{name_of}: found the name {name!r}, expected {expected}")
            if name in refused:
                raise ConfigError(f"{name_of}.{name} of the cluster file {refused[name]}")
    has_secrets = any(map(referenced_variable, cluster.environment.values()))
    exported = cluster.options.get("export", "ALL")
    if exported not in (("ALL",) if has_secrets else ("ALL", "NONE")):
        raise ConfigError(
            f"options.export={exported}: expected ALL, or NONE if environment has no env:NAME, "
            "which is taken from the shell that submits"
        )
    for name_of, value in to_tree(cluster).items():
        value = list(value.values()) if isinstance(value, dict) else value
        for text in map(str, value if isinstance(value, list) else [value]):
            if control_characters(text):
                raise ConfigError(
                    f"{name_of}: found a control character in {text[:80]!r}, expected one line of "
                    "plain text; write one line per entry"
                )


def _check_references(environment: Mapping[str, str]) -> None:
    for name, value in environment.items():
        wanted = referenced_variable(value)
        if wanted is not None and not is_variable_name(wanted):
            raise ConfigError(f"environment.{name}: found {value!r}, expected env:NAME")
        if wanted is None and value and _SECRET.search(name):
            raise ConfigError(
                f"environment.{name}: found a value that everybody who reads the file or the job "
                f"script would know; write '{name}: env:{name}' and export {name} where you submit"
            )


def control_characters(text: str) -> bool:
    """Whether a line break, an escape or another control character is in the text."""
    return any(unicodedata.category(character) in ("Cc", "Cs") for character in text)


def load_cluster(path: Path) -> ClusterConfig:
    """Read a cluster file; ConfigError lists all its errors, or the files that there are."""
    if not os.path.lexists(find_config(path)):  # a link to nothing is told by its reader
        beside = [str(file) for file in path.parent.glob(f"{path.stem}.y*ml")]
        shipped = [str(EXAMPLES / file.name) for file in find_config(EXAMPLES).glob("*.yaml")]
        named = beside + [name for name in shipped if Path(name).stem == path.stem]
        hint = did_you_mean(named[0] if named else str(path), beside + shipped)
        raise ConfigError(
            f"the cluster file {path} does not exist{hint}; 'launcher new-cluster FILE' writes one"
        )
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
    numbers = [int(part) for part in found.groups() if part is not None]
    if found[1] is None and len(numbers) == 1:
        return numbers[0] * 60
    units = [24 * 3600, 3600, 60, 1]
    if found[1] is None:
        units = units[-len(numbers) :]
    return sum(number * unit for number, unit in zip(numbers, units, strict=False))
