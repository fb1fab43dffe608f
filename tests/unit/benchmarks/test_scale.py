import math
import subprocess
from dataclasses import replace
from itertools import repeat

import pytest

from benchmarks.scale.attempts import explain, write_ends
from benchmarks.scale.checkpoints import costs_of
from benchmarks.scale.costs import Cost, table_of
from benchmarks.scale.failure_table import HOUR_COSTS
from benchmarks.scale.failures import exponential, simulate, uniform
from benchmarks.scale.growth import growth_of
from benchmarks.scale.instruments import counted_files
from foundation.files import write_text
from pretrain.costs.run_time import FailureCosts
from pretrain.rundir.attempt_files import AttemptFiles

HOUR = FailureCosts(between_failures=3600.0, pause=30.0, write=100.0, down=200.0, start=300.0)
NO_FAILURES = repeat(float("inf"))


def test_a_run_without_failures_only_starts_trains_and_saves():
    found = simulate(HOUR, 170.0, NO_FAILURES, 300.0 + 10 * 200.0)
    assert (found.starting, found.saving, found.training) == (300.0, 300.0, 1700.0)
    assert found.goodput == 1700 / 2300


def test_a_failure_repeats_what_is_not_published():
    # Saves are copied at 500 and 700 and published at 600 and 800; it fails at 750.
    found = simulate(HOUR, 170.0, iter([750.0, float("inf")]), 1250.0)
    assert (found.repeated, found.down, found.starting) == (220.0, 200.0, 600.0)
    assert (found.saving, found.training) == (60.0, 170.0)


def test_a_failure_while_it_starts_starts_it_again_and_one_while_it_is_down_changes_nothing():
    found = simulate(HOUR, 170.0, iter([100.0, 50.0, float("inf")]), 600.0)
    assert (found.failures, found.down, found.starting, found.training) == (2, 200.0, 400.0, 0.0)


def test_a_save_waits_for_the_one_before():
    found = simulate(HOUR, 40.0, NO_FAILURES, 300.0 + 70.0 + 40.0 + 90.0 + 5.0)
    assert (found.training, found.saving) == (85.0, 30.0 + 90.0)


@pytest.mark.parametrize("interval", [120.0, 445.0, 2000.0])
def test_simulated_goodput_is_that_of_the_formula(interval):
    found = simulate(HOUR, interval, exponential(3600.0, seed=1), 3600.0 * 2000)
    assert found.goodput == pytest.approx(HOUR.goodput(interval), rel=0.015)


def test_the_best_interval_is_best_in_the_simulation():
    best, *others = (
        simulate(HOUR, factor * HOUR.best_interval, exponential(3600.0, seed=1), 3600.0 * 2000)
        for factor in (1.0, 0.4, 2.5)
    )
    assert all(each.goodput < best.goodput for each in others)


def test_a_run_without_a_spare_node_waits_for_the_repair():
    def run(spares: int):
        gaps = iter([1000.0, float("inf")])
        return simulate(HOUR, 445.0, gaps, 10_000.0, spares, repair_seconds=5000.0)

    assert (run(0).waiting, run(1).waiting) == (4800.0, 0.0)


def test_the_hour_of_kills_is_predicted():
    # docs/log.md, "100M parameters for an hour, killed every few minutes": 83%.
    found = [simulate(HOUR_COSTS, 23.6, uniform(180.0, 360.0, seed), 3660.0) for seed in range(100)]
    goodput = sorted(each.goodput for each in found)
    assert goodput[5] < 0.83 < goodput[-6]


@pytest.mark.parametrize(
    ("law", "cost"),
    [
        ("constant", lambda size: 7.0),
        ("constant", lambda size: 9 - 0.01 * size),
        ("log", lambda size: 1 + 2 * math.log2(size)),
        ("linear", lambda size: 3 + 0.5 * size),
        ("linear", lambda size: (3 + 0.5 * size) * (1.05 if size == 16 else 0.96)),
    ],
)
def test_the_law_of_growth_is_found_and_extrapolated(law, cost):
    found = growth_of({size: cost(size) for size in (4, 16, 64, 256)})
    assert found.law == law
    if cost(4) < cost(8):
        assert found.at(4096) == pytest.approx(cost(4096), rel=0.1)


def test_a_goal_is_judged_at_4096_ranks():
    measured = {4: 4.0, 16: 16.0, 64: 64.0}
    cost = Cost(name="files", measured=measured, at_most=4096.5, detail="counted")
    met, missed = cost, replace(cost, at_most=2048.0)
    assert met.is_met
    assert not missed.is_met
    rows = [line.split("|") for line in table_of([met, missed]).splitlines()[2:]]
    assert [row[8].strip() for row in rows] == ["met", "MISSED, 2x"]
    assert [cell.strip() for cell in rows[0][4:7]] == ["64", "512", "4,096"]


def test_opened_files_are_counted_in_whatever_language_opens_them(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).touch()
    with counted_files(tmp_path) as counts:
        (tmp_path / "one").read_bytes()
        subprocess.run(["cat", str(tmp_path / "two"), str(tmp_path / "one")], check=True)
        write_text(tmp_path / "three", "text")
    assert counts == {"opened": 4, "created": 1, "moved in": 1}


def test_a_killed_rank_is_found_among_many_by_opening_each_status_once(tmp_path):
    attempt = AttemptFiles(tmp_path / "logs", 0)
    attempt.directory.mkdir(parents=True)
    write_ends(attempt, 40)
    with counted_files(attempt.directory) as counts:
        explain(attempt, 40)
    assert counts["opened"] == 41


def test_the_costs_of_a_checkpoint_are_those_of_its_files(tmp_path):
    found = dict(costs_of(tmp_path, 12))
    assert found["files"] == 12 + 2
    assert (found["opened"], found["share"]) == (1, pytest.approx(1.0, rel=0.02))
    assert not any(tmp_path.iterdir()), "the checkpoint was removed"
