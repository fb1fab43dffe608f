"""`launcher preflight`: a short job that finds slow and broken nodes."""

from __future__ import annotations

import argparse
import contextlib
import math
import secrets
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from foundation.cli import check_least
from foundation.errors import UserError
from foundation.files import end_of, named_errors, read_value, write_json
from foundation.programs import copied_arguments, own_arguments, own_command
from foundation.typed_values import json_text
from launcher.slurm.client import Slurm, node_names, start
from launcher.slurm.sbatch import (
    Snapshot,
    check_request,
    cluster_here,
    environment_lines,
    option_flags,
    quote,
)
from launcher.slurm.srun import in_container
from pretrain.config.cluster import ClusterConfig, NodeRange, fixed_nodes
from pretrain.distributed.slurm_variables import GPUS_VARIABLE
from pretrain.processes.local_ranks import RankGroup, gpus_here
from pretrain.processes.node_findings import (
    END,
    LinkMeasurement,
    RankMeasurement,
    link_file,
    measurement_file,
    round_file,
)
from pretrain.terminal.text import si

T = TypeVar("T", RankMeasurement, LinkMeasurement)
EXIT_FOUND_DIFFERENCES = 1
_CHECK = "pretrain.processes.node_check"
_PREFIX = ".preflight-"
_MINUTES = 30  # time limit of the job
_LEAVE_SECONDS = 5.0
_POLL_SECONDS = 0.1
_ARRIVAL_SECONDS = 150.0  # how long the other ranks may take after the first has measured
# LINK_SECONDS of node_check.py, and the time a network file system takes to show a new file.
_ROUND_SECONDS = 200.0
_SLOW_FRACTION = 0.7  # of the median rate, below which a node is slow
_NOT_OF_SRUN = ("requeue", "no-requeue", "export-file")  # options that only sbatch has


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `launcher preflight`."""
    add, here = parser.add_mutually_exclusive_group(required=True).add_argument, Path(".")
    add("--cluster", type=Path, help="on Slurm: cluster file (configs/clusters/*.yaml)")
    add("--local", action="store_true", help="only this machine")
    add, ranks = parser.add_argument, gpus_here() or 2
    words = "with --cluster: number of nodes; 4+1 checks the spare one, too (default %(default)s)"
    add("--nodes", default="2", metavar="N|N+S", help=words)
    words = "with --local: number of ranks (default: one per GPU, or 2)"
    add("--ranks", type=int, default=ranks, help=words)
    add("--directory", type=Path, default=here, help="disk to measure; all nodes must see it")
    add("--json", action="store_true", help="one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Return 0 if all nodes are ok, 1 if one is slow or broken."""
    check_least(arguments, 1, "ranks")
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


def _check_here(num_ranks: int, out: Path) -> list[NodeReport]:
    command = own_command(_CHECK, str(out))
    with RankGroup(command, num_ranks, out / "logs") as ranks:
        try:
            return _lead(out, num_ranks, lambda: None in ranks.poll())
        except UserError as error:
            lines = end_of(ranks.logs[0]).strip().splitlines()
            raise UserError(
                f"{error}; last line of rank 0: {lines[-1] if lines else 'none'}"
            ) from None


def _check_cluster(arguments: argparse.Namespace, out: Path) -> list[NodeReport]:
    cluster = cluster_here(arguments.cluster)
    nodes = fixed_nodes(arguments.nodes).least_of_job
    check_request(cluster, NodeRange(nodes, nodes), Slurm().partitions())
    name = f"preflight-{secrets.token_hex(4)}"
    if cluster.container_image:  # the image has this project's dependencies, but not its code
        Snapshot(out).take_code(script="")
    with _step(srun_line(cluster, nodes, name, out), out) as srun:
        num_ranks = nodes * cluster.tasks_per_node
        return _lead(out, num_ranks, lambda: srun.poll() is None, nodes)


