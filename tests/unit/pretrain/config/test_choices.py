"""Choices, settings of several names: each table has an entry for every name."""

from typing import Any, get_args

import pytest

from foundation.settings import assert_never
from pretrain.config.cluster import ClusterConfig
from pretrain.config.devices import DEVICES
from pretrain.config.model import FEED_FORWARDS, POSITIONS, FeedForwardKind, Positions
from tests.helpers.choices import choices_of


@pytest.mark.parametrize(
    ("table", "names"), [(FEED_FORWARDS, FeedForwardKind), (POSITIONS, Positions)]
)
def test_a_table_has_an_entry_for_every_name(table: dict[str, Any], names: Any):
    assert table.keys() == set(get_args(names))


def test_a_value_that_no_case_handles_is_an_error_of_ours():
    with pytest.raises(AssertionError, match="'relu3'"):
        assert_never("relu3")  # type: ignore[arg-type]


def test_every_gpu_that_a_cluster_file_may_name_has_its_data_sheet():
    assert set(dict(choices_of(ClusterConfig))["gpu"]) == DEVICES.keys() - {"cpu"}
