"""The watchdog of a rank: a process beside it, which ends it when it makes no progress.

It counts only the time in which it runs itself. When Slurm suspends the job, or a debugger or the
host freezes all of its processes, the watchdog stands still with the rank. It needs nothing of the
rank's interpreter, so a blocked one cannot prevent it. Only the standard library: it starts in
milliseconds and stays small.

It runs before the rank's first import, which can stand still on a network disk as a start of CUDA
or NCCL can: `under_watchdog` starts it, then becomes the rank.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

VARIABLE = "PRETRAIN_WATCHDOG"  # of `under_watchdog`: its pipe, its process, its limit
START_SECONDS = 600.0  # for a rank to come to the meeting, and then for all to meet
STACKS_SIGNAL = signal.SIGQUIT  # the rank's handler for it writes the stacks of all threads
# By which the supervisor knows a hang. No handler, no core file.
END_SIGNAL = signal.SIGALRM
_LAST_WORDS_SECONDS = 8.0  # that the rank may take for what it writes before its end
_TICK_SECONDS = 1.0
# Slurm signals all processes of a step: requests for the ranks alone.
_NOT_FOR_IT = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, STACKS_SIGNAL),
)


def under_watchdog(command: Sequence[str], seconds: float = START_SECONDS) -> list[str]:
    """Return the command line that runs this one with a watchdog from its first moment on.

    Until the program makes a Watchdog of its own, SIGQUIT does nothing.
    """
    return [sys.executable, "-I", "-S", __file__, str(seconds), *command]


def start_limit(environment: Mapping[str, str]) -> float:
    """Return how many seconds a rank has until it comes to the meeting."""
    return float(environment.get(VARIABLE, str(START_SECONDS)).split()[-1])


class Watchdog:
    """Writes this process's stacks to stderr unless it is fed every `seconds`, and ends it some
    seconds later, for what it writes itself.

    The one of `under_watchdog` if there is one, which then has this limit. 0: none.
    """

    def __init__(self, seconds: float) -> None:
        if inherited := os.environ.pop(VARIABLE, ""):
            self._food, self._process = map(int, inherited.split()[:2])
            os.set_inheritable(self._food, False)
        else:
            food, self._food = os.pipe()
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_IT)  # it inherits this
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__, "--of", str(os.getpid()), str(seconds)],
                    stdin=food,
                    stdout=subprocess.DEVNULL,
                ).pid
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                os.close(food)
        os.set_blocking(self._food, False)
        self.feed(seconds)

    def feed(self, seconds: float) -> None:
        """Report progress; the next report is due in so many seconds."""
        with contextlib.suppress(OSError):  # it was killed, or does not run at the moment
            os.write(self._food, f"{seconds}\n".encode())

    def close(self) -> None:
        """Dismiss it."""
        with contextlib.suppress(OSError):
            os.close(self._food)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._process, 0)


def hungry_after(food: int, seconds: float) -> float | None:
    """Wait until nothing was read from `food` for the seconds that its last line says; return them.

    None if its writer is gone.
    """
    hunger, before = 0.0, time.monotonic()
    while hunger < (seconds or math.inf):
        tick = min(_TICK_SECONDS, (seconds or math.inf) / 4)
        ready, _, _ = select.select([food], [], [], tick)
        now = time.monotonic()
        hunger += min(now - before, 2 * tick)  # more than a tick has passed: we were suspended
        before = now
        if ready:
            # All that a pipe holds: no line is cut.
            if not (lines := os.read(food, 1 << 16).split()):
                return None
            seconds, hunger = float(lines[-1]), 0.0
    return seconds


def watch(food: int, rank: int, seconds: float) -> None:
    """End the rank, our parent, if it is silent for too long."""
    limit = hungry_after(food, seconds)
    if limit is None or os.getppid() != rank:
        return
    minutes, rest = divmod(round(limit), 60)
    print(f"Timeout ({minutes // 60}:{minutes % 60:02}:{rest:02})!", file=sys.stderr, flush=True)
    os.kill(rank, STACKS_SIGNAL)
    time.sleep(_LAST_WORDS_SECONDS)
    os.kill(rank, END_SIGNAL)


def become(command: Sequence[str], seconds: float) -> NoReturn:
    """Fork the watchdog and become the command."""
    rank, (food, pipe) = os.getpid(), os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_IT)
    if not (process := os.fork()):
        os.close(pipe)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        watch(food, rank, seconds)
        os._exit(0)
    os.close(food)
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)  # until the rank can write stacks
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.set_inheritable(pipe, True)
    os.environ[VARIABLE] = f"{pipe} {process} {seconds}"
    os.execvp(command[0], list(command))


def main() -> None:
    """`python watchdog.py SECONDS COMMAND...`; `--of PID SECONDS`, with a pipe from it as stdin."""
    if sys.argv[1] == "--of":
        watch(sys.stdin.fileno(), int(sys.argv[2]), float(sys.argv[3]))
    else:
        become(sys.argv[2:], float(sys.argv[1]))


if __name__ == "__main__":
    main()