def srun_line(cluster: ClusterConfig, nodes: int, name: str, out: Path) -> list[str]:
    """Return the srun command: a rank per device; if a node fails, the others keep running.

    `setup` is for the host, as in a job. If pyxis runs the script in the container, it is left out.
    """
    options = {
        "job-name": name,
        "chdir": out,  # it identifies the job
        "partition": cluster.partition,
        "nodes": nodes,
        "ntasks": nodes * cluster.tasks_per_node,
        "ntasks-per-node": cluster.tasks_per_node,
        "gpus-per-node": cluster.gpus_per_node if cluster.num_gpus else "",
        "cpus-per-task": cluster.cores_per_rank,
        "time": _MINUTES,
    }
    wanted = {key: value for key, value in options.items() if value}
    wanted |= {key: text for key, text in cluster.options.items() if key not in _NOT_OF_SRUN}
    code = Snapshot(out).code
    check = own_arguments(_CHECK, str(out))
    if cluster.container_image:
        check = copied_arguments(code, _CHECK, str(out))
    flags, task = in_container(cluster, check, [out], code)
    script = [
        *([] if flags else cluster.setup),
        f"export {GPUS_VARIABLE}={cluster.num_gpus}",
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
    """Yield srun while it runs; then ask its ranks to exit, and kill them if they do not."""
    srun = start(command)
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


def _lead(
    out: Path, num_ranks: int, is_running: Callable[[], bool], num_nodes: int = 0
) -> list[NodeReport]:
    """Tell the ranks, here or in a job, what to measure and when to exit; return the report."""
    measured = gather_ranks(out, num_ranks, is_running)
    pairs = pair_up(out, measured, is_running)
    jobs = Slurm().live_jobs(str(out)) if num_nodes else []
    nodes = {node for job in jobs for node in node_names(job.nodes)}
    (out / END).touch()
    missing = sorted(nodes - {one.node for one in measured})
    return rate_nodes(measured, pairs, missing, num_ranks // max(1, num_nodes))


def _print(reports: Sequence[NodeReport], arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json_text({"nodes": [asdict(report) for report in reports]}))
        return
    from launcher.status_tables import console, plain_table

    console().print(plain_table([_row(report) for report in reports]))
    measured = [report for report in reports if not report.node.startswith("all ")]
    bad = [report.node for report in measured if report.verdict in ("slow", "broken")]
    if bad and arguments.cluster:
        print(f"to exclude them: 'exclude: {','.join(bad)}' under options: in {arguments.cluster}")


def _row(report: NodeReport) -> dict[str, str]:
    def rate(value: float | None, unit: str) -> str:
        return "-" if value is None else f"{si(value)}{unit}"

    best = f" to {rate(report.link_best, 'B/s')}" if report.link_best else ""
    return {
        "node": report.node,
        "verdict": report.verdict,
        "ranks": str(report.ranks),
        "device": report.device,
        "matmul": rate(report.matmul_flops, "FLOP/s"),
        "disk": rate(report.disk_bytes, "B/s"),
        "all-reduce": f"{rate(report.link_worst, 'B/s')}{best}",
        "memlock": "unlimited" if report.memlock is None else rate(report.memlock, "B"),
        "/dev/shm": rate(report.shared_memory, "B"),
        "": "; ".join(report.problems),
    }


def gather_ranks(
    out: Path, num_ranks: int, is_running: Callable[[], bool]
) -> list[RankMeasurement]:
    """Return what the ranks that responded in time measured alone; UserError if none did."""
    files = {rank: out / measurement_file(rank) for rank in range(num_ranks)}
    ranks = _collected(files, RankMeasurement, is_running, seconds_after_first=_ARRIVAL_SECONDS)
    if not ranks:
        raise UserError("the ranks exited before any of them had measured anything")
    return [ranks[rank] for rank in sorted(ranks)]


def pair_up(
    out: Path, measured: Sequence[RankMeasurement], is_running: Callable[[], bool]
) -> list[PairResult]:
    """Measure every pair of nodes once, then all nodes together, as a run does. Leave out a node if
    one of its ranks cannot train, or if it did not respond in an earlier round."""
    ranks: dict[str, list[int]] = {}
    for one in measured:
        ranks.setdefault(one.node, []).append(one.rank)
    for node in {one.node for one in measured if one.problem}:
        del ranks[node]
    results, unresponsive = [], set()
    rounds = [*pair_rounds(list(ranks)), *([[tuple(ranks)]] if len(ranks) > 2 else [])]
    for number, pairs in enumerate(rounds):
        if len(pairs[0]) > 2:
            pairs = [tuple(node for node in pairs[0] if node not in unresponsive)]
        groups = {
            nodes: [rank for node in nodes for rank in ranks[node]]
            for nodes in pairs
            if not unresponsive & set(nodes) and sum(len(ranks[node]) for node in nodes) > 1
        }
        write_json(out / round_file(number), {"groups": list(groups.values())})
        asked = [rank for group in groups.values() for rank in group]
        files = {rank: out / link_file(number, rank) for rank in asked}
        links = _collected(files, LinkMeasurement, is_running, seconds=_ROUND_SECONDS)
        for nodes, group in groups.items():
            unresponsive |= {node for node in nodes if not links.keys() >= set(ranks[node])}
            answers = [links[rank] for rank in group if rank in links]
            problems = [link.problem for link in answers if link.problem]
            if len(answers) < len(group):
                absent = [rank for rank in group if rank not in links]
                problems.append(f"rank {absent[0]} did not respond")
            rates = [link.bytes_per_second for link in answers if link.bytes_per_second]
            slowest = min(rates) if len(rates) == len(group) else None
            problem = problems[0] if problems else ""
            results.append(PairResult(nodes=nodes, bytes_per_second=slowest, problem=problem))
    return results


def _collected(
    files: Mapping[int, Path],
    kind: type[T],
    is_running: Callable[[], bool],
    *,
    seconds: float = math.inf,
    seconds_after_first: float = math.inf,
) -> dict[int, T]:
    """Return rank -> what it has written into its file in time."""
    answers: dict[int, T] = {}
    deadline = time.monotonic() + seconds
    while len(answers) < len(files) and time.monotonic() < deadline:
        is_last = not is_running()
        for rank in files.keys() - answers.keys():
            with contextlib.suppress(OSError, ValueError):
                answers[rank] = read_value(kind, files[rank])
                deadline = min(deadline, time.monotonic() + seconds_after_first)
        if is_last:
            break
        time.sleep(_POLL_SECONDS)
    return answers


@dataclass(frozen=True, kw_only=True)
class PairResult:
    """What the ranks of two nodes, of all, or of the only one measured together."""

    nodes: tuple[str, ...]
    bytes_per_second: float | None
    problem: str = ""

    @property
    def is_of_all(self) -> bool:
        return len(self.nodes) > 2


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """A row of the report; rates per second, None if nothing was measured."""

    node: str
    verdict: str  # ok, link (some connections are broken), slow, broken
    problems: tuple[str, ...] = ()  # what is wrong
    device: str = ""
    ranks: int = 0
    matmul_flops: float | None = None  # of its slowest device
    disk_bytes: float | None = None
    link_best: float | None = None
    link_worst: float | None = None
    memlock: int | None = None  # None: unlimited
    shared_memory: int | None = None


def pair_rounds(nodes: Sequence[str]) -> list[list[tuple[str, ...]]]:
    """Return every pair once, in rounds where no node is in two pairs; a single node alone."""
    if len(nodes) < 2:
        return [[tuple(nodes)]] if nodes else []
    circle: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        facing = zip(circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]), strict=True)
        rounds.append(
            [(one, other) for one, other in facing if one is not None and other is not None]
        )
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def rate_nodes(
    measured: Sequence[RankMeasurement],
    pairs: Sequence[PairResult],
    missing: Sequence[str],
    ranks_of_node: int = 1,
) -> list[NodeReport]:
    """Return a report for every node by name, also for `missing` ones; and one for all together if
    that measurement failed."""
    by_node: dict[str, list[RankMeasurement]] = {}
    for one in measured:
        by_node.setdefault(one.node, []).append(one)
    unfit = {node: _unfit(ranks, ranks_of_node) for node, ranks in by_node.items()}
    fit = {node: ranks for node, ranks in by_node.items() if not unfit[node]}
    reports = [_report(node, fit, [pair for pair in pairs if not pair.is_of_all]) for node in fit]
    for node in by_node.keys() - fit.keys():
        ranks, device = len(by_node[node]), by_node[node][0].device
        reports.append(_broken(node, unfit[node], ranks=ranks, device=device))
    reports += [_broken(node, "did not respond") for node in missing]
    reports.sort(key=lambda report: report.node)
    together = [pair for pair in pairs if pair.is_of_all and pair.problem]
    return reports + [_broken(f"all {len(pair.nodes)}", pair.problem) for pair in together]


