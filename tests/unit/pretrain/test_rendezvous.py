from __future__ import annotations

import datetime
import io
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from foundation.errors import ConfigError
from foundation.files import await_text
from pretrain.config.engine import EngineConfig
from pretrain.distributed.slurm_variables import PORT_FILE_VARIABLE
from pretrain.distributed.world import (
    collective_timeout,
    destroy_process_group,
    gpu_index,
    init_world,
    meeting_store,
    ranks_on_this_node,
    world_from_environment,
)
from pretrain.rundir.run_dir import AttemptFiles


def met(number: int, file: Path, monkeypatch: pytest.MonkeyPatch) -> list[Store]:
    """The store of each rank of a run of two."""
    monkeypatch.setenv(PORT_FILE_VARIABLE, str(file))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")  # is not used, and restored afterwards
    stores: list[Store] = []
    second = threading.Thread(target=lambda: stores.append(meeting_store(1, 2)))
    second.start()
    time.sleep(0.1)  # it comes before rank 0 has written the file
    first = meeting_store(0, 2)
    second.join(30)
    first.set("run", str(number))
    return [first, *stores]


def remembering(look_up: Callable[..., Any]) -> Callable[..., Any]:
    """As on a network file system: a name that was looked up in vain stays missing."""
    missed: set[Any] = set()

    def answer(path: Any, *arguments: Any, **options: Any) -> Any:
        if path in missed:
            raise FileNotFoundError(path)
        try:
            return look_up(path, *arguments, **options)
        except FileNotFoundError:
            missed.add(path)
            raise

    return answer


def test_a_rank_that_looked_for_the_port_too_early_still_finds_it(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "open", remembering(io.open))
    monkeypatch.setattr(os, "stat", remembering(os.stat))
    first, second = met(0, tmp_path / "port", monkeypatch)
    assert second.get("run") == b"0"
    assert first.num_keys() == second.num_keys()


def test_ranks_that_wait_for_the_port_list_nothing_else(tmp_path, monkeypatch):
    """A listing of thousands of logs by each of thousands of ranks would stop a file server."""
    files = AttemptFiles(tmp_path / "logs", 3)
    files.create_meeting()
    files.port.write_text("1\n")
    files.create_meeting()  # the supervisor was killed, and its attempt's number is used again
    for log in files.rank_logs(5):
        log.touch()
    listed: list[int] = []
    names_in = os.listdir
    monkeypatch.setattr(
        os, "listdir", lambda path: (listed.append(len(names_in(path))), names_in(path))[1]
    )
    first, second = met(0, files.port, monkeypatch)
    assert second.get("run") == b"0"
    assert first.num_keys() == second.num_keys()
    assert listed[0] == 0
    assert max(listed) == 1


def test_a_file_that_nobody_writes_is_waited_for_as_long_as_asked(tmp_path):
    with pytest.raises(TimeoutError, match="port"):
        await_text(tmp_path / "port", 0.1)


def test_runs_that_start_on_one_host_at_the_same_time_each_meet_at_their_own_port(
    tmp_path, monkeypatch
):
    runs = [met(number, tmp_path / f"{number}.port", monkeypatch) for number in range(3)]
    assert [[store.get("run") for store in stores] for stores in runs] == [
        [str(number).encode()] * 2 for number in range(3)
    ]


def test_the_watchdog_ends_a_hang_before_any_collective_does_whatever_its_patience():
    for seconds in (15.0, EngineConfig().watchdog_timeout_seconds, 7200.0):
        assert collective_timeout(seconds).total_seconds() > seconds + 24 * 3600  # and a suspension
    assert collective_timeout(0) == datetime.timedelta(minutes=30)


def test_groups_that_deepspeed_creates_have_the_timeout_of_the_run(monkeypatch):
    destroy_process_group()
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    init_world(watchdog_timeout_seconds=1800.0)
    group = dist.new_group([0])
    assert isinstance(group, dist.ProcessGroup)
    options = group._get_backend(torch.device("cpu")).options
    assert options._timeout == collective_timeout(1800.0)
    destroy_process_group()


@pytest.mark.parametrize(
    ("rank", "world_size", "local_rank"),
    [("0", "0", "0"), ("5", "2", "0"), ("-1", "1", "0"), ("0", "1", "-1"), ("abc", "2", "0")],
)
def test_impossible_rank_variables_are_one_line(rank, world_size, local_rank):
    environment = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank}
    with pytest.raises(ConfigError, match="RANK"):
        world_from_environment(environment)


def test_a_world_size_without_a_rank_is_refused_where_it_would_train_alone():
    with pytest.raises(ConfigError, match="WORLD_SIZE=2"):
        world_from_environment({"WORLD_SIZE": "2"})
    assert world_from_environment({"WORLD_SIZE": "1"}).world_size == 1


@pytest.mark.parametrize(
    ("local_rank", "visible", "index"),
    [(0, 1, 0), (0, 8, 0), (7, 8, 7), (3, 1, 0), (7, 1, 0), (1, 2, 1)],
)
def test_a_rank_takes_its_own_gpu_whether_the_site_shows_it_one_or_all(local_rank, visible, index):
    assert gpu_index(local_rank, visible) == index


def test_more_ranks_than_gpus_on_a_node_are_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"local rank 2 .*2 GPUs") as it:
        gpu_index(2, 2)
    assert "\n" not in str(it.value)


TASK = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}
TASK["MASTER_ADDR"] = "127.0.0.1"
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
