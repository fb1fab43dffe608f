"""Ranks forked from a server that has imported everything: a start takes a tenth of the time, and
the rest is as ever. One server serves all tests of a process.
"""

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from pathlib import Path

from pretrain.cli import end_process
from pretrain.processes.local_ranks import rank_environment, set_parent_death_signal
from pretrain.rundir.exit_statuses import EXIT_STOPPED

# What a rank would import, also to compile; and what builds of corpora do, which fork from the same
# server.
IMPORTED = [
    "deepspeed", "pretrain.run", "pretrain.commands.train", "pretrain.engines.deepspeed_engine",
    "torch._inductor.compile_fx", "streaming", "webdataset.writer",
    "data_pipeline.builder.parallel_build", "data_pipeline.cli",
]  # fmt: skip
# How long the others may run after a rank failed: they may wait for it forever.
GRACE_SECONDS = 60.0
CPU = {"DS_ACCELERATOR": "cpu"}


class ForkedRanks:
    """`program` as every rank; its result is the exit status, its output is in LOGS/rank-N.log.

    It is pickled, as every target of `multiprocessing`. `variables` are added to the environment.
    """

    def __init__(
        self, num_ranks: int, program: Callable[[], int], logs: Path, **variables: str
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        shared = rank_environment(num_ranks, {**os.environ, **CPU, **variables})
        before, os.environ["DS_ACCELERATOR"] = os.environ.get("DS_ACCELERATOR"), "cpu"
        self.processes = []
        for rank in range(num_ranks):
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            arguments = (program, environment, Path.cwd(), logs / f"rank-{rank}.log")
            process = context.Process(target=_run_rank, args=arguments, daemon=True)
            process.start()
            self.processes.append(process)
        if before is None:
            del os.environ["DS_ACCELERATOR"]

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self.processes]

    @property
    def statuses(self) -> list[int | None]:
        """The exit status of each rank, None while it runs; -N if signal N killed it."""
        return [process.exitcode for process in self.processes]

    def wait(self) -> list[int | None]:
        """The exit statuses, when all have exited. After one has failed, those that do not exit in
        GRACE_SECONDS are killed.
        """
        while running := [each for each in self.processes if each.exitcode is None]:
            has_failed = set(self.statuses) - {None, 0, EXIT_STOPPED}
            if not wait([each.sentinel for each in running], GRACE_SECONDS if has_failed else None):
                for process in running:
                    process.kill()
        return self.statuses


def run_ranks(num_ranks: int, program: Callable[[], int], logs: Path) -> None:
    """Fork the ranks and wait for all; SystemExit with their logs if one fails."""
    if any(statuses := ForkedRanks(num_ranks, program, logs).wait()):
        text = "\n".join((logs / f"rank-{rank}.log").read_text() for rank in range(num_ranks))
        raise SystemExit(f"ranks ended with {statuses}:\n{text}")


def _run_rank(
    program: Callable[[], int], environment: Mapping[str, str], directory: Path, log: Path
) -> None:
    set_parent_death_signal(os.getppid())
    gc.freeze()  # else every collection would look through, and copy, all that was imported
    for standard in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), standard)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    status = 1
    try:
        status = program()
    except BaseException:
        traceback.print_exc()
    end_process(status)
