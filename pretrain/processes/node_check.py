"""One rank of `launcher preflight`: measures its device, its disk and its links.

The launcher directs it through files in a directory that all nodes see, so that a node that hangs
or is cut off delays only itself:

    OUT/rank-00003.json             written by the rank: what it measured alone (RankMeasurement)
    OUT/round-002.json              written by the launcher: {"groups": [[0, 1, 4, 5], ...]}
    OUT/round-002-rank-00003.json   written by the rank: what its group measured (LinkMeasurement)
    OUT/end                         written by the launcher: exit
"""

import datetime
import json
import multiprocessing
import os
import re
import resource
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from foundation.errors import UserError
from foundation.files import await_text, end_of, read_json, write_json
from pretrain.costs.throughput import measured_matmul_peak
from pretrain.distributed.rank_device import use_device
from pretrain.distributed.rendezvous import prepare_descriptors
from pretrain.distributed.slurm_variables import is_slurm_task, rank_numbers, rank_variables
from pretrain.distributed.world import World, connect, world_from_environment
from pretrain.kernels.triton.settings import missing_for_compiling
from pretrain.processes.node_findings import (
    END,
    LinkMeasurement,
    RankMeasurement,
    link_file,
    measurement_file,
    round_file,
)

DISK_BYTES = 64 << 20
REDUCED_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
REPETITIONS = 5
MATMUL_SECONDS = 1.0  # the best product counts: a short burst of another process is not a fault
LOOK_SECONDS = 120.0  # the limit for a rank to measure alone
# A network file system shows a new name up to a minute late, and to some hosts before others.
MEETING_SECONDS = 75.0
MEETING = datetime.timedelta(seconds=MEETING_SECONDS)
GROUP_TIMEOUT = datetime.timedelta(seconds=15)  # for a group to connect, and for each exchange
LINK_SECONDS = MEETING_SECONDS + 3 * GROUP_TIMEOUT.total_seconds()
MOST_WARNINGS = 2
LOST_SECONDS = 600.0  # a rank exits after this long without a file from the launcher
_POLL_SECONDS = 0.05


def main() -> int:
    """`python -m pretrain.processes.node_check OUT`; 0 unless the launcher is lost."""
    out = Path(sys.argv[1])
    # Let torch count GPUs without CUDA: after CUDA has started, a forked child cannot use a GPU.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if is_slurm_task(os.environ):
        os.environ.update(rank_variables(os.environ))
    rank, _, _ = rank_numbers(os.environ)
    try:
        world = world_from_environment(os.environ)
    except UserError as error:  # the node is unusable, which is a result
        write_json(out / measurement_file(rank), asdict(unmeasured(rank, str(error))))
        return 0
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    if not in_child(lambda: _measure_alone(world, out), LOOK_SECONDS):
        problem = f"measuring its device hung or crashed within {LOOK_SECONDS:.0f} s"
        write_json(out / measurement_file(rank), asdict(unmeasured(rank, problem)))
    number, deadline = 0, time.monotonic() + LOST_SECONDS
    while time.monotonic() < deadline:
        # A look-up of one name may come from a network file system's cache.
        names = set(os.listdir(out))
        if END in names:
            return 0
        if round_file(number) not in names:
            time.sleep(_POLL_SECONDS)
            continue
        groups = read_json(out / round_file(number))["groups"]
        for group in groups:
            if world.rank in group:
                _measure_in_group(world, group, out, number)
        number, deadline = number + 1, time.monotonic() + LOST_SECONDS
    print(f"error: no message from the launcher for {LOST_SECONDS:.0f} s", file=sys.stderr)
    return 2


def in_child(work: Callable[[], None], seconds: float) -> bool:
    """Do `work` in its own process, which is killed if it hangs; return whether it succeeded.

    Every child starts without a process group and with an untouched GPU.
    """
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(seconds)
    if child.is_alive():
        child.kill()
        child.join()
    return child.exitcode == 0


def _measure_alone(world: World, out: Path) -> None:
    try:
        measured = measure_rank(world, out)
    except (UserError, RuntimeError) as error:
        measured = unmeasured(world.rank, failure_reason(error))
    write_json(out / measurement_file(world.rank), asdict(measured))


def _measure_in_group(world: World, group: Sequence[int], out: Path, number: int) -> None:
    result = out / link_file(number, world.rank)
    port_file = out / f"round-{number:03d}-port-{group[0]:05d}.json"
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "nccl.log"

        def measure() -> None:
            nowhere = os.open(os.devnull, os.O_WRONLY)  # the report names the reason in one line
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            os.environ.setdefault("NCCL_DEBUG", "WARN")
            os.environ["NCCL_DEBUG_FILE"] = str(log)
            write_json(result, asdict(measure_link(world, group, port_file, log)))
            if world.rank == group[0]:  # it serves the store, without which others would hang
                _await_names(out, {link_file(number, rank) for rank in group})
            # Exit at once: closing a group that failed could wait for the other ranks.
            os._exit(0)

        if not in_child(measure, LINK_SECONDS):
            problem = with_warnings(f"hung or crashed within {LINK_SECONDS:.0f} s", log)
            write_json(result, asdict(LinkMeasurement(bytes_per_second=None, problem=problem)))


