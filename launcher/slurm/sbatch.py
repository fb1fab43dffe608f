"""The batch script of a run or a sweep, and the snapshot of code and settings that it runs, so that
later edits do not change a job that waits.

The script is pure text, readable, and can be submitted by hand with `sbatch`.

RUN/slurm/{job.sbatch, experiment.yaml, cluster.yaml, code/, code.commit, code.diff}
"""

from __future__ import annotations

import compileall
import contextlib
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from foundation.credentials import referenced_variable
from foundation.errors import ConfigError
from foundation.files import write_text
from foundation.own_programs import copied_arguments, make_startable
from foundation.settings import to_tree
from foundation.yaml_files import dump_yaml
from pretrain.config.run import RunConfig
from pretrain.costs.cluster import ClusterConfig, NodeRange, control_characters
from pretrain.rundir.run_dir import RunDir, make_run_directory, refuse_foreign_run, refuse_links

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
_LONGEST_VALUE = 4000  # sbatch copies a value into 8 KiB without looking at its length
_SOURCE = Path(__file__).resolve().parents[2]
_PACKAGES = ("foundation", "data_pipeline", "launcher", "pretrain")


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
    lines = []
    for name, value in cluster.environment.items():
        if wanted := referenced_variable(value):
            value = f'"${{{wanted}:?is not set; export it where you submit}}"'
        else:
            value = quote(value)
        lines.append(f"export {name}={value}")
    return lines


def render(job: Job) -> str:
    """The script. The job writes its log, and everything else, into the run directory."""
    head = (
        "# Written by 'launcher submit'. By hand: sbatch THIS_FILE; "
        "the run resumes from its latest checkpoint."
    )
    options = {"output": _log_pattern(job.run_dir, "slurm-%j.log")}
    return _script(job, head, options, [], quote(job.run_dir))


def is_script_of(script: str, run_dir: Path) -> bool:
    """Whether `render` made the script for this directory: one that was moved has another's."""
    output = quote(_log_pattern(run_dir, "slurm-%j.log"))
    return f"#SBATCH --output={output}" in script.splitlines()


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
    if job.nodes.spare:  # the job outlives a node, and its supervisor replaces it
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
    """Tasks and CPUs; for a range of nodes only CPUs, because a requeued job keeps the task number
    of its first start
    and with it the number of nodes, while the range lets every start take what is free."""
    ranks, cpus = job.cluster.tasks_per_node, job.cluster.cpus_per_rank
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
        """Save experiment and cluster settings: all that differs between the cells of a sweep."""
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
        # Python keeps the half of a file of bytecode that a full disk took: let a job write none.
        compileall.compile_dir(self.code, quiet=2)
        for path in (self.code, *self.code.rglob("*")):  # the source may be writable by a group
            path.chmod(path.stat().st_mode & 0o700)
        for name, command in {
            "code.commit": ["rev-parse", "HEAD"],
            "code.diff": ["diff", "HEAD"],
        }.items():
            _write(self.path / name, _git(*command))
        _write(self.script, script)

    def _make(self) -> None:
        """Only its user may read settings and environment of a run, or change what a job runs."""
        make_run_directory(self.path.parent)
        self.path.mkdir(exist_ok=True, mode=0o700)
        self.path.chmod(0o700)


@contextlib.contextmanager
def replaced_snapshot(run_dir: RunDir) -> Iterator[Snapshot]:
    """The snapshot to take in the block. If Slurm refuses the job, all is as it was before.

    Raises ConfigError if others can write the run directory: they could exchange what the job
    executes.

    After any other failure the new snapshot stays: the job may exist, although its id was lost.
    """
    snapshot, before = Snapshot(run_dir.path), run_dir.path / ".slurm.tmp"
    made = [path for path in (run_dir.path, run_dir.logs) if not path.exists()]
    refuse_links(run_dir.path)
    make_run_directory(run_dir.path)
    refuse_foreign_run(run_dir.path)
    run_dir.logs.mkdir(exist_ok=True)
    shutil.rmtree(before, ignore_errors=True)
    if snapshot.path.exists():
        snapshot.path.rename(before)
    try:
        yield snapshot
    except ConfigError:
        shutil.rmtree(snapshot.path, ignore_errors=True)
        if before.exists():
            before.rename(snapshot.path)
        for path in reversed(made):
            with contextlib.suppress(OSError):  # something else is in there
                path.rmdir()
        raise
    shutil.rmtree(before, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    write_text(path, text, mode=0o600)


def _git(*command: str) -> str:
    """The output of git for the source.

    Empty if it is not a work tree, as after an installation.
    """
    try:
        result = subprocess.run(
            ["git", "-C", str(_SOURCE), *command], capture_output=True, text=True
        )
    except FileNotFoundError:
        return ""
    return result.stdout if result.returncode == 0 else ""
