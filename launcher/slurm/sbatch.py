"""The batch script of a run or a sweep, the snapshot that it runs, and checks before both.

Later edits of code or settings do not change a job that waits, because it runs the snapshot. The
script can be submitted by hand with `sbatch`.

RUN/slurm/{job.sbatch, experiment.yaml, cluster.yaml, code/, code.commit, code.diff}
"""

import compileall
import contextlib
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data_pipeline.corpora.manifest import MANIFEST_NAME, SPLITS
from foundation.credentials import referenced_variable
from foundation.errors import ConfigError, UserError
from foundation.files import make_directory, move, sync_tree, write_text
from foundation.paths import url_of
from foundation.programs import copied_arguments, make_startable
from foundation.typed_values import to_tree
from foundation.yaml_files import dump_yaml
from launcher.slurm.client import Partition, Slurm
from pretrain.checkpoint.directory import steps_on_disk
from pretrain.config.cluster import (
    ClusterConfig,
    NodeRange,
    control_characters,
    load_cluster,
    time_limit_seconds,
)
from pretrain.config.devices import DEVICES
from pretrain.config.evaluation_sets import evaluated_split
from pretrain.config.phases import runs_of_phases
from pretrain.config.resolve import resolve, with_precision, with_vocabulary
from pretrain.config.run import RunConfig, accumulation_steps
from pretrain.costs.device_memory import checkpoint_bytes, largest_footprint
from pretrain.costs.fitting import advice
from pretrain.costs.hardware import GIB, USABLE
from pretrain.rundir.events import Event
from pretrain.rundir.history import work_dirs
from pretrain.rundir.ownership import make_run_directory, refuse_foreign_run, refuse_links
from pretrain.rundir.run_dir import RunDir

_log = logging.getLogger(__name__)
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
_LONGEST_VALUE = 4000  # characters; sbatch copies a value into 8 KiB and checks no length
_SOURCE = Path(__file__).resolve().parents[2]
_PACKAGES = ("foundation", "data_pipeline", "launcher", "pretrain")


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job of a run or a sweep, before it is submitted."""

    name: str  # for people
    run_dir: Path
    code: Path  # the snapshot that the ranks import
    python: str
    nodes: NodeRange
    cluster: ClusterConfig
    attempts_without_progress: int


def quote(value: object) -> str:
    """Return the text that bash and `#SBATCH` lines read as this value.

    All values in a script have to go through this function. It uses double quotes and backslashes:
    shlex.quote uses single quotes, in which `#SBATCH` lines lose backslashes. Raises ConfigError
    for control characters, since a line break would start another line of the script.
    """
    text = str(value)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"found bytes that are not UTF-8 in {text[:80]!r}; choose another name")
    if control_characters(text):
        raise ConfigError(
            f"found a control character in {text[:80]!r}, expected one line of plain text; "
            "remove it, or choose another name"
        )
    if len(text) > _LONGEST_VALUE:
        raise ConfigError(
            f"found {len(text):,} characters in {text[:40]!r}..., expected at most "
            f"{_LONGEST_VALUE:,} in a batch script; use a shorter value"
        )
    if _PLAIN.fullmatch(text):
        return text
    return '"' + re.sub(r'(["\\$`])', r"\\\1", text) + '"'


def option_flags(options: Mapping[str, object], text: Callable[[object], str] = str) -> list[str]:
    """Return `--name=value` for each option; an option without a value is a flag, `--name`."""
    return [
        f"--{name}" if value in (None, "") else f"--{name}={text(value)}"
        for name, value in options.items()
    ]


def environment_lines(cluster: ClusterConfig) -> list[str]:
    """Return shell lines that set the ranks' environment variables."""
    lines = []
    for name, value in cluster.environment.items():
        if wanted := referenced_variable(value):
            value = f'"${{{wanted}:?is not set; export it where you submit}}"'
        else:
            value = quote(value)
        lines.append(f"export {name}={value}")
    return lines


