"""Steps and training ranks as processes of their own, which end at a limit or with their parent.

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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from foundation.errors import UserError
from pretrain.cli import end_process
from pretrain.cli import main as pretrain_main
from pretrain.processes.local_ranks import rank_environment, set_parent_death_signal
from pretrain.recovery.faults import VARIABLE as FAULT_VARIABLE
from pretrain.rundir.run_dir import RunDir

# The third is what an optimizer and DeepSpeed import at their first use.
IMPORTED = ("deepspeed", "pretrain.run", "torch._inductor.compile_fx")
# Writers of shards, which the machines of the half hour lack: training needs none of them.
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
    environment: Mapping[str, str] | None = None,
    is_group: bool = False,
    absent: Sequence[str] = ABSENT,
) -> int | None:
    """Return the exit status of `work` in a process, -N for signal N, None if `limit` ended it.

    `is_group`: what it starts ends with it. `absent`: packages that it cannot import.
    """
    context = (
        multiprocessing.get_context("fork") if is_dry else multiprocessing.get_context("spawn")
    )
    arguments = (work, log, dict(environment or {}), os.getpid(), is_group, absent)
    process = context.Process(target=_child, args=arguments)
    process.start()
    try:
        process.join(limit)
        return process.exitcode
    finally:
        if process.exitcode is None:
            _kill(process.pid, is_group)
            process.join()


def train_ranks(
    experiment: Path,
    overrides: Sequence[str],
    run_dir: RunDir,
    ranks: int,
    *,
    is_dry: bool,
    fault: str = "",
    timeout: float | None = None,
) -> None:
    """Run `pretrain train` as one rank, to its end or to the fault; as `verify-resume` asks for.

    UserError with the end of its log if it ends in another way.
    """
    assert ranks == 1, ranks
    run_dir.logs.mkdir(parents=True, exist_ok=True)
    log = run_dir.logs / f"attempt-{len(list(run_dir.logs.glob('attempt-*')))}.log"
    rank = {"RANK": "0", "LOCAL_RANK": "0", FAULT_VARIABLE: fault}
    arguments = ["train", str(experiment), *overrides, "--run-dir", str(run_dir.path)]
    status = run_process(
        partial(pretrain_main, arguments),
        log,
        timeout,
        is_dry,
        {**rank_environment(1, os.environ), **rank},
    )
    if status != (-signal.SIGKILL if fault else 0):
        raise UserError(f"training ended with {status}: {last_line(log)}; see {log}")


def last_line(log: Path) -> str:
    """Return the last line of a log, "" if there is none."""
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""


def _child(
    work: Callable[[], int],
    log: Path,
    environment: dict[str, str],
    parent: int,
    is_group: bool,
    absent: Sequence[str],
) -> None:
    set_parent_death_signal(parent)
    if is_group:
        os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(file, standard)
    # Line by line: what a killed step has printed is in its log.
    sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115
    os.environ.update(environment)
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  (None: an ImportError)
    status = 1
    try:
        status = work()
    except BaseException:
        traceback.print_exc()
    end_process(status)


def _kill(pid: int | None, is_group: bool) -> None:
    """Kill the process and, if it has come far enough to lead a group, that group."""
    assert pid is not None
    if is_group:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
