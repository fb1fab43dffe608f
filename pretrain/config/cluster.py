"""The settings of a cluster: where jobs go, what a node has, the ranks' environment. Torch-free.

`pretrain` reads a cluster file to estimate costs, `launcher` to submit jobs.
"""

import operator
import os
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from foundation.credentials import is_variable_name, referenced_variable
from foundation.errors import ConfigError, did_you_mean
from foundation.settings import MOST_THREADS, Range, check_ranges, load_config, setting
from foundation.typed_values import to_tree
from foundation.yaml_files import find_config
from pretrain.config.devices import device_named

MOST_RANKS = 1024  # on a node
MOST_NODES = 65_536  # in a cluster: Slurm's own limit
_GPUS = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*:)?[0-9]{1,4}")
_NODES = re.compile(r"([0-9]{1,20})(?:([:+])([0-9]{1,20}))?")
EXAMPLES = Path("configs/clusters")
# Slurm's forms: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes,
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
# Options of srun that the launcher sets.
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


@dataclass(frozen=True)
class NodeRange:
    """How many nodes a run uses: all that are free, from `least` to `most`. Its job has `spare`
    nodes more, to replace nodes that fail."""

    least: int
    most: int
    spare: int = 0

    @property
    def least_of_job(self) -> int:
        """The fewest nodes that the job needs."""
        return self.least + self.spare

    def __str__(self) -> str:
        """Return the value for Slurm's `--nodes`."""
        least, most = self.least_of_job, self.most + self.spare
        return str(least) if least == most else f"{least}-{most}"


def parse_nodes(text: str) -> NodeRange:
    """Return the nodes of `4`, `4:16` or `4+1`; ConfigError for other texts."""
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
    """Return the nodes of `4` or `4+1`; ConfigError for a range, where Slurm would choose."""
    nodes = parse_nodes(text)
    if nodes.least != nodes.most:
        raise ConfigError(
            f"--nodes={text}: found a range, expected one number of nodes, or 4+1 with a spare "
            f"one; write {nodes.least} or {nodes.most}"
        )
    return nodes


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A file of configs/clusters. Empty text stands for the cluster's default."""

    other_names: ClassVar[Mapping[str, str]] = {
        **{name: f"options: {{{name}: ...}}" for name in ("account", "qos", "mem", "constraint")},
        **dict.fromkeys(("modules", "module"), "setup: module load ..."),
        **dict.fromkeys(("time", "walltime"), "time_limit"),
        **dict.fromkeys(("nodes", "nnodes", "numnodes"), "--nodes of 'launcher submit'"),
    }
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
    """Rate at which a node reads and writes the run directory while all nodes do."""
    partition: str = ""
    """Partition, or several (main,urgent): the first that can start the job."""
    cpus_per_rank: int = setting(0, Range(0, MOST_THREADS), unit="cores")
    """Cores of each rank; 0: the node's cores per GPU if Slurm knows them, else 1."""
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
    """Image of the ranks with all dependencies: a .sif file for apptainer, else for pyxis."""
    container_mounts: tuple[str, ...] = ()
    """Host directories mounted under the same path, such as the corpus'."""

    def __post_init__(self) -> None:
        check_ranges("", self)
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
        if self.gpu and not (self.num_gpus and self.gpu.startswith(self._named_by_type)):
            raise ConfigError(
                f"gpu={self.gpu} but gpus_per_node={self.gpus_per_node}; give a number of GPUs, of "
                "one kind"
            )
        _check_texts(self)
        if self.time_limit.isdecimal():  # Slurm reads minutes, most people seconds
            raise ConfigError(f"time_limit={self.time_limit} has no unit; write it as 24:00:00")
        if self.signal_seconds > _LARGEST_SIGNAL_FRACTION * time_limit_seconds(self.time_limit):
            raise ConfigError(
                f"signal_seconds={self.signal_seconds} must be at most half of "
                f"time_limit={self.time_limit}"
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
    def cores_per_rank(self) -> int:
        """Cores of each rank."""
        return self.cpus_per_rank or 1

    @property
    def _named_by_type(self) -> str:
        """The GPU that Slurm's type names: `H100` for h100:8 and nvidia_h100_80gb_hbm3:8."""
        return device_named(self.gpus_per_node.rpartition(":")[0])


def _check_texts(cluster: ClusterConfig) -> None:
    """Raise ConfigError for names and values that a script would misread, or that break a run."""
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
    for mount in cluster.container_mounts:
        if not mount.startswith("/") or set(mount) & set(":,"):
            raise ConfigError(
                f"container_mounts: found {mount!r}, expected a directory, which is mounted under "
                "the same path; write it as /shared"
            )
    for name, value in cluster.environment.items():
        wanted = referenced_variable(value)
        if wanted is not None and not is_variable_name(wanted):
            raise ConfigError(f"environment.{name}: found {value!r}, expected env:NAME")
        if wanted is None and value and _SECRET.search(name):
            raise ConfigError(
                f"environment.{name}: found a value that everybody who reads the file or the job "
                f"script would know; write '{name}: env:{name}' and export {name} where you submit"
            )


def control_characters(text: str) -> bool:
    """Return whether a line break, an escape or another control character is in the text."""
    return any(unicodedata.category(character) in ("Cc", "Cs") for character in text)


def load_cluster(path: Path) -> ClusterConfig:
    """Read a cluster file; ConfigError lists all its errors, or the files that there are."""
    if not os.path.lexists(find_config(path)):  # `load_config` reports a broken link
        beside = [str(file) for file in path.parent.glob(f"{path.stem}.y*ml")]
        shipped = [str(EXAMPLES / file.name) for file in find_config(EXAMPLES).glob("*.yaml")]
        named = beside + [name for name in shipped if Path(name).stem == path.stem]
        hint = did_you_mean(named[0] if named else str(path), beside + shipped)
        raise ConfigError(
            f"the cluster file {path} does not exist{hint}; 'launcher new-cluster FILE' writes one"
        )
    return load_config(ClusterConfig, path)


def time_limit_seconds(time_limit: str) -> float:
    """Return a time limit as Slurm writes it, in seconds; infinity for UNLIMITED and the like."""
    if time_limit.upper() in ("UNLIMITED", "INFINITE"):
        return float("inf")
    match = _TIME.fullmatch(time_limit)
    if not match:
        raise ConfigError(
            f"time_limit={time_limit!r} is not a time; write it as '24:00:00' or '2-00:00:00'"
        )
    parts = (match[1] or 0, *match.groups()[1:])
    days, *numbers = (int(part) for part in parts if part is not None)
    units = [3600, 60, 1] if match[1] or len(numbers) == 3 else [60, 1]
    return 86400 * days + sum(map(operator.mul, numbers, units))
