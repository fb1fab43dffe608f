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

from foundation.files import await_text
from pretrain.config.engine import EngineConfig
from pretrain.distributed.slurm_variables import PORT_FILE_VARIABLE
from pretrain.distributed.world import (
    collective_timeout,
    destroy_process_group,
    init_world,
    meeting_store,
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
    with pytest.raises(TimeoutError, match=r"port was not written within 0\.1 s"):
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
