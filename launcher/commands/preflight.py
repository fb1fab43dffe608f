"""`launcher preflight`: a short job that finds slow and broken nodes."""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from data_pipeline.errors import ConfigError, UserError
from data_pipeline.files import named_errors
from data_pipeline.own_programs import copied_arguments, own_arguments, own_command
from launcher.node_checks import NodeReport, gather, pair_up, rate_nodes
from launcher.slurm import client as slurm
from launcher.slurm.job_checks import check_request
from launcher.slurm.sbatch import environment_lines, host_lines, option_flags, quote
from launcher.slurm.snapshot import Snapshot
from launcher.slurm.srun import in_container
from pretrain.costs.cluster import ClusterConfig, load_cluster
from pretrain.costs.devices import MOST_RANKS
from pretrain.costs.node_range import NodeRange, fixed_nodes
from pretrain.processes.local_ranks import RankGroup
from pretrain.processes.node_findings import END, TOKEN

EXIT_FOUND_DIFFERENCES = 1
_CHECK = "pretrain.processes.node_check"
_PREFIX = ".preflight-"
_MINUTES = 15
_LEAVE_SECONDS = 5.0
_NOT_OF_SRUN = ("requeue", "no-requeue", "export-file")  # options that only sbatch has


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `launcher preflight`."""
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument(
        "--cluster", type=Path, help="on Slurm: cluster file (configs/clusters/*.yaml)"
    )
    place.add_argument("--local", action="store_true", help="only this machine")
    parser.add_argument(
        "--nodes",
        default="2",
        metavar="N|N+S",
        help="with --cluster: nodes; of 4+1, with a spare one, all 5 (default %(default)s)",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=_num_gpus() or 2,
        help="with --local: number of ranks (default: one per GPU, or 2)",
    )
    parser.add_argument(
        "--directory", type=Path, default=Path("."), help="disk to measure; all nodes must see it"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """0 if all nodes are ok, 1 if one is busy, slow or broken."""
    if not 1 <= arguments.ranks <= MOST_RANKS:
        raise ConfigError(f"--ranks={arguments.ranks} must be from 1 to {MOST_RANKS:,}")
    fixed_nodes(arguments.nodes)  # ConfigError before anything is made
    arguments.directory.mkdir(parents=True, exist_ok=True)
    with named_errors(arguments.directory, arguments.directory / _PREFIX):
        out = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=arguments.directory)).resolve()
    out.chmod(0o755)
    try:
        reports = (
            _check_here(arguments.ranks, out) if arguments.local else _check_cluster(arguments, out)
        )
    finally:
        shutil.rmtree(out, ignore_errors=True)
    _print(reports, arguments)
    return 0 if all(report.verdict == "ok" for report in reports) else EXIT_FOUND_DIFFERENCES


def _num_gpus() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _check_here(num_ranks: int, out: Path) -> list[NodeReport]:
    command = own_command(_CHECK, str(out))
    with RankGroup(command, num_ranks, out / "logs", environment={TOKEN: out.name}) as ranks:
        try:
            return _led(out, num_ranks, [], lambda: None in ranks.poll())
        except UserError as error:
            lines = ranks.logs[0].read_text(errors="replace").strip().splitlines()
            raise UserError(
                f"{error}; last line of rank 0: {lines[-1] if lines else 'none'}"
            ) from None


def _check_cluster(arguments: argparse.Namespace, out: Path) -> list[NodeReport]:
    cluster = load_cluster(arguments.cluster)
    nodes = fixed_nodes(arguments.nodes).least_of_job
    check_request(cluster, NodeRange(nodes, nodes), slurm.partitions())
    name = f"preflight-{secrets.token_hex(4)}"
    if cluster.container_image:  # which has this project's dependencies, but not its code
        Snapshot(out).take_code(script="")
    with _step(srun_line(cluster, nodes, name, out), out) as srun:

        def is_running() -> bool:
            return srun.poll() is None

        return _led(out, nodes * cluster.tasks_per_node, [name], is_running)


def srun_line(cluster: ClusterConfig, nodes: int, name: str, out: Path) -> list[str]:
    """The srun command: a rank per device; if a node fails, the others keep running.

    As in a job, modules and setup are of the host. With pyxis the whole script runs in the
    container, so it has only the environment.
    """
    options = {
        "job-name": name,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "nodes": nodes,
        "ntasks": nodes * cluster.tasks_per_node,
        "ntasks-per-node": cluster.tasks_per_node,
        "gpus-per-node": cluster.gpus_per_node if cluster.num_gpus else "",
        "cpus-per-task": cluster.cpus_per_rank,
        "time": _MINUTES,
    }
    wanted = {key: value for key, value in options.items() if value}
    wanted |= {key: each for key, each in cluster.options.items() if key not in _NOT_OF_SRUN}
    code = Snapshot(out).code
    check = own_arguments(_CHECK, str(out))
    if cluster.container_image:
        check = copied_arguments(code, _CHECK, str(out))
    flags, task = in_container(cluster, check, [out], code)
    script = [
        *([] if flags else host_lines(cluster)),
        f"export {TOKEN}={quote(name)}",
        *environment_lines(cluster),
        f"exec {' '.join(map(quote, task))}",
    ]
    return [
        "srun",
        *option_flags(wanted),
        *flags,
        *option_flags(cluster.srun_options),
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "bash",
        "-c",
        "\n".join(script),
    ]


@contextmanager
def _step(command: Sequence[str], out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """srun while it runs. Afterwards its ranks are asked to exit, and killed if they do not."""
    srun = slurm.start(command)
    try:
        yield srun
    finally:
        (out / END).touch()
        for end in (lambda: None, srun.terminate, srun.kill):
            end()
            try:
                srun.wait(_LEAVE_SECONDS)
                break
            except subprocess.TimeoutExpired:
                continue


def _led(
    out: Path, num_ranks: int, jobs: Sequence[str], is_running: Callable[[], bool]
) -> list[NodeReport]:
    found = gather(out, num_ranks, is_running)
    pairs = pair_up(out, found, is_running)
    nodes = {
        node
        for name in jobs
        for job in slurm.live_jobs(name)
        for node in slurm.node_names(job.nodes)
    }
    (out / END).touch()
    return rate_nodes(found, pairs, missing=sorted(nodes - {one.node for one in found}))


def _print(reports: Sequence[NodeReport], arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps({"nodes": [asdict(report) for report in reports]}))
        return
    from launcher.commands.tables import console, nodes_table

    console().print(nodes_table(reports))
    bad = [report.node for report in reports if report.verdict in ("slow", "broken")]
    if bad and arguments.cluster:
        print(f"to exclude them: 'exclude: {','.join(bad)}' under options: in {arguments.cluster}")
