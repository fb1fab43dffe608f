"""Rank variables that fit no group of ranks."""

from __future__ import annotations

import pytest

from data_pipeline.errors import ConfigError
from pretrain.distributed.world import world_from_environment


@pytest.mark.parametrize(
    ("rank", "world_size", "local_rank"),
    [("0", "0", "0"), ("5", "2", "0"), ("-1", "1", "0"), ("0", "1", "-1"), ("abc", "2", "0")],
)
def test_impossible_rank_variables_are_one_line(rank, world_size, local_rank):
    environment = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank}
    with pytest.raises(ConfigError, match="RANK"):
        world_from_environment(environment)