def render(job: Job) -> str:
    """Return the script. The job writes all its files, the log too, into the run directory."""
    head = (
        "# Written by 'launcher submit'. By hand: sbatch THIS_FILE; "
        "the run resumes from its latest checkpoint."
    )
    options = {"output": _log_pattern(job.run_dir, "slurm-%j.log")}
    return _script(job, head, options, [], quote(job.run_dir))


def is_script_of(script: str, run_dir: Path) -> bool:
    """Return whether `render` made the script for this directory; False if the run was moved."""
    output = quote(_log_pattern(run_dir, "slurm-%j.log"))
    return f"#SBATCH --output={output}" in script.splitlines()


def render_array(
    job: Job, runs: Sequence[Path], at_a_time: int | None, after: str | None = None
) -> str:
    """Return the script of an array job whose task i trains in the run directory runs[i].

    Each run directory gets a link to its task's log in `job.run_dir`. The array starts when the job
    `after` has ended.
    """
    limit, logs = f"%{at_a_time}" if at_a_time else "", job.run_dir / "logs"
    options = {
        "array": f"0-{len(runs) - 1}{limit}",
        "output": _log_pattern(job.run_dir, "slurm-%A_%a.log"),
        **({"dependency": f"afterany:{after}"} if after else {}),
    }
    task = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
    lines = [
        "",
        "runs=(",
        *(f"  {quote(path)}" for path in runs),
        ")",
        'run="${runs[$SLURM_ARRAY_TASK_ID]}"',
        f'ln -sf {quote(logs)}/slurm-"{task}.log" "$run/logs/"',
    ]
    head = "# Written by 'launcher sweep submit'. One task is one cell."
    return _script(job, head, options, lines, '"$run"')


def _log_pattern(run_dir: Path, name: str) -> str:
    """Return the pattern of a log's path: `name` may use %j, in the directory % is escaped."""
    if "\\" in str(run_dir):
        raise ConfigError(
            f"found a backslash in {run_dir}, which Slurm does not keep in a log's path; "
            "choose another run directory"
        )
    return f"{run_dir / 'logs'}".replace("%", "%%") + f"/{name}"


def _script(
    job: Job, head: str, options: Mapping[str, object], lines: Sequence[str], run: str
) -> str:
    batch_process = copied_arguments(job.code, "launcher.slurm.batch_process")
    command = " ".join(map(quote, (job.python, *batch_process)))
    cluster = job.cluster
    derived = {
        "job-name": job.name,
        "partition": cluster.partition,
        "nodes": job.nodes,
        "gpus-per-node": cluster.gpus_per_node if cluster.num_gpus else "",
        "time": cluster.time_limit,
        "signal": f"B:USR1@{cluster.signal_seconds}",
        "open-mode": "append",  # a requeued job continues in the same log
        "chdir": job.code,
        **_resources_of_a_node(job),
        **options,
    }
    for name in cluster.options:
        if name in derived:
            setting = name.replace("-", "_")
            way_out = f"use the setting {setting}" if hasattr(cluster, setting) else "remove it"
            raise ConfigError(
                f"options.{name} of the cluster file is set by the launcher; {way_out}"
            )
    flags = [] if "no-requeue" in cluster.options else ["--requeue"]
    spare = ""
    if job.nodes.spare:  # Slurm keeps a job that loses a node, and the supervisor replaces the node
        flags.append("--no-kill")
        spare = f" --spare-nodes={job.nodes.spare}"
    flags += option_flags({name: value for name, value in derived.items() if value}, quote)
    text = [
        "#!/bin/bash",
        head,
        *(f"#SBATCH {flag}" for flag in [*flags, *option_flags(cluster.options, quote)]),
        "",
        "set -e",
        *cluster.setup,
        *environment_lines(cluster),
        *lines,
        "",
        "# exec: Slurm signals this process only (--signal=B:), so it becomes the one that",
        "# starts the supervisor, and starts it again if a signal kills it.",
        f"exec {command} {run} --attempts-without-progress={job.attempts_without_progress}{spare}",
    ]
    return "\n".join(text) + "\n"


