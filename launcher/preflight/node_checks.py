"""Leads the ranks of a preflight through their rounds, by files in a directory that all of them see."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from data_pipeline.errors import UserError
from data_pipeline.files import write_json
from launcher.preflight.node_report import PairResult, rounds_of
from pretrain.processes.node_findings import Found, Link, link_file, rank_file, round_file

_POLL_SECONDS = 0.1
_ARRIVAL_SECONDS = 90.0  # after the first rank's: how long the others may take to start
_ROUND_SECONDS = 60.0


def gather(out: Path, num_ranks: int, is_running: Callable[[], bool]) -> list[Found]:
    """What each rank found alone, of all that came in time; UserError if none came."""
    found: dict[int, Found] = {}
    deadline = None
    while len(found) < num_ranks and (deadline is None or time.monotonic() < deadline):
        for rank in range(num_ranks):
            if rank not in found and (tree := _read(out / rank_file(rank))) is not None:
                found[rank] = Found(**tree)
                deadline = deadline or time.monotonic() + _ARRIVAL_SECONDS
        if not is_running():
            break
        time.sleep(_POLL_SECONDS)
    if not found:
        raise UserError("the check's ranks ended before any of them had answered")
    return [found[rank] for rank in sorted(found)]


def pair_up(out: Path, found: Sequence[Found], is_running: Callable[[], bool]) -> list[PairResult]:
    """Every pair of nodes measured once. A node that gives no answer in one round is left out of the next ones."""
    ranks = {
        host: [one.rank for one in found if one.host == host]
        for host in dict.fromkeys(one.host for one in found)
    }
    results, silent = [], set()
    for number, pairs in enumerate(rounds_of(list(ranks))):
        pairs = [
            hosts
            for hosts in pairs
            if not silent & set(hosts) and sum(len(ranks[host]) for host in hosts) > 1
        ]
        groups = [[rank for host in hosts for rank in ranks[host]] for hosts in pairs]
        write_json(out / round_file(number), {"groups": groups})
        links = _links_of_round(
            out, number, [rank for group in groups for rank in group], is_running
        )
        for hosts, group in zip(pairs, groups, strict=True):
            silent |= {host for host in hosts if any(rank not in links for rank in ranks[host])}
            results.append(_joined(hosts, [links.get(rank) for rank in group]))
    return results


def _links_of_round(
    out: Path, number: int, ranks: Sequence[int], is_running: Callable[[], bool]
) -> dict[int, Link]:
    links: dict[int, Link] = {}
    deadline = time.monotonic() + _ROUND_SECONDS
    while len(links) < len(ranks) and time.monotonic() < deadline and is_running():
        for rank in ranks:
            if rank not in links and (tree := _read(out / link_file(number, rank))) is not None:
                links[rank] = Link(**tree)
        time.sleep(_POLL_SECONDS)
    return links


def _joined(hosts: tuple[str, ...], links: Sequence[Link | None]) -> PairResult:
    answers = [link for link in links if link is not None]
    problems = [link.problem for link in answers if link.problem]
    if len(answers) < len(links):
        problems.append("a rank gave no answer")
    rates = [link.bytes_per_second for link in answers if link.bytes_per_second]
    return PairResult(
        hosts=hosts,
        bytes_per_second=min(rates) if len(rates) == len(links) else None,
        problem=problems[0] if problems else "",
    )


def _read(path: Path) -> dict | None:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return None
