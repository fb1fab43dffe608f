"""The watchdog of a rank: a process beside it, which ends it when it makes no progress.

It counts only the time in which it runs itself. When Slurm suspends the job, or a debugger or the
host freezes all of its processes, the watchdog stands still with the rank. It needs nothing of the
rank's interpreter, so a blocked one cannot prevent it. Only the standard library: it starts in
milliseconds and stays small.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

STACKS_SIGNAL = signal.SIGQUIT  # the rank's handler for it writes the stacks of all threads
# By which the supervisor knows a hang. No handler, no core file.
END_SIGNAL = signal.SIGALRM
_LAST_WORDS_SECONDS = 8.0  # that the rank may take for what it writes before its end
_TICK_SECONDS = 1.0
# Slurm signals all processes of a step: requests for the ranks alone.
_NOT_FOR_IT = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, STACKS_SIGNAL),
)


class Watchdog:
    """Writes this process's stacks to stderr unless it is fed every `seconds`, and ends it some
    seconds later, for what it writes itself."""

    def __init__(self, seconds: float) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_IT)  # the process inherits it
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(seconds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self._process.stdin is not None
        self._food = self._process.stdin
        os.set_blocking(self._food.fileno(), False)

    def feed(self) -> None:
        """Report progress."""
        with contextlib.suppress(OSError):  # it was killed, or does not run at the moment
            os.write(self._food.fileno(), b".")

    def close(self) -> None:
        """Dismiss it."""
        with contextlib.suppress(OSError):
            self._food.close()
        self._process.wait()


def is_hungry(food: int, seconds: float) -> bool:
    """Wait until nothing was read from `food` for so long (True), or its writer is gone (False)."""
    tick = min(_TICK_SECONDS, seconds / 4)
    hunger, before = 0.0, time.monotonic()
    while hunger < seconds:
        ready, _, _ = select.select([food], [], [], tick)
        now = time.monotonic()
        hunger += min(now - before, 2 * tick)  # more than a tick has passed: we were suspended
        before = now
        if ready and not os.read(food, 4096):
            return False
        hunger = 0.0 if ready else hunger
    return True


def main() -> None:
    """`python watchdog.py PID SECONDS`, with a pipe from that process as stdin."""
    rank, seconds = int(sys.argv[1]), float(sys.argv[2])
    if not is_hungry(sys.stdin.fileno(), seconds) or os.getppid() != rank:
        return
    minutes, rest = divmod(round(seconds), 60)
    print(f"Timeout ({minutes // 60}:{minutes % 60:02}:{rest:02})!", file=sys.stderr, flush=True)
    os.kill(rank, STACKS_SIGNAL)
    time.sleep(_LAST_WORDS_SECONDS)
    os.kill(rank, END_SIGNAL)


if __name__ == "__main__":
    main()