def _resources_of_a_node(job: Job) -> dict[str, object]:
    """Return the options for tasks and CPUs of a node; for a range of nodes only CPUs.

    A requeued job keeps the total number of tasks of its first start, so with that option it could
    not start on another number of nodes.
    """
    ranks, cpus = job.cluster.tasks_per_node, job.cluster.cores_per_rank
    if job.nodes.least == job.nodes.most:
        return {"ntasks-per-node": ranks, "cpus-per-task": cpus}
    return {"mincpus": ranks * cpus}


class Snapshot:
    """Paths under RUN/slurm. The constructor touches nothing."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "slurm"
        self.script = self.path / "job.sbatch"
        self.experiment = self.path / "experiment.yaml"
        self.cluster = self.path / "cluster.yaml"
        self.code = self.path / "code"

    def take_settings(self, config: RunConfig, cluster: ClusterConfig) -> None:
        """Save experiment and cluster settings, the only files that differ between cells."""
        self._make()
        _write(self.experiment, dump_yaml(to_tree(config)))
        _write(self.cluster, dump_yaml(to_tree(cluster)))

    def take_code(self, script: str) -> None:
        """Save this project's code with its git state, and the script that runs it."""
        self._make()
        shutil.rmtree(self.code, ignore_errors=True)
        for package in _PACKAGES:
            shutil.copytree(_SOURCE / package, self.code / package)
        make_startable(self.code)
        # Compile now, so that jobs write no bytecode: on a full disk Python would keep half a file.
        compileall.compile_dir(self.code, quiet=2)
        # A group may be allowed to write the source, but nobody else may write the snapshot.
        for path in (self.code, *self.code.rglob("*")):
            path.chmod(path.stat().st_mode & 0o700)
        sync_tree(self.code)
        for name, command in {
            "code.commit": ["rev-parse", "HEAD"],
            "code.diff": ["diff", "HEAD"],
        }.items():
            _write(self.path / name, _git(*command))
        _write(self.script, script)

    def _make(self) -> None:
        """Make the directory. Only its owner may read a run's environment or change its code."""
        make_run_directory(self.path.parent)
        make_directory(self.path, 0o700)
        self.path.chmod(0o700)


@contextlib.contextmanager
def replaced_snapshot(run_dir: RunDir) -> Iterator[Snapshot]:
    """Yield the run's snapshot, to be taken in the block.

    If Slurm refuses the job (ConfigError), restore the previous state. After any other failure the
    new snapshot stays, because the job may exist although its id was lost. Raises ConfigError if
    others can write the run directory, and so change what the job executes.
    """
    snapshot, before = Snapshot(run_dir.path), run_dir.path / ".slurm.tmp"
    made = [path for path in (run_dir.path, run_dir.logs) if not path.exists()]
    refuse_links(run_dir.path)
    make_run_directory(run_dir.path)
    refuse_foreign_run(run_dir.path)
    make_directory(run_dir.logs)
    shutil.rmtree(before, ignore_errors=True)
    if snapshot.path.exists():
        move(snapshot.path, before)
    try:
        yield snapshot
    except ConfigError:
        shutil.rmtree(snapshot.path, ignore_errors=True)
        if before.exists():
            move(before, snapshot.path)
        for path in reversed(made):
            with contextlib.suppress(OSError):  # the directory is not empty
                path.rmdir()
        raise
    shutil.rmtree(before, ignore_errors=True)


def own_work_dirs(path: Path, ledger: Sequence[Event]) -> list[str]:
    """Return the working directories of this run's jobs: the snapshot's, also for jobs that were
    submitted by hand and are in no ledger, and what the ledger names."""
    return [str(Snapshot(path.resolve()).code), *work_dirs(ledger)]


def _write(path: Path, text: str) -> None:
    write_text(path, text, mode=0o600)


def _git(*command: str) -> str:
    """Return git's output about the source; '' without git, or if the source is no work tree."""
    try:
        result = subprocess.run(
            ["git", "-C", str(_SOURCE), *command], capture_output=True, text=True
        )
    except FileNotFoundError:
        return ""
    return result.stdout if result.returncode == 0 else ""


