"""Which nodes are slow or broken, judged by comparing them with each other: pure, without files or clocks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pretrain.processes.node_findings import Found

SLOW_SHARE = 0.7  # of what the others reach


@dataclass(frozen=True, kw_only=True)
class PairResult:
    """What the ranks of two nodes (or of one, where there is no other) found together."""

    hosts: tuple[str, ...]
    bytes_per_second: float | None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """One row of the report; rates per second, None where nothing was measured."""

    host: str
    verdict: str  # ok, busy (strays), link (one connection), slow, broken
    words: tuple[str, ...] = ()  # what is wrong
    device: str = ""
    ranks: int = 0
    matmul_flops: float | None = None  # of its slowest device
    disk_bytes: float | None = None
    link_best: float | None = None
    link_worst: float | None = None


def rounds_of(hosts: Sequence[str]) -> list[list[tuple[str, ...]]]:
    """Every pair once, in rounds in which no node is in two pairs; a node without others is measured alone."""
    if len(hosts) < 2:
        return [[tuple(hosts)]] if hosts else []
    circle: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        facing = zip(circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]), strict=True)
        rounds.append(
            [(one, other) for one, other in facing if one is not None and other is not None]
        )
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def judge(
    found: Sequence[Found], pairs: Sequence[PairResult], missing: Sequence[str]
) -> list[NodeReport]:
    """A report for every node, those that never answered too, by name."""
    by_host: dict[str, list[Found]] = {}
    for one in found:
        by_host.setdefault(one.host, []).append(one)
    reports = [_report(host, by_host, pairs) for host in by_host]
    reports += [
        NodeReport(host=host, verdict="broken", words=("gave no answer",)) for host in missing
    ]
    return sorted(reports, key=lambda report: report.host)


def _report(
    host: str, by_host: Mapping[str, Sequence[Found]], pairs: Sequence[PairResult]
) -> NodeReport:
    own = by_host[host]
    rates = [
        pair.bytes_per_second for pair in pairs if host in pair.hosts and pair.bytes_per_second
    ]
    disk = next((one.disk_bytes for one in own if one.disk_bytes is not None), None)
    broken = _broken_links(host, pairs)
    slow = [
        *_slow_devices(host, by_host),
        *_slow_disk(host, by_host),
        *_slow_in_all_links(host, pairs),
    ]
    links = _slow_links(host, pairs)
    strays = [f"stray: {stray}" for one in own for stray in one.strays or ()]
    if broken and not any(host in pair.hosts and not pair.problem for pair in pairs):
        verdict = "broken"
    else:
        verdict = "slow" if slow else "link" if broken or links else "busy" if strays else "ok"
    return NodeReport(
        host=host,
        verdict=verdict,
        words=(*broken, *slow, *links, *strays),
        device=own[0].device,
        ranks=len(own),
        matmul_flops=min(one.matmul_flops for one in own),
        disk_bytes=disk,
        link_best=max(rates, default=None),
        link_worst=min(rates, default=None),
    )


def _slow_devices(host: str, by_host: Mapping[str, Sequence[Found]]) -> list[str]:
    usual = statistics.median(one.matmul_flops for ranks in by_host.values() for one in ranks)
    return [
        f"rank {one.rank} multiplies matrices at {one.matmul_flops / usual:.0%} of the usual rate"
        for one in by_host[host]
        if one.matmul_flops < SLOW_SHARE * usual
    ]


def _slow_disk(host: str, by_host: Mapping[str, Sequence[Found]]) -> list[str]:
    rates = {
        name: one.disk_bytes
        for name, ranks in by_host.items()
        for one in ranks
        if one.disk_bytes is not None
    }
    usual = statistics.median(rates.values())
    share = rates.get(host, usual) / usual
    return [f"writes to disk at {share:.0%} of the usual rate"] if share < SLOW_SHARE else []


def _slow_in_all_links(host: str, pairs: Sequence[PairResult]) -> list[str]:
    share = _best_share(host, pairs)
    return [f"reduces at {share:.0%} of the others' rate at best"] if share < SLOW_SHARE else []


def _slow_links(host: str, pairs: Sequence[PairResult]) -> list[str]:
    """Slow pairs of two nodes neither of which is slow with all others."""
    slow = {name for pair in pairs for name in pair.hosts if _best_share(name, pairs) < SLOW_SHARE}
    rates = {
        pair.hosts: pair.bytes_per_second
        for pair in pairs
        if pair.bytes_per_second and not slow & {*pair.hosts}
    }
    usual = statistics.median(rates.values()) if rates else 0.0
    return [
        f"reduces with {_partner(hosts, host)} at {rate / usual:.0%} of the usual rate"
        for hosts, rate in rates.items()
        if host in hosts and rate < SLOW_SHARE * usual
    ]


def _best_share(host: str, pairs: Sequence[PairResult]) -> float:
    own = [pair.bytes_per_second for pair in pairs if host in pair.hosts and pair.bytes_per_second]
    others = [
        pair.bytes_per_second for pair in pairs if host not in pair.hosts and pair.bytes_per_second
    ]
    return max(own) / statistics.median(others) if own and others else 1.0


def _broken_links(host: str, pairs: Sequence[PairResult]) -> list[str]:
    return [
        f"with {_partner(pair.hosts, host)}: {pair.problem}"
        if len(pair.hosts) > 1
        else pair.problem
        for pair in pairs
        if host in pair.hosts and pair.problem
    ]


def _partner(hosts: Sequence[str], host: str) -> str:
    return next(name for name in hosts if name != host)
