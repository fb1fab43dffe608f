import numpy as np
import pytest

from data_pipeline.lanes.lane_plan import LanePlan, check_lanes, comfortable_lanes
from data_pipeline.lanes.random_order import key_of, permutation, sort_order
from foundation.errors import DataError


def make_plan(shards: list[list[int]], num_lanes: int, seed: int = 3) -> LanePlan:
    lengths = [np.array(shard) for shard in shards]
    return LanePlan([*map(sum, shards)], num_lanes, seed, lambda unit: lengths[unit])


@pytest.mark.parametrize("num_units", [500, 100_000])
def test_document_lengths_are_needed_only_for_units_that_a_lane_touches(num_units):
    requested = []
    lengths = np.full(100, 10)

    def document_lengths(unit):
        requested.append(unit)
        return lengths

    plan = LanePlan([1000] * num_units, num_units // 10, 1, document_lengths)
    plan.walk(7, 0, 5000).take(64)
    # The units where the lane and the next one start, and the current one.
    assert len(set(requested)) <= 3


def test_epochs_have_different_orders():
    plan = make_plan([[5] * 8] * 8, 2)
    first, second = plan.epoch_order(0).units, plan.epoch_order(1).units
    assert first.tolist() != second.tolist()
    assert plan.unit_layout(0, 3).documents.tolist() != plan.unit_layout(1, 3).documents.tolist()


def test_lanes_without_documents_are_rejected_with_the_number_that_fits():
    with pytest.raises(DataError, match=r"8 lanes.* 1 lanes"):
        check_lanes(make_plan([[100], [10]], 8), longest_whole=100)


def test_short_lanes_are_advised_against_and_ample_ones_are_not():
    long = make_plan([[1000] * 20, [10] * 500], 18)
    assert " 16 lanes" in check_lanes(long, longest_whole=1000)
    ample = check_lanes(make_plan([[10] * 100] * 4, 40), longest_whole=10)
    assert " 20 lanes" in ample
    few = comfortable_lanes(25_000, 1000)
    assert few == 16, "what `pretrain new` writes for little text is not advised against"
    assert check_lanes(make_plan([[1000] * 20, [10] * 500], few), longest_whole=1000) == ""
    assert check_lanes(make_plan([[10] * 100] * 4, 10), longest_whole=10) == ""


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
