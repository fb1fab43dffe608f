"""Renders the batch script of a run or a sweep: pure text, readable, can be submitted by hand with
`sbatch`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from foundation.credentials import referenced_variable
from foundation.errors import ConfigError
from foundation.own_programs import copied_arguments
from pretrain.costs.cluster import ClusterConfig, NodeRange, control_characters

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
_LONGEST_VALUE = 4000  # sbatch copies a value into 8 KiB without looking at its length


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


def quote(value: object) -> str:
    """The text that bash reads as this value, and sbatch in a `#SBATCH` line, too.

    The only way for a value into a script. In double quotes both take a backslash away from the
    character behind it; shlex.quote's single quotes do not keep backslashes in `#SBATCH` lines.
    ConfigError for control characters: a line break would start a line of its own.
    """
    text = str(value)
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
    """`--name=value` for each option; an option without a value is a flag, `--name`."""
    return [
        f"--{name}" if value in (None, "") else f"--{name}={text(value)}"
        for name, value in options.items()
    ]


def environment_lines(cluster: ClusterConfig) -> list[str]:
    """Shell lines that set the ranks' environment variables."""
    return [f"export {name}={_shell_value(value)}" for name, value in cluster.environment.items()]


def _shell_value(value: str) -> str:
    wanted = referenced_variable(value)
    if wanted is None:
        return quote(value)
    return f'"${{{wanted}:?is not set; export it where you submit}}"'


def render(job: Job) -> str:
    """The script. The job writes its log, and everything else, into the run directory."""
    head = (
        "# Written by 'launcher submit'. By hand: sbatch THIS_FILE; "
        "the run resumes from its latest checkpoint."
    )
    return _script(job, head, _log_option(job.run_dir), [], quote(job.run_dir))


def is_script_of(script: str, run_dir: Path) -> bool:
    """Whether `render` made the script for this directory: one that was moved has another's."""
    (flag,) = option_flags(_log_option(run_dir), quote)
    return f"#SBATCH {flag}" in script.splitlines()


def _log_option(run_dir: Path) -> dict[str, str]:
    return {"output": _log_pattern(run_dir, "slurm-%j.log")}


def render_array(
    job: Job, runs: Sequence[Path], at_a_time: int | None, after: str | None = None
) -> str:
    """The script of an array job whose task i runs the run directory runs[i].

    Each run directory gets a link to its task's log, which is in `job.run_dir`. The array starts
    when the job `after` has ended.
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
    """The path of a log whose name has Slurm's %j and the like, and whose directory has none."""
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
    derived = {**_options(job), **options}
    _refuse_taken(derived, job.cluster)
    wanted = {name: value for name, value in derived.items() if value}
    # With spare nodes the job outlives a node, and its supervisor replaces it.
    survives = ["--no-kill"] if job.nodes.spare else []
    spare = f" --spare-nodes={job.nodes.spare}" if job.nodes.spare else ""
    requeue = [] if "no-requeue" in job.cluster.options else ["--requeue"]
    flags = [*requeue, *survives, *option_flags(wanted, quote)]
    text = [
        "#!/bin/bash",
        head,
        *(f"#SBATCH {flag}" for flag in [*flags, *option_flags(job.cluster.options, quote)]),
        "",
        "set -e",
        *job.cluster.setup,
        *environment_lines(job.cluster),
        *lines,
        "",
        "# exec: Slurm signals this process only (--signal=B:), so it becomes the one that",
        "# starts the supervisor, and starts it again if a signal kills it.",
        f"exec {command} {run} --attempts-without-progress={job.attempts_without_progress}{spare}",
    ]
    return "\n".join(text) + "\n"


def _options(job: Job) -> dict[str, object]:
    """What the launcher asks for itself, unless it is empty."""
    cluster = job.cluster
    return {
        "job-name": job.name,
        "partition": cluster.partition,
        "nodes": job.nodes,
        **_resources_of_a_node(job),
        "gpus-per-node": cluster.gpus_per_node if cluster.num_gpus else "",
        "time": cluster.time_limit,
        "signal": f"B:USR1@{cluster.signal_seconds}",
        "open-mode": "append",  # a requeued job continues in the same log
        "chdir": job.code,
    }


def _refuse_taken(derived: Mapping[str, object], cluster: ClusterConfig) -> None:
    for name in cluster.options:
        if name in derived:
            setting = name.replace("-", "_")
            way_out = f"use the setting {setting}" if hasattr(cluster, setting) else "remove it"
            raise ConfigError(
                f"options.{name} of the cluster file is set by the launcher; {way_out}"
            )


def _resources_of_a_node(job: Job) -> dict[str, object]:
    """Tasks and CPUs; for a range of nodes only CPUs, because a requeued job keeps the task number
    of its first start
    and with it the number of nodes, while the range lets every start take what is free."""
    ranks, cpus = job.cluster.tasks_per_node, job.cluster.cpus_per_rank
    if job.nodes.least == job.nodes.most:
        return {"ntasks-per-node": ranks, "cpus-per-task": cpus}
    return {"mincpus": ranks * cpus}