def _broken(node: str, problem: str, **more: Any) -> NodeReport:
    return NodeReport(node=node, verdict="broken", problems=(problem,), **more)


def _unfit(ranks: Sequence[RankMeasurement], ranks_of_node: int) -> str:
    """Return why a node cannot train, whatever its connections; '' if it can."""
    few = f"{len(ranks)} of {ranks_of_node} ranks responded" if len(ranks) < ranks_of_node else ""
    return next((one.problem for one in ranks if one.problem), few)


def _report(
    node: str, by_node: Mapping[str, Sequence[RankMeasurement]], pairs: Sequence[PairResult]
) -> NodeReport:
    own = by_node[node]
    own_pairs = [pair for pair in pairs if node in pair.nodes]
    rates = [pair.bytes_per_second for pair in own_pairs if pair.bytes_per_second]
    others = [pair.bytes_per_second for pair in pairs if node not in pair.nodes]
    broken = []
    for pair in own_pairs:
        if pair.problem:
            partner = "".join(f"with {name}: " for name in pair.nodes if name != node)
            broken.append(f"{partner}{pair.problem}")
    disks = {
        name: disk
        for name, ranks in by_node.items()
        if (disk := next((one.disk_bytes for one in ranks if one.disk_bytes is not None), None))
    }
    usual = statistics.median(one.matmul_flops for ranks in by_node.values() for one in ranks)
    slow = [
        f"rank {one.rank} multiplies matrices at {one.matmul_flops / usual:.0%} of the usual rate"
        for one in own
        if one.matmul_flops < _SLOW_FRACTION * usual
    ]
    disk = disks.get(node)
    if disk and (share := disk / statistics.median(disks.values())) < _SLOW_FRACTION:
        slow.append(f"writes to disk at {share:.0%} of the usual rate")
    compared = [rate for rate in others if rate]
    share = max(rates) / statistics.median(compared) if rates and compared else 1.0
    if share < _SLOW_FRACTION:
        slow.append(f"reduces at {share:.0%} of the others' rate at best")
    missing = sorted({one.missing for one in own if one.missing})
    if broken and len(broken) == len(own_pairs):
        verdict = "broken"
    else:
        verdict = "slow" if slow or missing else "link" if broken else "ok"
    return NodeReport(
        node=node,
        verdict=verdict,
        problems=(*broken, *missing, *slow),
        device=own[0].device,
        ranks=len(own),
        matmul_flops=min(one.matmul_flops for one in own),
        disk_bytes=disk,
        link_best=max(rates, default=None),
        link_worst=min(rates, default=None),
        memlock=min((one.memlock for one in own if one.memlock is not None), default=None),
        shared_memory=min(one.shared_memory for one in own),
    )