def check_run(
    config: RunConfig,
    cluster: ClusterConfig,
    nodes: NodeRange,
    run_dir: Path,
    *,
    is_dry_run: bool = False,
) -> list[str]:
    """Return warnings, a line each; raise ConfigError if the run cannot work on this cluster.

    `config` must have its vocabulary size. In a dry run a full disk is only a warning, because this
    host may have other disks than the cluster.
    """
    ranks = nodes.least * cluster.tasks_per_node
    accumulation_steps(config, ranks)
    config = with_precision(config, best="bf16" if cluster.num_gpus else "fp32")
    if cluster.gpu_model:
        _check_memory(config, cluster, ranks)
    notes = []
    existing = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    free, on_disk = shutil.disk_usage(existing).free, steps_on_disk(RunDir(run_dir).checkpoints)
    more = max(1, config.checkpoint.num_kept(config.optim.steps) + 1 - len(on_disk))
    if (needed := more * checkpoint_bytes(config)) > free:
        problem = (
            f"{existing} has {free / GIB:.1f} GiB free, {more} checkpoints need "
            f"{needed / GIB:.1f} GiB; free disk space, choose another run directory or keep fewer "
            "(checkpoint.keep_last, checkpoint.keep_every)"
        )
        if not is_dry_run:
            raise ConfigError(problem)
        notes.append(f"note: {problem}")
    used = usable_nodes(config, cluster.tasks_per_node, nodes.most)
    if used != nodes.most:
        notes.append(
            f"note: of {nodes.most} nodes only {used} would be used, so that "
            f"data.lanes={config.data.lanes} divides evenly"
        )
    return notes


def check_request(
    cluster: ClusterConfig, nodes: NodeRange, partitions: Sequence[Partition]
) -> None:
    """Raise ConfigError if the cluster can never run the job, or a variable for it is not set here.

    Without a list of partitions, sbatch decides.
    """
    check_references(cluster)
    if not partitions:
        return
    names = [partition.name for partition in partitions]
    wanted = cluster.partition.split(",") if cluster.partition else []
    if unknown := [name for name in wanted if name not in names]:
        raise ConfigError(
            f"partition {unknown[0]!r} is unknown here; this cluster has {', '.join(names)}"
        )
    chosen = _chosen(cluster, partitions)
    problems = [_never_fits(cluster, nodes, partition) for partition in chosen]
    if problems and all(problems):
        raise ConfigError(problems[0])


def check_references(cluster: ClusterConfig) -> None:
    """Raise ConfigError unless the variables that `environment` refers to are set here."""
    for name, value in cluster.environment.items():
        wanted = referenced_variable(value)
        if wanted is not None and not os.environ.get(wanted):
            raise ConfigError(
                f"environment.{name}={value}, but {wanted} is not set here; export it first"
            )


def cluster_here(path: Path) -> ClusterConfig:
    """Return the cluster of a file. If it has GPUs and no `cpus_per_rank`, ask Slurm for the cores
    per GPU of its nodes."""
    cluster, partitions = load_cluster(path), []
    if cluster.cpus_per_rank or not cluster.num_gpus:
        return cluster
    with contextlib.suppress(UserError):  # no Slurm here, in a dry run
        partitions = Slurm().partitions()
    cores = [partition.cores_per_gpu for partition in _chosen(cluster, partitions)]
    if not any(cores):
        _log.warning("cpus_per_rank=1: Slurm does not say what nodes have; set it in %s", path)
    return replace(cluster, cpus_per_rank=min(filter(None, cores), default=0))


def _chosen(cluster: ClusterConfig, partitions: Sequence[Partition]) -> list[Partition]:
    """Return the partitions that the cluster's file names, or the default one.

    Empty if sinfo shows no default: sbatch may still have one.
    """
    wanted = cluster.partition.split(",")
    return [p for p in partitions if p.name in wanted or (p.is_default and not cluster.partition)]


