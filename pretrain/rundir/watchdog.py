"""The watchdog of a rank: a process beside it, which ends it when it makes no progress.

It counts only the time in which it runs itself. When Slurm suspends the job, or a debugger or the
host freezes all of its processes, the watchdog stops with the rank. It needs nothing of the
rank's interpreter, so a blocked one cannot prevent it. Only the standard library: it starts in
milliseconds and stays small.

It runs before the rank's first import, which can hang on a network disk as a start of CUDA or NCCL
can: `under_watchdog` starts it, then becomes the rank.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

VARIABLE = "PRETRAIN_WATCHDOG"  # of `under_watchdog`: its channel, its process, its limit
START_SECONDS = 600.0  # for a rank to come to the meeting, and then for all to meet
STACKS_SIGNAL = signal.SIGQUIT  # the rank's handler for it writes the stacks of all threads
# By which the supervisor knows a hang. No handler, no core file.
END_SIGNAL = signal.SIGALRM
_REPORT_SECONDS = 8.0  # that the rank may take for what it writes before its end
_TICK_SECONDS = 1.0
# The rank's answers to an expired limit.
_WROTE_STACKS, _WROTE_ALL = b"stacks\n", b"all\n"
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
    """Ends this process unless it is notified every `seconds`, after the process has written why.

    The one of `under_watchdog` if there is one, which then has this limit. 0: no limit.
    """

    def __init__(self, seconds: float) -> None:
        if inherited := os.environ.pop(VARIABLE, ""):
            self._channel, self._process = map(int, inherited.split()[:2])
            os.set_inheritable(self._channel, False)
        else:
            self._channel, theirs = _channel()
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_IT)  # it inherits this
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__, "--of", str(os.getpid()), str(seconds)],
                    stdin=theirs,
                    stdout=subprocess.DEVNULL,
                ).pid
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                os.close(theirs)
        os.set_blocking(self._channel, False)
        self.notify(seconds)

    def notify(self, seconds: float) -> None:
        """Report progress; the next report is due in so many seconds."""
        self._send(f"{seconds}\n".encode())

    def has_expired(self) -> bool:
        """Return whether the limit has passed since the last call: the end is seconds away."""
        with contextlib.suppress(OSError):  # nothing to read
            return bool(os.read(self._channel, 1))
        return False

    def wrote_stacks(self) -> None:
        """Report that the stacks of all threads are written: no signal need ask for them."""
        self._send(_WROTE_STACKS)

    def wrote_all(self) -> None:
        """Report that the process may be ended."""
        self._send(_WROTE_ALL)

    def close(self) -> None:
        """Dismiss it."""
        with contextlib.suppress(OSError):
            os.close(self._channel)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._process, 0)

    def _send(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # it was killed, or does not run at the moment
            os.write(self._channel, line)


def _channel() -> tuple[int, int]:
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()


def expired_limit(channel: int, seconds: float) -> float | None:
    """Wait until no report came for the seconds that the last one allows; return them.

    None if the rank is gone.
    """
    idle, before = 0.0, time.monotonic()
    while idle < (seconds or math.inf):
        tick = min(_TICK_SECONDS, (seconds or math.inf) / 4)
        ready, _, _ = select.select([channel], [], [], tick)
        now = time.monotonic()
        idle += min(now - before, 2 * tick)  # more than a tick has passed: we were suspended
        before = now
        if ready:
            if not (lines := os.read(channel, 1 << 16).split()):
                return None
            seconds, idle = float(lines[-1]), 0.0
    return seconds


def watch(channel: int, rank: int, seconds: float) -> None:
    """End the rank, our parent, if it reports no progress for too long.

    It writes its stacks itself if its interpreter still runs. Python's own handler of a signal,
    which needs no interpreter, has crashed processes whose other threads were running.
    """
    limit = expired_limit(channel, seconds)
    if limit is None or os.getppid() != rank:
        return
    minutes, rest = divmod(round(limit), 60)
    print(f"Timeout ({minutes // 60}:{minutes % 60:02}:{rest:02})!", file=sys.stderr, flush=True)
    if _WROTE_STACKS not in _answers(channel):
        os.kill(rank, STACKS_SIGNAL)
        time.sleep(_TICK_SECONDS)
    os.kill(rank, END_SIGNAL)


def _answers(channel: int) -> bytes:
    """Tell the rank that its limit has expired, and return what it reports until it has done."""
    answers, deadline = b"", time.monotonic() + _REPORT_SECONDS
    with contextlib.suppress(OSError):  # it is gone
        os.write(channel, b"!")
        while _WROTE_ALL not in answers and (left := deadline - time.monotonic()) > 0:
            if select.select([channel], [], [], left)[0]:
                if not (more := os.read(channel, 1 << 16)):
                    break
                answers += more
    return answers


def become(command: Sequence[str], seconds: float) -> NoReturn:
    """Fork the watchdog and become the command."""
    rank, (ours, ranks) = os.getpid(), _channel()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_IT)
    if not (process := os.fork()):
        os.close(ranks)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        watch(ours, rank, seconds)
        os._exit(0)
    os.close(ours)
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)  # until the rank can write stacks
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.set_inheritable(ranks, True)
    os.environ[VARIABLE] = f"{ranks} {process} {seconds}"
    os.execvp(command[0], list(command))


def main() -> None:
    """Run `watchdog.py SECONDS COMMAND...`, or `--of PID SECONDS` with a channel to it as stdin."""
    if sys.argv[1] == "--of":
        watch(sys.stdin.fileno(), int(sys.argv[2]), float(sys.argv[3]))
    else:
        become(sys.argv[2:], float(sys.argv[1]))


if __name__ == "__main__":
    main()
