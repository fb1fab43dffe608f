"""Steps as processes of their own, which end at a limit or with their parent.

On a GPU each is a new interpreter. In a dry run it is forked from one that has imported torch and
DeepSpeed, which takes a tenth of the time; CUDA would not survive the fork.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from pretrain.cli import end_process
from pretrain.processes.local_ranks import set_parent_death_signal

# Imported before steps are forked. The third is for compiled steps.
IMPORTED = ("deepspeed", "pretrain.run", "torch._inductor.compile_fx")
# Writers of shards. A lent machine may lack them, and training does not need them.
ABSENT = ("streaming", "webdataset", "zstandard")
INTERPRETER = "TRITON_INTERPRET"
DRY_ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def prepare(is_dry: bool) -> None:
    """Import, before the first fork of a dry run, what its steps need."""
    if is_dry:
        os.environ.update(DRY_ENVIRONMENT)
        os.environ[INTERPRETER] = "1"  # read when triton is imported; a step asks for it again
        for name in IMPORTED:
            importlib.import_module(name)
        del os.environ[INTERPRETER]


def run_process(
    work: Callable[[], int],
    log: Path,
    limit: float | None,
    is_dry: bool,
    absent: Sequence[str] = ABSENT,
) -> int | None:
    """Return the exit status of `work` in a process, -N for signal N, None if `limit` ended it.

    Processes that it has started are killed with it. `absent`: packages that it cannot import.
    """
    context = (
        multiprocessing.get_context("fork") if is_dry else multiprocessing.get_context("spawn")
    )
    arguments = (work, log, os.getpid(), absent)
    process = context.Process(target=_child, args=arguments)
    process.start()
    try:
        process.join(limit)
        return process.exitcode
    finally:
        if process.exitcode is None:
            _kill(process.pid)
            process.join()


def last_line(log: Path) -> str:
    """Return the last line of a log, "" if there is none."""
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""


def _child(work: Callable[[], int], log: Path, parent: int, absent: Sequence[str]) -> None:
    set_parent_death_signal(parent)
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(file, standard)
    # Written line by line, so that a killed step's log has all that it printed.
    sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  (None: an ImportError)
    status = 1
    try:
        status = work()
    except BaseException:
        traceback.print_exc()
    end_process(status)


def _kill(pid: int | None) -> None:
    """Kill the process and, if it has come far enough to lead a group, that group."""
    assert pid is not None
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
