from __future__ import annotations

import itertools

import pytest

from data_pipeline.config import SegmentLengths
from foundation.errors import ConfigError


def test_steps_and_tokens_agree_with_a_count_one_by_one():
    lengths = SegmentLengths(3, ((4, 5), (6, 2)))
    counted = [3, 3, 3, 3, 5, 5, 2, 2, 2, 2]
    assert [lengths.at(step) for step in range(10)] == counted
    assert [lengths.tokens_before(step) for step in range(11)] == [
        0,
        *itertools.accumulate(counted),
    ]


@pytest.mark.parametrize("wrong", [(0, ()), (4, ((3, 0),)), (4, ((3, 8), (3, 9))), (4, ((0, 8),))])
def test_invalid_lengths_are_rejected(wrong):
    with pytest.raises(
        ConfigError, match="expected positive lengths, and each change at a later step"
    ):
        SegmentLengths(*wrong)
