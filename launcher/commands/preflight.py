"""`launcher preflight`: a short job that finds slow and broken nodes."""

from __future__ import annotations

import argparse
import contextlib
import json
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

from foundation.errors import ConfigError, UserError
from foundation.files import named_errors, write_json
from foundation.own_programs import copied_arguments, own_arguments, own_command
from launcher.slurm import client as slurm
from launcher.slurm.job_checks import check_request
from launcher.slurm.sbatch import environment_lines, option_flags, quote
from launcher.slurm.snapshot import Snapshot
from launcher.slurm.srun import in_container
from pretrain.costs.cluster import ClusterConfig, NodeRange, fixed_nodes, load_cluster
from pretrain.costs.devices import MOST_RANKS
from pretrain.processes.local_ranks import RankGroup
from pretrain.processes.node_findings import (
    END,
    TOKEN,
    LinkMeasurement,
    RankMeasurement,
    link_file,
    rank_file,
    round_file,
)
from pretrain.terminal.text import si

EXIT_FOUND_DIFFERENCES = 1
_CHECK = "pretrain.processes.node_check"
_PREFIX = ".preflight-"
_MINUTES = 15
_LEAVE_SECONDS = 5.0
_POLL_SECONDS = 0.1
_ARRIVAL_SECONDS = 90.0  # after the first rank's: how long the others may take to start
_ROUND_SECONDS = 60.0
_SLOW_FRACTION = 0.7  # of the median of the others
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
        default=len(list(Path("/dev").glob("nvidia[0-9]*"))) or 2,
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

    As in a job, `setup` is of the host. With pyxis the whole script runs in the
    container, so it has only the environment.
    """
    options = {
        "job-name": name,
        "partition": cluster.partition,
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
        *([] if flags else cluster.setup),
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
    from launcher.commands.tables import console, plain_table

    console().print(plain_table([_row(report) for report in reports]))
    bad = [report.node for report in reports if report.verdict in ("slow", "broken")]
    if bad and arguments.cluster:
        print(f"to exclude them: 'exclude: {','.join(bad)}' under options: in {arguments.cluster}")


def _row(report: NodeReport) -> dict[str, str]:
    best = f" to {_rate(report.link_best, 'B/s')}" if report.link_best else ""
    return {
        "node": report.node,
        "verdict": report.verdict,
        "ranks": str(report.ranks),
        "device": report.device,
        "matmul": _rate(report.matmul_flops, "FLOP/s"),
        "disk": _rate(report.disk_bytes, "B/s"),
        "all-reduce": f"{_rate(report.link_worst, 'B/s')}{best}",
        "": "; ".join(report.problems),
    }


def _rate(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{si(value)}{unit}"


def gather(out: Path, num_ranks: int, is_running: Callable[[], bool]) -> list[RankMeasurement]:
    """What each rank measured alone, of all that responded in time; UserError if none did."""
    found: dict[int, RankMeasurement] = {}
    deadline = None
    while len(found) < num_ranks and (deadline is None or time.monotonic() < deadline):
        for rank in range(num_ranks):
            if rank not in found and (tree := _read(out / rank_file(rank))) is not None:
                found[rank] = RankMeasurement(**tree)
                deadline = deadline or time.monotonic() + _ARRIVAL_SECONDS
        if not is_running():
            break
        time.sleep(_POLL_SECONDS)
    if not found:
        raise UserError("the ranks exited before any of them had measured anything")
    return [found[rank] for rank in sorted(found)]


def pair_up(
    out: Path, found: Sequence[RankMeasurement], is_running: Callable[[], bool]
) -> list[PairResult]:
    """Measure every pair of nodes once.

    A node that does not respond in a round is left out of later ones.
    """
    ranks = {
        node: [one.rank for one in found if one.node == node]
        for node in dict.fromkeys(one.node for one in found)
    }
    results, unresponsive = [], set()
    for number, pairs in enumerate(rounds_of(list(ranks))):
        pairs = [
            nodes
            for nodes in pairs
            if not unresponsive & set(nodes) and sum(len(ranks[node]) for node in nodes) > 1
        ]
        groups = [[rank for node in nodes for rank in ranks[node]] for nodes in pairs]
        write_json(out / round_file(number), {"groups": groups})
        links = _links_of_round(
            out, number, [rank for group in groups for rank in group], is_running
        )
        for nodes, group in zip(pairs, groups, strict=True):
            unresponsive |= {
                node for node in nodes if any(rank not in links for rank in ranks[node])
            }
            results.append(_joined(nodes, [links.get(rank) for rank in group]))
    return results


def _links_of_round(
    out: Path, number: int, ranks: Sequence[int], is_running: Callable[[], bool]
) -> dict[int, LinkMeasurement]:
    links: dict[int, LinkMeasurement] = {}
    deadline = time.monotonic() + _ROUND_SECONDS
    while len(links) < len(ranks) and time.monotonic() < deadline and is_running():
        for rank in ranks:
            if rank not in links and (tree := _read(out / link_file(number, rank))) is not None:
                links[rank] = LinkMeasurement(**tree)
        time.sleep(_POLL_SECONDS)
    return links


def _joined(nodes: tuple[str, ...], links: Sequence[LinkMeasurement | None]) -> PairResult:
    answers = [link for link in links if link is not None]
    problems = [link.problem for link in answers if link.problem]
    if len(answers) < len(links):
        problems.append("a rank did not respond")
    rates = [link.bytes_per_second for link in answers if link.bytes_per_second]
    return PairResult(
        nodes=nodes,
        bytes_per_second=min(rates) if len(rates) == len(links) else None,
        problem=problems[0] if problems else "",
    )


def _read(path: Path) -> dict | None:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return None


@dataclass(frozen=True, kw_only=True)
class PairResult:
    """What the ranks of two nodes (or of one, if there is no other) measured together."""

    nodes: tuple[str, ...]
    bytes_per_second: float | None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """A row of the report; rates per second, None if nothing was measured."""

    node: str
    verdict: str  # ok, busy (strays), link (one connection), slow, broken
    problems: tuple[str, ...] = ()  # what is wrong
    device: str = ""
    ranks: int = 0
    matmul_flops: float | None = None  # of its slowest device
    disk_bytes: float | None = None
    link_best: float | None = None
    link_worst: float | None = None


def rounds_of(nodes: Sequence[str]) -> list[list[tuple[str, ...]]]:
    """Every pair once, in rounds in which no node is in two pairs.

    A node without others is measured alone.
    """
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
    found: Sequence[RankMeasurement], pairs: Sequence[PairResult], missing: Sequence[str]
) -> list[NodeReport]:
    """A report for every node, also those that never responded, by name."""
    by_node: dict[str, list[RankMeasurement]] = {}
    for one in found:
        by_node.setdefault(one.node, []).append(one)
    reports = [_report(node, by_node, pairs) for node in by_node]
    reports += [
        NodeReport(node=node, verdict="broken", problems=("did not respond",)) for node in missing
    ]
    return sorted(reports, key=lambda report: report.node)


def _report(
    node: str, by_node: Mapping[str, Sequence[RankMeasurement]], pairs: Sequence[PairResult]
) -> NodeReport:
    own = by_node[node]
    rates = [
        pair.bytes_per_second for pair in pairs if node in pair.nodes and pair.bytes_per_second
    ]
    disk = next((one.disk_bytes for one in own if one.disk_bytes is not None), None)
    broken = _broken_links(node, pairs)
    slow = [*_slow_devices(node, by_node), *_slow_disk(node, by_node)]
    if (share := _best_share(node, pairs)) < _SLOW_FRACTION:
        slow.append(f"reduces at {share:.0%} of the others' rate at best")
    strays = [f"stray: {stray}" for one in own for stray in one.strays or ()]
    missing = sorted({one.missing for one in own if one.missing})
    if broken and not any(node in pair.nodes and not pair.problem for pair in pairs):
        verdict = "broken"
    else:
        verdict = "slow" if slow or missing else "link" if broken else "busy" if strays else "ok"
    return NodeReport(
        node=node,
        verdict=verdict,
        problems=(*broken, *missing, *slow, *strays),
        device=own[0].device,
        ranks=len(own),
        matmul_flops=min(one.matmul_flops for one in own),
        disk_bytes=disk,
        link_best=max(rates, default=None),
        link_worst=min(rates, default=None),
    )


def _slow_devices(node: str, by_node: Mapping[str, Sequence[RankMeasurement]]) -> list[str]:
    usual = statistics.median(one.matmul_flops for ranks in by_node.values() for one in ranks)
    return [
        f"rank {one.rank} multiplies matrices at {one.matmul_flops / usual:.0%} of the usual rate"
        for one in by_node[node]
        if one.matmul_flops < _SLOW_FRACTION * usual
    ]


def _slow_disk(node: str, by_node: Mapping[str, Sequence[RankMeasurement]]) -> list[str]:
    rates = {
        name: one.disk_bytes
        for name, ranks in by_node.items()
        for one in ranks
        if one.disk_bytes is not None
    }
    usual = statistics.median(rates.values())
    share = rates.get(node, usual) / usual
    return [f"writes to disk at {share:.0%} of the usual rate"] if share < _SLOW_FRACTION else []


def _best_share(node: str, pairs: Sequence[PairResult]) -> float:
    own = [pair.bytes_per_second for pair in pairs if node in pair.nodes and pair.bytes_per_second]
    others = [
        pair.bytes_per_second for pair in pairs if node not in pair.nodes and pair.bytes_per_second
    ]
    return max(own) / statistics.median(others) if own and others else 1.0


def _broken_links(node: str, pairs: Sequence[PairResult]) -> list[str]:
    return [
        f"with {_partner(pair.nodes, node)}: {pair.problem}"
        if len(pair.nodes) > 1
        else pair.problem
        for pair in pairs
        if node in pair.nodes and pair.problem
    ]


def _partner(nodes: Sequence[str], node: str) -> str:
    return next(name for name in nodes if name != node)
