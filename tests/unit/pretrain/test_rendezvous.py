from __future__ import annotations

import datetime
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from pretrain.config.run import EngineConfig
from pretrain.distributed.rendezvous import collective_timeout, meeting_store
from pretrain.distributed.slurm_variables import PORT_FILE_VARIABLE
from pretrain.distributed.world import destroy_process_group, init_world


def met(number: int, file: Path, monkeypatch: pytest.MonkeyPatch) -> list[Store]:
    """The store of each rank of a run of two."""
    monkeypatch.setenv(PORT_FILE_VARIABLE, str(file))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")  # is not used, and restored afterwards
    stores: list[Store] = []
    second = threading.Thread(target=lambda: stores.append(meeting_store(1, 2)))
    second.start()  # it may come before rank 0 has written the file
    first = meeting_store(0, 2)
    second.join(30)
    first.set("run", str(number))
    return [first, *stores]


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
