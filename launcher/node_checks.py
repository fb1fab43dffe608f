"""The logic of a preflight: which ranks measure together, and which nodes are slow or broken.

The launcher and the ranks exchange files in a directory that all nodes see;
`pretrain/processes/node_check.py` is the other side. The rating compares nodes with each other and
is pure.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import UserError
from data_pipeline.files import write_json
from pretrain.processes.node_findings import (
    LinkMeasurement,
    RankMeasurement,
    link_file,
    rank_file,
    round_file,
)

_POLL_SECONDS = 0.1
_ARRIVAL_SECONDS = 90.0  # after the first rank's: how long the others may take to start
_ROUND_SECONDS = 60.0


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


SLOW_FRACTION = 0.7  # of the median of the others


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
    slow = [
        *_slow_devices(node, by_node),
        *_slow_disk(node, by_node),
        *_slow_in_all_links(node, pairs),
    ]
    links = _slow_links(node, pairs)
    strays = [f"stray: {stray}" for one in own for stray in one.strays or ()]
    missing = sorted({one.missing for one in own if one.missing})
    if broken and not any(node in pair.nodes and not pair.problem for pair in pairs):
        verdict = "broken"
    else:
        verdict = (
            "slow" if slow or missing else "link" if broken or links else "busy" if strays else "ok"
        )
    return NodeReport(
        node=node,
        verdict=verdict,
        problems=(*broken, *missing, *slow, *links, *strays),
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
        if one.matmul_flops < SLOW_FRACTION * usual
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
    return [f"writes to disk at {share:.0%} of the usual rate"] if share < SLOW_FRACTION else []


def _slow_in_all_links(node: str, pairs: Sequence[PairResult]) -> list[str]:
    share = _best_share(node, pairs)
    return [f"reduces at {share:.0%} of the others' rate at best"] if share < SLOW_FRACTION else []


def _slow_links(node: str, pairs: Sequence[PairResult]) -> list[str]:
    """Slow pairs of two nodes neither of which is slow with all others."""
    slow = {
        name for pair in pairs for name in pair.nodes if _best_share(name, pairs) < SLOW_FRACTION
    }
    rates = {
        pair.nodes: pair.bytes_per_second
        for pair in pairs
        if pair.bytes_per_second and not slow & {*pair.nodes}
    }
    usual = statistics.median(rates.values()) if rates else 0.0
    return [
        f"reduces with {_partner(nodes, node)} at {rate / usual:.0%} of the usual rate"
        for nodes, rate in rates.items()
        if node in nodes and rate < SLOW_FRACTION * usual
    ]


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
