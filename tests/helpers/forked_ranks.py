"""Ranks forked from a process that has imported everything: a start takes a tenth of the time, and
the rest is as ever.

    python -m tests.helpers.forked_ranks LOGS train EXPERIMENT ...

is `pretrain train EXPERIMENT ...` on two ranks; its exit status is the highest of theirs. The
process must not have threads when it forks.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from pretrain.cli import end_process, main
from pretrain.processes.local_ranks import rank_environment, set_parent_death_signal

MUON = "deepspeed.runtime.zero.muon.muon_optimizer"


def import_everything() -> None:
    """What a rank would import, before the first fork."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    logging.disable(logging.WARNING)
    # The last one brings torch's compiler: DeepSpeed imports it with its first optimizer.
    modules = "deepspeed", "pretrain.run", "pretrain.engines.deepspeed_engine", MUON
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # else every collection in a rank would look through, and copy, all of that


def fork_ranks(num_ranks: int, rank_program: Callable[[], int], logs: Path) -> list[int]:
    """Start the program as every rank, its output going to `logs`; the process ids.

    Its result is the exit status.
    """
    shared = rank_environment(num_ranks, os.environ)
    return [
        _fork_rank(rank, shared, rank_program, logs / f"rank-{rank}.log")
        for rank in range(num_ranks)
    ]


def run_ranks(num_ranks: int, rank_program: Callable[[], int], logs: Path) -> None:
    """Fork the ranks and wait for all; SystemExit if one fails."""
    pids = fork_ranks(num_ranks, rank_program, logs)
    while not all_ended(pids):
        time.sleep(0.01)


def all_ended(pids: list[int]) -> bool:
    """Whether all ranks ended with status 0; SystemExit if one ended with another."""
    for pid in pids:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return False
        if ended.si_status:
            raise SystemExit(f"a rank ended by itself with status {ended.si_status}; see its log")
    for pid in pids:
        os.waitpid(pid, 0)
    return True


def _fork_rank(
    rank: int, shared: dict[str, str], rank_program: Callable[[], int], log: Path
) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        set_parent_death_signal(parent)
        for standard in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), standard)
        os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
        end_process(rank_program())
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def two_ranks(logs: Path, arguments: list[str]) -> int:
    """Run the command as two ranks; the highest exit status, of a signal its number."""
    import_everything()
    logging.disable(logging.NOTSET)
    logs.mkdir(exist_ok=True)
    pids = fork_ranks(2, lambda: main(arguments), logs)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for pid in pids)


if __name__ == "__main__":
    sys.exit(two_ranks(Path(sys.argv[1]), sys.argv[2:]))
