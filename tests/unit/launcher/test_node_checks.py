from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from launcher.commands.preflight import PairResult, rate_nodes, rounds_of
from pretrain.processes.node_findings import RankMeasurement

NODES = ["n1", "n2", "n3", "n4"]
FAST, SLOW = 100e6, 20e6


def found(
    rank: int, node: str, matmul: float = 50e9, disk: float | None = 1e9, strays=()
) -> RankMeasurement:
    return RankMeasurement(
        rank=rank,
        node=node,
        device="CPU",
        matmul_flops=matmul,
        disk_bytes=disk,
        strays=list(strays) if disk else None,
    )


def pairs(**odd: PairResult | float | str) -> list[PairResult]:
    """All pairs of NODES at the fast rate, but those named `n1_n3`: another rate, or a problem."""
    results = []
    for nodes in combinations(NODES, 2):
        what = odd.get("_".join(nodes), FAST)
        problem = what if isinstance(what, str) else ""
        rate = what if isinstance(what, float) else None
        results.append(PairResult(nodes=nodes, bytes_per_second=rate, problem=problem))
    return results


def verdicts(ranks=None, results=None, missing=()) -> dict[str, tuple[str, str]]:
    ranks = ranks or [found(rank, node) for rank, node in enumerate(NODES)]
    reports = rate_nodes(ranks, pairs() if results is None else results, missing)
    return {report.node: (report.verdict, "; ".join(report.problems)) for report in reports}


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_every_pair_is_measured_once_and_no_node_twice_at_a_time(count):
    nodes = [f"n{number}" for number in range(count)]
    rounds = rounds_of(nodes)
    measured = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert sorted(map(sorted, measured)) == sorted(map(sorted, combinations(nodes, 2)))
    for pairs_at_once in rounds:
        busy = [node for pair in pairs_at_once for node in pair]
        assert len(busy) == len(set(busy))


def test_a_single_node_is_measured_alone():
    assert rounds_of(["n1"]) == [[("n1",)]]
    assert rounds_of([]) == []


def test_equal_nodes_are_well():
    assert set(verdicts().values()) == {("ok", "")}


def test_a_node_that_is_slow_with_all_others_is_named_and_they_are_not():
    said = verdicts(results=pairs(n1_n3=SLOW, n2_n3=SLOW, n3_n4=SLOW))
    assert said["n3"] == ("slow", "reduces at 20% of the others' rate at best")
    assert [said[node][0] for node in ("n1", "n2", "n4")] == ["ok"] * 3


def test_a_node_that_reaches_nobody_is_broken_and_one_lost_connection_is_told_as_one():
    said = verdicts(
        results=pairs(n1_n3="no connection", n2_n3="no connection", n3_n4="no connection")
    )
    assert said["n3"][0] == "broken"
    assert said["n1"] == ("link", "with n3: no connection")
    wrong = verdicts(results=pairs(n1_n2="sums over the ranks were wrong"))
    assert wrong["n2"] == ("link", "with n1: sums over the ranks were wrong")


def test_a_node_without_an_answer_is_broken():
    assert verdicts(missing=["n9"])["n9"] == ("broken", "did not respond")


def test_slow_devices_and_disks_are_told_against_the_median():
    ranks = [found(0, "n1"), found(1, "n2", matmul=25e9), found(2, "n3", disk=1e8), found(3, "n4")]
    said = verdicts(ranks)
    assert said["n2"] == ("slow", "rank 1 multiplies matrices at 50% of the usual rate")
    assert said["n3"] == ("slow", "writes to disk at 10% of the usual rate")
    assert said["n1"] == ("ok", "")


def test_strays_make_a_node_busy():
    ranks = [
        found(0, "n1", strays=["python (17) keeps a core busy"]),
        *(found(1, node) for node in NODES[1:]),
    ]
    assert verdicts(ranks)["n1"] == ("busy", "stray: python (17) keeps a core busy")


def test_two_nodes_can_not_be_compared_but_a_lost_connection_breaks_both():
    ranks = [found(0, "n1"), found(1, "n2")]
    slow = [PairResult(nodes=("n1", "n2"), bytes_per_second=SLOW)]
    assert set(verdicts(ranks, slow).values()) == {("ok", "")}
    lost = [PairResult(nodes=("n1", "n2"), bytes_per_second=None, problem="no connection")]
    assert {verdict for verdict, _ in verdicts(ranks, lost).values()} == {"broken"}


def test_a_node_that_cannot_compile_kernels_is_slow_and_says_what_it_lacks():
    lacking = replace(found(1, "n2"), missing="there is no C compiler")
    others = [found(rank, node) for rank, node in enumerate(NODES) if node != "n2"]
    reports = {one.node: one for one in rate_nodes([lacking, *others], pairs(), ())}
    assert (reports["n2"].verdict, reports["n2"].problems) == ("slow", ("there is no C compiler",))
    assert {reports[name].verdict for name in ("n1", "n3", "n4")} == {"ok"}