def _never_fits(cluster: ClusterConfig, nodes: NodeRange, partition: Partition) -> str:
    """Return why the partition can never run the job; '' if it can."""
    wanted = {
        "nodes": (nodes.least_of_job, partition.num_nodes),
        "CPUs per node": (cluster.tasks_per_node * cluster.cores_per_rank, partition.cpus_per_node),
        "GPUs per node": (cluster.num_gpus, partition.gpus_per_node),
    }
    for resource, (asked, there) in wanted.items():
        if asked > there:
            has = f"partition {partition.name!r} has {there}"
            return f"found {asked} {resource}, {has}; request fewer"
    limit = partition.time_limit
    if limit != "n/a" and time_limit_seconds(cluster.time_limit) > time_limit_seconds(limit):
        return (
            f"time_limit={cluster.time_limit} is beyond the {limit} of partition "
            f"{partition.name!r}; request less: a run continues in the next job"
        )
    return ""


def usable_nodes(config: RunConfig, ranks_per_node: int, nodes: int) -> int:
    """Return the most nodes, up to `nodes`, whose ranks share the lanes evenly, or 0."""
    for count in range(nodes, 0, -1):
        try:
            for phase in runs_of_phases(config):
                accumulation_steps(phase, count * ranks_per_node)
            return count
        except ConfigError:
            continue
    return 0


def _check_memory(config: RunConfig, cluster: ClusterConfig, ranks: int) -> None:
    capacity = USABLE * (cluster.gpu_memory or DEVICES[cluster.gpu_model].memory)
    needed = largest_footprint(config, ranks, on_gpu=True).device
    if needed > capacity:
        raise ConfigError(
            f"a rank needs about {needed / GIB:.1f} GiB, an {cluster.gpu_model} leaves "
            f"{capacity / GIB:.1f} GiB; {advice(config, ranks, capacity, on_gpu=True)} "
            "('pretrain describe' shows the parts)"
        )


def missing_notes(config: RunConfig, cluster: ClusterConfig, run_dir: Path) -> list[str]:
    """Return a warning for every local path that the run reads and this host, or the container of
    the ranks, lacks.

    This is no error: nodes may have other disks, or an earlier job may build the corpus, and an
    image may have it. Apptainer, which starts .sif files, mounts directories of its own.
    """
    mounts = [str(run_dir), *cluster.container_mounts]
    if cluster.container_image.endswith(".sif"):
        mounts += [str(Path.home()), "/tmp", str(Path.cwd())]
    local = _local_reads(config)
    hidden = [
        f"warning: {name}: {path} is below none of {', '.join(mounts)}, which the container sees; "
        "add a directory to container_mounts, unless the image has it"
        for name, path, *_ in local
        if cluster.container_image and not any(map(path.absolute().is_relative_to, mounts))
    ]
    return hidden + [
        f"warning: {name}: found no {kind} at {path} on this host; the run is refused when its job "
        "starts, unless the nodes see it there: build it, or correct the path"
        for name, path, needed, kind in local
        if not os.path.exists(path / needed)
    ]


def resolve_here(config: RunConfig) -> RunConfig:
    """Return the run with its vocabulary size; UserError if it cannot train on its corpus.

    Where this host lacks something that the run reads, the job checks the corpus.
    """
    is_here = all(os.path.exists(path / needed) for _, path, needed, _ in _local_reads(config))
    return resolve(config) if is_here else with_vocabulary(config)


def _local_reads(config: RunConfig) -> list[tuple[str, Path, str, str]]:
    """Return the local paths that the run reads: the setting's name, the path, the file it must
    have below it if any, and what to call it."""
    train, validation = (f"{split}/{MANIFEST_NAME}" for split in SPLITS)
    data, corpus = config.data, "finished corpus"
    read = [("data.path", Path(data.path), validation if data.mixture else train, corpus)]
    for part in data.all_parts:
        read.append((f"mixture of {part.path}", Path(part.path), train, corpus))
    for name, path in config.evaluation.sets.items():
        split = "finished split of a corpus"
        read.append((f"evaluation.sets.{name}", evaluated_split(Path(path)), MANIFEST_NAME, split))
    if config.initial_weights:
        text = str(config.initial_weights)
        source = Path(text.rpartition("@")[0] or text)  # RUN of RUN@STEP
        read.append(("initial_weights", source, "", "run or export"))
    return [place for place in read if url_of(place[1]) is None]
