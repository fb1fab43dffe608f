from __future__ import annotations

import pytest

from pretrain.metrics.stragglers import StallMeter, rank_that_stalled


def lost(*steps: float) -> float:
    meter = StallMeter()
    for seconds in steps:
        meter.observe(seconds)
    return meter.take()


def test_only_a_step_far_beyond_the_usual_by_seconds_and_by_ratio_is_a_stall():
    assert lost(*[0.1] * 5, 20.1, 0.1) == pytest.approx(20.0)
    assert lost(*[0.1] * 5, 2.0) == 0, "a hiccup of short steps"
    assert lost(*[30.0] * 5, 60.0) == 0, "long steps vary by more"
    assert lost(40.0, *[0.1] * 5) == 0, "the first step compiles kernels"


@pytest.mark.parametrize(
    ("standstill_R", "busy_R", "rank"),
    [
        ([0.0, 20.0], [0.1, 0.1], 1),  # stopped while it was in a collective
        ([0.0, 0.0], [0.1, 19.0], 1),  # its storage hung while it waited for data
        ([20.0, 20.0], [0.1, 0.1], None),  # the job was suspended
        ([0.0, 0.0], [0.1, 0.1], None),  # the network
        ([20.0], [0.1], None),
    ],
)
def test_the_rank_that_the_others_waited_for_is_found(standstill_R, busy_R, rank):
    assert rank_that_stalled(20.0, standstill_R, busy_R) == rank
