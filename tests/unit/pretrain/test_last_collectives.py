from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pretrain.processes.last_collectives import (
    OWN_FILES,
    dumps,
    set_trace_files,
    write_last_collectives,
)
from pretrain.rundir.run_dir import AttemptFiles


def test_the_collectives_of_a_group_are_written_and_nothing_is_without_any(tmp_path: Path) -> None:
    files = AttemptFiles(tmp_path, 7)
    files.create()
    variables = files.variables
    assert not write_last_collectives(tmp_path, 5, variables)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(2):
            dist.all_reduce(torch.ones(3))
        (path,) = write_last_collectives(tmp_path, 5, variables)
        # To find stacks takes seconds, which a rank that is about to end may not have.
        ((_, early),) = dumps(has_stacks=False)
    finally:
        dist.destroy_process_group()
    assert path == tmp_path / "attempt-7" / "gloo-rank-5"
    assert files.traces() == {"gloo-rank-": [5]}
    for content, has_stacks in ((early, False), (path.read_bytes(), True)):
        records = pickle.loads(content)["entries"][-2:]
        assert [record["profiling_name"] for record in records] == ["gloo:all_reduce"] * 2
        assert all(bool(record.get("frames")) == has_stacks for record in records)


@pytest.mark.parametrize("name", OWN_FILES)
def test_torch_writes_its_own_beside_them_unless_the_user_chose(tmp_path: Path, name: str) -> None:
    environment = AttemptFiles(tmp_path, 7).variables
    set_trace_files(environment, tmp_path)
    assert environment[name] == f"{tmp_path}/attempt-7/nccl-rank-"
    chosen = {name: "/elsewhere/"}
    set_trace_files(chosen, tmp_path)
    assert chosen == {name: "/elsewhere/"}
