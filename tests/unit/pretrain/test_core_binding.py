from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from pretrain.processes.core_binding import (
    Beside,
    available_cores,
    bind,
    bind_to_cores_beside_gpu,
    cores_beside,
    decide,
    parse_cores,
    pci_address,
)

ALL = frozenset(range(16))
SECOND = Beside(1, frozenset(range(8, 16)))


@pytest.mark.parametrize(
    ("beside", "allowed", "available", "threads", "cores", "reason"),
    [
        # All cores are free to use: those of the GPU's node.
        (SECOND, ALL, ALL, 4, range(8, 16), "8 of 16 cores, those on NUMA node 1, beside its GPU"),
        # A job's cgroup gives some cores of each node, and nobody bound the task within it.
        (SECOND, set(range(4, 12)), set(range(4, 12)), 4, range(8, 12), "4 of 8 cores, those on"),
        # Slurm bound the task to a part of what the job has, on the right node, a wrong one, both.
        (SECOND, {8, 9, 10, 11}, ALL, 4, None, "bound to 4 of 16 cores already, 4 of them on"),
        (SECOND, {0, 1, 2, 3}, ALL, 4, None, "bound to 4 of 16 cores already, 0 of them on"),
        (SECOND, {6, 7, 8, 9}, ALL, 2, None, "bound to 4 of 16 cores already, 2 of them on"),
        # The job has only cores of the other node, or only of this one.
        (SECOND, {0, 1}, {0, 1}, 1, None, "none of its 2 cores is on NUMA node 1"),
        (SECOND, {8, 9}, {8, 9}, 1, None, "all of its 2 cores are on NUMA node 1"),
        # More threads than cores would wait for each other.
        (SECOND, {7, 8}, {7, 8}, 2, None, "2 threads, but 1 of its cores on NUMA node 1"),
        (Beside(-1, ALL), ALL, ALL, 4, None, "the kernel names no NUMA node of the GPU"),
        (Beside(0, frozenset()), ALL, ALL, 4, None, "the kernel names no NUMA node of the GPU"),
    ],
)
def test_a_rank_is_bound_only_where_nobody_has_and_it_keeps_cores_enough(
    beside: Beside,
    allowed: frozenset[int],
    available: frozenset[int],
    threads: int,
    cores: range | None,
    reason: str,
) -> None:
    decision = decide(beside, allowed, available, threads)
    assert decision.cores == (None if cores is None else frozenset(cores))
    assert decision.reason.startswith(reason)


def test_what_the_kernel_says_of_a_device_is_read(tmp_path: Path) -> None:
    address = pci_address(0, 0x3B, 0)
    assert address == "0000:3b:00.0"
    assert cores_beside(address, tmp_path) == Beside(-1, frozenset())
    (tmp_path / address).mkdir()
    (tmp_path / address / "numa_node").write_text("1\n")
    (tmp_path / address / "local_cpulist").write_text("8-10,24-25,31\n")
    assert cores_beside(address, tmp_path) == Beside(1, frozenset({8, 9, 10, 24, 25, 31}))
    (tmp_path / address / "local_cpulist").write_text("unknown\n")
    assert cores_beside(address, tmp_path).node == -1
    assert parse_cores("\n") == frozenset()


def test_the_cores_that_are_available_are_found_although_the_thread_is_bound() -> None:
    before, widest = os.sched_getaffinity(0), available_cores()
    assert before <= widest
    try:
        os.sched_setaffinity(0, {min(before)})
        assert available_cores() == widest
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)


def test_a_rank_trains_on_where_nothing_may_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "sched_setaffinity", refuse)  # as seccomp does in containers
    decision = bind(SECOND, threads=1)
    assert decision.cores is None
    assert "not permitted" in decision.reason


def test_nothing_is_bound_without_a_gpu() -> None:
    before = os.sched_getaffinity(0)
    assert bind_to_cores_beside_gpu(torch.device("cpu"), threads=1) is None
    assert os.sched_getaffinity(0) == before
