"""Rank variables that fit no group of ranks."""

from __future__ import annotations

import pytest

from foundation.errors import ConfigError
from pretrain.distributed.world import (
    destroy_process_group,
    gpu_index,
    init_world,
    ranks_on_this_node,
    world_from_environment,
)


@pytest.mark.parametrize(
    ("rank", "world_size", "local_rank"),
    [("0", "0", "0"), ("5", "2", "0"), ("-1", "1", "0"), ("0", "1", "-1"), ("abc", "2", "0")],
)
def test_impossible_rank_variables_are_one_line(rank, world_size, local_rank):
    environment = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank}
    with pytest.raises(ConfigError, match="RANK"):
        world_from_environment(environment)


def test_a_world_size_without_a_rank_is_refused_where_it_would_train_alone():
    with pytest.raises(ConfigError, match="found WORLD_SIZE=2 and no RANK; start ranks with"):
        world_from_environment({"WORLD_SIZE": "2"})
    assert world_from_environment({"WORLD_SIZE": "1"}).world_size == 1


@pytest.mark.parametrize(
    ("local_rank", "visible", "index"),
    [(0, 1, 0), (0, 8, 0), (7, 8, 7), (3, 1, 0), (7, 1, 0), (1, 2, 1)],
)
def test_a_rank_takes_its_own_gpu_whether_the_site_shows_it_one_or_all(local_rank, visible, index):
    assert gpu_index(local_rank, visible) == index


def test_more_ranks_than_gpus_on_a_node_are_refused_in_one_line():
    with pytest.raises(ConfigError, match="local rank 2 found 2 GPUs, expected one for each") as it:
        gpu_index(2, 2)
    assert "\n" not in str(it.value)


TASK = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "MASTER_ADDR": "127.0.0.1",
}
RANK = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.mark.parametrize(
    ("environment", "name", "value"),
    [
        *((RANK, name, value) for name in ("RANK", "WORLD_SIZE") for value in ("abc", "")),
        *((RANK, "MASTER_PORT", value) for value in ("abc", "", "70000", "-1")),
        *((RANK, name, "abc") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")),
        *((TASK, name, "abc") for name in TASK if name.startswith("SLURM")),
        (TASK, "SLURM_STEP_NUM_NODES", "abc"),
    ],
)
def test_a_rank_variable_that_is_no_number_is_named_in_one_line(
    monkeypatch, environment, name, value
):
    for each in (*RANK, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(each, raising=False)
    for each, text in {**environment, name: value}.items():
        monkeypatch.setenv(each, text)
    join = ranks_on_this_node if name == "LOCAL_WORLD_SIZE" else init_world
    with pytest.raises(ConfigError, match=name) as raised:
        join()
    assert "\n" not in str(raised.value)
    destroy_process_group()
