"""Renders the batch script of a run or a sweep: pure text, readable, can be submitted by hand with
`sbatch`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import ConfigError
from launcher.slurm.cluster import ClusterConfig


@dataclass(frozen=True)
class NodeRange:
    """How many nodes a run uses: as many as are free, from `least` to `most`."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}"


def parse_nodes(text: str) -> NodeRange:
    """`4` or `4:16`."""
    parts = text.split(":")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise ConfigError(
            f"--nodes={text} is neither a number nor a range; write 4, or 4:16 for 4 to 16"
        )
    nodes = NodeRange(int(parts[0]), int(parts[-1]))
    if not 1 <= nodes.least <= nodes.most:
        raise ConfigError(f"--nodes={text}: expected 1 or more, the smaller number first")
    return nodes


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is submitted.

    `name` is unique to the run, or to the cells, so that it finds the job again.
    """

    name: str
    run_dir: Path
    code: Path  # the snapshot that the ranks import
    python: str
    nodes: NodeRange
    cluster: ClusterConfig
    attempts_without_progress: int


def render(job: Job) -> str:
    """The script. The job writes its log, and everything else, into the run directory."""
    head = (
        "# Written by 'launcher submit'. By hand: sbatch THIS_FILE; "
        "the run resumes from its latest checkpoint."
    )
    return _script(
        job,
        head,
        [f"output={job.run_dir / 'logs' / 'slurm-%j.log'}"],
        [],
        shlex.quote(str(job.run_dir)),
    )


def render_array(job: Job, runs: Mapping[int, Path], at_a_time: int | None) -> str:
    """The script of an array job whose task `index` runs the run directory runs[index].

    Each run directory gets a link to its task's log, which is in `job.run_dir`.
    """
    limit, logs = f"%{at_a_time}" if at_a_time else "", job.run_dir / "logs"
    options = [f"array={','.join(map(str, runs))}{limit}", f"output={logs / 'slurm-%A_%a.log'}"]
    task = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
    lines = [
        "",
        "runs=(",
        *(f"  [{index}]={shlex.quote(str(path))}" for index, path in runs.items()),
        ")",
        'run="${runs[$SLURM_ARRAY_TASK_ID]}"',
        f'ln -sf {shlex.quote(str(logs))}/slurm-"{task}.log" "$run/logs/"',
    ]
    return _script(
        job, "# Written by 'launcher sweep submit'. One task is one cell.", options, lines, '"$run"'
    )


def _script(job: Job, head: str, options: Sequence[str], lines: Sequence[str], run: str) -> str:
    command = shlex.join([job.python, "-m", "launcher", "batch"])
    text = [
        "#!/bin/bash",
        head,
        "#SBATCH --requeue",
        *(f"#SBATCH --{option}" for option in [*_options(job), *options]),
        "",
        "set -e",
        *(f"module load {shlex.quote(module)}" for module in job.cluster.modules),
        *job.cluster.setup,
        *(f"export {name}={shlex.quote(value)}" for name, value in job.cluster.environment.items()),
        *lines,
        "",
        "# exec: Slurm signals this process only (--signal=B:), so it becomes the supervisor.",
        f"exec {command} {run} --attempts-without-progress={job.attempts_without_progress}",
    ]
    return "\n".join(text) + "\n"


def _options(job: Job) -> list[str]:
    cluster = job.cluster
    derived: dict[str, object] = {
        "job-name": job.name,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "nodes": job.nodes,
        **_resources_of_a_node(job),
        "gpus-per-node": cluster.gpus_per_node,
        "time": cluster.time_limit,
        "signal": f"B:USR1@{cluster.signal_seconds}",
        "open-mode": "append",  # a requeued job continues in the same log
        "chdir": job.code,
    }
    if taken := sorted((derived.keys() | {"output", "array"}) & cluster.options.keys()):
        raise ConfigError(
            f"options.{taken[0]} of the cluster file is set by the launcher; "
            "use the cluster's own setting for it"
        )
    own = [f"{name}={value}" for name, value in derived.items() if value]
    return own + [f"{name}={value}" if value else name for name, value in cluster.options.items()]


def _resources_of_a_node(job: Job) -> dict[str, object]:
    """Tasks and CPUs; for a range of nodes only CPUs, because a requeued job keeps the task number
    of its first start
    and with it the number of nodes, while the range lets every start take what is free."""
    ranks, cpus = job.cluster.tasks_per_node, job.cluster.cpus_per_rank
    if job.nodes.least == job.nodes.most:
        return {"ntasks-per-node": ranks, "cpus-per-task": cpus}
    return {"mincpus": ranks * cpus}
