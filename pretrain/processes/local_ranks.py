"""The ranks of one attempt as processes of this machine, started and ended together. Torch-free."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from foundation.files import end_of, own_file
from foundation.programs import own_command
from pretrain.distributed.slurm_variables import GPUS_VARIABLE, PORT_FILE_VARIABLE
from pretrain.rundir.attempt_files import AttemptFiles
from pretrain.rundir.exit_statuses import EXIT_STOPPED, EXPLAINED, describe_exit
from pretrain.rundir.lock import VARIABLE
from pretrain.rundir.watchdog import START_SECONDS, under_watchdog
from pretrain.terminal.log import LINE_START, RELAY_VARIABLE

# How long the other ranks may run after one failed: enough to report errors, too short to wait for
# the failed one in a collective.
GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1
_LONGEST_SHOWN = 1000  # characters of a line of a log
# Loaded before any fork: a child must not take the loader's lock.
_LIBC = ctypes.CDLL(None, use_errno=True)


def train_command(experiment: Path, run_dir: Path, *overrides: str) -> list[str]:
    """Return the command of one rank, in this Python, with its watchdog."""
    arguments = ("train", str(experiment), "--run-dir", str(run_dir), *overrides)
    return under_watchdog(own_command("pretrain", *arguments), START_SECONDS)


class RankGroup:
    """`command` as `num_ranks` processes, each in its own process group.

    Each writes to LOGS/attempt-N/rank-R.log; `echo_rank_zero` shows here what rank 0 logs. No rank
    outlives the context, nor this process. Create it in a thread that stays: to the kernel, the
    death of that thread is the death of the parent.
    """

    was_stopped = False  # only this process can stop all ranks

    def __init__(
        self,
        command: Sequence[str],
        num_ranks: int,
        logs: Path,
        attempt: int = 0,
        environment: Mapping[str, str] | None = None,
        echo_rank_zero: bool = False,
    ) -> None:
        files = AttemptFiles(logs, attempt)
        files.create()
        files.write_start([""] * num_ranks)
        self.logs = files.rank_logs(num_ranks)
        self.first_failure: int | None = None  # the rank that failed before any other did
        self._processes: list[subprocess.Popen[bytes]] = []
        shared = rank_environment(num_ranks, {**os.environ, **(environment or {})})
        shared |= files.variables
        try:
            for rank in range(num_ranks):
                own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                # If stderr is closed, another file may have its number.
                echo = echo_rank_zero and rank == 0 and sys.stderr is not None
                self._processes.append(self._start(command, rank, own, echo))
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order; each is also the id of its process group."""
        return [process.pid for process in self._processes]

    def describe_failure(self, statuses: Sequence[int]) -> str:
        """Describe the first failure (`describe_failure`)."""
        return describe_failure(statuses, self.logs, first_failure=self.first_failure)

    def poll(self) -> list[int | None]:
        """Return each rank's exit status, None while it runs; -N if signal N killed it."""
        return [_reap(process) for process in self._processes]

    def wait(
        self,
        timeout: float | None = None,
        grace: float = GRACE_SECONDS,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[int]:
        """Return the exit statuses in rank order, when all have exited.

        If one fails, the others get `grace` seconds to exit before they are killed. `meanwhile` is
        called many times a second and may stop the ranks. TimeoutError after `timeout` seconds,
        with the ranks still running.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        failed_since: float | None = None
        while True:
            statuses, now = self.poll(), time.monotonic()
            if self.first_failure is None and (failed := _failed(statuses)):
                failed_since = now
                # The first cause: a rank that knows what is wrong, or that was killed from outside.
                knows = [rank for rank in failed if statuses[rank] in EXPLAINED]
                killed = [rank for rank in failed if (statuses[rank] or 0) < 0]
                self.first_failure = (knows or killed or failed)[0]
            if None not in statuses:
                break
            if failed_since is not None and now - failed_since >= grace:
                self.kill()
            elif deadline is not None and now >= deadline:
                raise TimeoutError(f"ranks still run after {timeout:g} s: {statuses}")
            else:
                meanwhile()
                time.sleep(_POLL_SECONDS)
        return [process.returncode for process in self._processes]

    def terminate(self) -> None:
        """Ask every rank to stop after its step: SIGTERM, but not to what the ranks started."""
        for process in self._processes:
            if _reap(process) is None:
                process.terminate()

    def kill(self) -> None:
        """Kill every rank and everything it started, and wait until they are gone."""
        for process in self._processes:
            if process.returncode is None:
                # The process is not reaped yet, so the group's id is surely still its own.
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def _start(
        self, command: Sequence[str], rank: int, environment: dict[str, str], echo: bool
    ) -> subprocess.Popen[bytes]:
        parent = os.getpid()
        # The rank's stderr is its log; a copy of ours stays open in the rank while it lives.
        with open(self.logs[rank], "ab", opener=own_file) as log, open(os.dup(2), "wb") as ours:
            return subprocess.Popen(
                command,
                env=environment | ({RELAY_VARIABLE: str(ours.fileno())} if echo else {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(ours.fileno(),) if echo else (),
                start_new_session=True,  # Ctrl-C reaches the parent alone, which then decides
                preexec_fn=lambda: set_parent_death_signal(parent),
            )


def set_parent_death_signal(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """In a process just forked, let the kernel send it this signal when its parent dies."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent died between the fork and the line above
        os._exit(1)


def _reap(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit status, None while it runs; kills what the process left behind."""
    if process.returncode is None:
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        # Before the status is collected: afterwards the id may be another process's.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode


def rank_environment(num_ranks: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that all ranks of one machine share, without a surrounding job's.

    A thread per core in every rank would make the ranks wait for each other, so the cores are
    divided unless OMP_NUM_THREADS is set.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # nothing listens on this port now
    gpus = {} if "CUDA_VISIBLE_DEVICES" in environment else {GPUS_VARIABLE: str(gpus_here())}
    return {
        "OMP_NUM_THREADS": str(threads),
        **gpus,
        **{
            key: value
            for key, value in environment.items()
            if not key.startswith(("SLURM_", "TORCHELASTIC_", VARIABLE, PORT_FILE_VARIABLE))
        },
        # Their connections need no other interface, and no one else should reach them.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",  # for what the ranks start; see foundation/programs.py
    }


def gpus_here() -> int:
    """Return how many GPUs NVIDIA's driver has on this machine, whether or not they can be used."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def describe_failure(
    statuses: Sequence[int], logs: Sequence[Path], lines: int = 15, first_failure: int | None = None
) -> str:
    """Describe which rank failed first, with the end of its log; '' if none failed.

    If the first failure is unknown, a rank that exited by itself tells more than one that was
    killed after it.
    """
    failed = _failed(statuses)
    if not failed:
        return ""
    rank = (
        next((rank for rank in failed if statuses[rank] > 0), failed[0])
        if first_failure is None
        else first_failure
    )
    text = end_of(logs[rank])
    if statuses[rank] in EXPLAINED and (message := _last_error(text)):
        return f"rank {rank}: {message}"
    tail = "\n".join(f"  | {line[:_LONGEST_SHOWN]}" for line in text.splitlines()[-lines:])
    return f"rank {rank} {describe_exit(statuses[rank])}; the end of {logs[rank]}:\n{tail}"


def _last_error(log: str) -> str:
    """Return the error that a rank logged last: the reason why it ended itself."""
    message: list[str] = []
    for line in log.splitlines():
        start = LINE_START.match(line)
        if line.startswith("error: ") or (start and start["level"] == "ERROR"):
            message = [LINE_START.sub("", line).removeprefix("error: ")]
        elif start:
            message = message[:1]
        elif message:
            message.append(line)
    return "\n".join(message)


def _failed(statuses: Sequence[int | None]) -> list[int]:
    """Return the ranks that have ended otherwise than done or stopped on request."""
    return [rank for rank, status in enumerate(statuses) if status not in (None, 0, EXIT_STOPPED)]
