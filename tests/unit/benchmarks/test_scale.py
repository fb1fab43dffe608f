from __future__ import annotations

from itertools import repeat

import pytest

from benchmarks.scale.failures import exponential, simulate, uniform, weibull
from pretrain.costs.failures import FailureCosts

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


def test_a_seed_repeats_a_simulation_and_another_one_does_not():
    one, again, other = (
        simulate(HOUR, 445.0, exponential(3600.0, seed), 360_000.0) for seed in (1, 1, 2)
    )
    assert one == again != other


def test_times_between_failures_have_their_mean():
    for gaps in (exponential(50.0, 1), weibull(50.0, 0.7, 1), uniform(20.0, 80.0, 1)):
        assert sum(next(gaps) for _ in range(20_000)) / 20_000 == pytest.approx(50.0, rel=0.03)


def test_a_run_without_a_spare_node_waits_for_the_repair():
    def run(spares: int):
        gaps = iter([1000.0, float("inf")])
        return simulate(HOUR, 445.0, gaps, 10_000.0, spares, repair_seconds=5000.0)

    assert (run(0).waiting, run(1).waiting) == (4800.0, 0.0)


def test_the_hour_of_kills_is_predicted():
    # docs/log.md, "100M parameters for an hour, killed every few minutes": 83%.
    costs = FailureCosts(between_failures=270.0, pause=0.014, write=11.3, start=24.5)
    found = [simulate(costs, 23.6, uniform(180.0, 360.0, seed), 3660.0) for seed in range(100)]
    goodput = sorted(each.goodput for each in found)
    assert goodput[5] < 0.83 < goodput[-6]
