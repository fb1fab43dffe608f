from __future__ import annotations

import numpy as np
import pytest

from data_pipeline.lanes.lane_plan import key_of, permutation, sort_order


@pytest.mark.parametrize("make", [permutation, sort_order])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 1000, 4097])
def test_every_element_comes_exactly_once(make, count):
    for key in (0, 1, key_of(7, "units", 3)):
        assert sorted(make(count, key).tolist()) == list(range(count))


def test_orders_are_the_ones_that_runs_in_progress_were_started_with():
    # A change here would make every saved lane cursor point to other documents.
    assert key_of(1, "units", 0) == 9209605677321089508
    assert key_of(np.int64(1), "units", np.int32(0)) == key_of(1, "units", 0)
    assert permutation(10, key_of(1, "units", 0)).tolist() == [0, 2, 3, 1, 9, 6, 4, 5, 8, 7]
    assert sort_order(10, key_of(1, "documents", 0, 4)).tolist() == [6, 3, 9, 8, 7, 5, 4, 0, 2, 1]


@pytest.mark.parametrize("make", [permutation, sort_order])
def test_each_key_gives_another_order_and_no_position_is_preferred(make):
    orders = np.array([make(8, key_of(seed, "units", 0)) for seed in range(4000)])
    assert len(np.unique(orders, axis=0)) > 3500  # of 8! = 40320
    counts = np.array([np.bincount(column, minlength=8) for column in orders.T])
    # Each of the 64 cells expects 500; 6 standard deviations of 21.
    assert np.abs(counts - 500).max() < 126
