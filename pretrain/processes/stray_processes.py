"""Processes of this host that are in the way of a run: left over from another job, or started by hand. Torch-free."""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter

import psutil

from pretrain.processes.node_findings import TOKEN

BUSY_SHARE = 0.3  # of one core
WAITING_SHARE = (
    0.8  # of the looks at it: on a full host even a process that never rests gets little time
)
LOOKS = 10
_BETWEEN_LOOKS_SECONDS = 0.1


def find_strays(on_gpus: bool) -> list[str]:
    """Those without the check's token in their environment that keep a core busy, or hold memory of a GPU."""
    strangers = [
        process for process in psutil.process_iter(["pid", "name"]) if not _is_ours(process)
    ]
    before = {process.pid: _cpu_seconds(process) for process in strangers}
    begin, runnable = time.monotonic(), Counter[int]()
    for _ in range(LOOKS):
        time.sleep(_BETWEEN_LOOKS_SECONDS)
        runnable.update(process.pid for process in strangers if _is_runnable(process))
    seconds = time.monotonic() - begin
    found = []
    for process in strangers:
        share = (_cpu_seconds(process) - before[process.pid]) / seconds
        if share >= BUSY_SHARE or runnable[process.pid] >= WAITING_SHARE * LOOKS:
            found.append(f"{process.info['name']} ({process.pid}) keeps a core busy")
    return found + (_on_gpus() if on_gpus else [])


def _is_ours(process: psutil.Process) -> bool:
    try:
        return process.pid == os.getpid() or TOKEN in process.environ()
    except psutil.Error:  # another user's
        return False


def _is_runnable(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_RUNNING
    except psutil.Error:
        return False


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # it is gone
        return 0.0
    return times.user + times.system


def _on_gpus() -> list[str]:
    query = [
        "nvidia-smi",
        "--query-compute-apps=pid,process_name,used_memory",
        "--format=csv,noheader",
    ]
    try:
        lines = subprocess.run(
            query, capture_output=True, text=True, timeout=30
        ).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return ["nvidia-smi gives no answer"]
    own = {process.pid for process in psutil.process_iter() if _is_ours(process)}
    rows = [line.split(",", 1) for line in lines if line.count(",") == 2]
    return [f"{rest.strip()} of GPU memory ({pid})" for pid, rest in rows if int(pid) not in own]