def _await_names(folder: Path, names: set[str]) -> None:
    """Wait until the folder has these files, for as long as a group may take to connect."""
    deadline = time.monotonic() + GROUP_TIMEOUT.total_seconds()
    while not names <= set(os.listdir(folder)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def unmeasured(rank: int, problem: str) -> RankMeasurement:
    """Return the measurement of a rank that cannot train."""
    return RankMeasurement(
        rank=rank, node=socket.gethostname(), device="", matmul_flops=0.0, disk_bytes=None,
        problem=" ".join(problem.split()),
    )  # fmt: skip


def measure_rank(world: World, out: Path) -> RankMeasurement:
    """Measure what needs no other rank."""
    use_device(world.device)
    memlock, shared = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], os.statvfs("/dev/shm")
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    return RankMeasurement(
        rank=world.rank,
        node=socket.gethostname(),
        device=torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU",
        matmul_flops=measured_matmul_peak(world.device, dtype, MATMUL_SECONDS),
        disk_bytes=disk_rate(out / f"disk-{world.rank:05d}") if world.local_rank == 0 else None,
        missing=(missing_for_compiling() or "") if world.device.type == "cuda" else "",
        memlock=None if memlock == resource.RLIM_INFINITY else memlock,
        shared_memory=shared.f_bavail * shared.f_frsize,
    )


def disk_rate(path: Path) -> float:
    """Return the bytes per second at which a new file, removed again, is written and synced."""
    block = os.urandom(1 << 20)
    start = time.perf_counter()
    try:
        with open(path, "wb") as file:
            for _ in range(DISK_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return DISK_BYTES / (time.perf_counter() - start)
    finally:
        path.unlink(missing_ok=True)


def measure_link(world: World, group: Sequence[int], port_file: Path, log: Path) -> LinkMeasurement:
    """Connect `group`, whose first rank listens, as a run connects all ranks, and all-reduce: over
    gloo, then on the devices. The rate is counted as NCCL's own tests do; the sums are checked."""
    rank, size = list(group).index(world.rank), len(group)
    prepare_descriptors(size)
    try:
        use_device(world.device)
        store = _meet(rank, size, port_file)
        connect(world.device, store, rank, size, GROUP_TIMEOUT)
        _exchange(size)
        measured = _all_reduce(world, rank, size)
        _exchange(size)  # no rank leaves before all have read what they need
        return measured
    except Exception as error:  # any failure of the network is a finding, not a reason to exit
        return LinkMeasurement(bytes_per_second=None, problem=failure_reason(error, log))


def _exchange(size: int) -> None:
    """Sum host memory, as a run's first exchange does."""
    values = torch.ones(1)
    dist.all_reduce(values)
    if int(values) != size:
        raise RuntimeError(f"gloo summed {size} ones to {int(values)}")


def failure_reason(error: Exception, log: Path | None = None) -> str:
    """Return why connecting failed: NCCL's own last error and warnings, whole, where it has any."""
    text = " ".join(str(error).split())
    before, mark, last = text.partition("Last error:")
    reason = f"NCCL: {last.strip() or before.strip()}" if mark else text
    if not mark and ("timeout" in text.lower() or "timed out" in text.lower()):
        reason = f"no connection within {GROUP_TIMEOUT.total_seconds():.0f} s"
    return with_warnings(reason, log) if log else reason


def with_warnings(reason: str, log: Path) -> str:
    """Return the reason with NCCL's last warnings, and the files of its source that gave them."""
    warnings = re.findall(r"(?:(\S+\.\w+:\d+) )?NCCL WARN (.*)", end_of(log))
    for file, text in list(dict.fromkeys(warnings))[-MOST_WARNINGS:]:
        reason += "" if text.strip() in reason else f"; NCCL: {text.strip()}"
        reason += f" ({file})" if file else ""
    return reason


def _meet(rank: int, size: int, port_file: Path) -> TCPStore:
    meet = partial(TCPStore, timeout=MEETING, wait_for_workers=False)
    if rank == 0:
        store = meet("0.0.0.0", 0, size, is_master=True)
        write_json(port_file, {"hostname": socket.gethostname(), "port": store.port})
        return store
    try:
        text = await_text(port_file, MEETING_SECONDS)
    except TimeoutError:
        raise TimeoutError("the first rank of the group did not open a port") from None
    address: dict[str, Any] = json.loads(text)
    return meet(address["hostname"], address["port"], size, is_master=False)


def _all_reduce(world: World, rank: int, size: int) -> LinkMeasurement:
    count = REDUCED_BYTES[world.device.type] // 4
    # Sums of these are exact in fp32.
    pattern = torch.arange(count, device=world.device, dtype=torch.float32) % 251
    expected = pattern * size + size * (size - 1) // 2
    on_gpu, times, is_right = world.device.type == "cuda", [], True
    wait = partial(torch.cuda.synchronize, world.device) if on_gpu else lambda: None
    for _ in range(1 + REPETITIONS):  # the first one sets up connections
        values = pattern + rank
        wait()
        start = time.perf_counter()
        dist.all_reduce(values)
        wait()
        times.append(time.perf_counter() - start)
        is_right = is_right and torch.equal(values, expected)
    moved = 2 * (size - 1) / size * count * 4
    return LinkMeasurement(
        bytes_per_second=moved / statistics.median(times[1:]),
        problem="" if is_right else "sums over the ranks were wrong",
    )


if __name__ == "__main__":
    sys.exit(main())
