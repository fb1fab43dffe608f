"""The watchdog of a rank: a second process, which ends the rank when it makes no progress.

The watchdog counts only the time while it runs itself. When Slurm suspends the job, or a
debugger or the host freezes all its processes, the watchdog stops together with the rank. It is a
process because a rank whose interpreter is blocked runs no Python thread. It imports only the
standard library, to start in milliseconds and stay small.

Imports from a network disk can hang just as a start of CUDA or NCCL can. So the watchdog starts
before them: the command line of `under_watchdog` runs this file, which forks the watchdog and then
replaces itself by the rank's program (`become`).
"""

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

# What `become` passes to the rank: the descriptor of the channel, the watchdog's pid, its limit.
VARIABLE = "PRETRAIN_WATCHDOG"
START_SECONDS = 600.0  # the limit to reach the rendezvous, and again for all ranks to connect
STACKS_SIGNAL = signal.SIGQUIT  # the rank's handler for it writes the stacks of all threads
# Nothing else sends SIGALRM, so by it the supervisor recognizes a hang. It leaves no core file.
END_SIGNAL = signal.SIGALRM
_REPORT_SECONDS = 8.0  # the limit to write stacks and reports, before the rank is ended
_TICK_SECONDS = 1.0
# The rank's answers to an expired limit.
_WROTE_STACKS, _WROTE_ALL = b"stacks\n", b"all\n"
# Slurm sends these to all processes of a step. They are for the ranks, so the watchdog blocks them.
_SIGNALS_FOR_RANKS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, STACKS_SIGNAL
)  # fmt: skip


def under_watchdog(command: Sequence[str], seconds: float = START_SECONDS) -> list[str]:
    """Return the command line that runs `command` with a watchdog from the first moment on.

    SIGQUIT is ignored until the program installs a handler (`Heartbeat`).
    """
    return [sys.executable, "-I", "-S", __file__, str(seconds), *command]


def start_limit(environment: Mapping[str, str]) -> float:
    """Return how many seconds a rank has until it must reach the rendezvous."""
    return float(environment.get(VARIABLE, str(START_SECONDS)).split()[-1])


class Watchdog:
    """The rank's end of its watchdog, which ends this process unless notified every `seconds`.

    If `become` has started a watchdog, it gets this limit; otherwise one is started. 0: no limit.
    """

    def __init__(self, seconds: float) -> None:
        if inherited := os.environ.pop(VARIABLE, ""):
            self._channel, self._process = map(int, inherited.split()[:2])
            os.set_inheritable(self._channel, False)
        else:
            self._channel, theirs = _channel()
            # The watchdog inherits this.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_FOR_RANKS)
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
        """Report progress; the next report is due within these seconds."""
        self._send(f"{seconds}\n".encode())

    def has_expired(self) -> bool:
        """Return whether the watchdog has reported, since the last call, that it ends this process.

        The watchdog does so when the rank has written its reports, or after _REPORT_SECONDS.
        """
        with contextlib.suppress(OSError):  # nothing to read
            return bool(os.read(self._channel, 1))
        return False

    def wrote_stacks(self) -> None:
        """Report that the stacks are written, so that the watchdog sends no STACKS_SIGNAL."""
        self._send(_WROTE_STACKS)

    def wrote_all(self) -> None:
        """Report that the process may be ended."""
        self._send(_WROTE_ALL)

    def close(self) -> None:
        """End the watchdog."""
        with contextlib.suppress(OSError):
            os.close(self._channel)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._process, 0)

    def _send(self, line: bytes) -> None:
        # OSError: the watchdog was killed, or it is suspended and the channel is full. Neither may
        # block or end the rank.
        with contextlib.suppress(OSError):
            os.write(self._channel, line)


def _channel() -> tuple[int, int]:
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()


def expired_limit(channel: int, seconds: float) -> float | None:
    """Wait until the rank's limit has passed without a report; return the limit in seconds.

    Each report sets the limit for the next one. Returns None if the rank is gone.
    """
    idle, before = 0.0, time.monotonic()
    while idle < (seconds or math.inf):
        tick = min(_TICK_SECONDS, (seconds or math.inf) / 4)
        ready, _, _ = select.select([channel], [], [], tick)
        now = time.monotonic()
        # If far more than a tick has passed, this process was suspended, and the rank with it.
        idle += min(now - before, 2 * tick)
        before = now
        if ready:
            if not (lines := os.read(channel, 1 << 16).split()):
                return None
            seconds, idle = float(lines[-1]), 0.0
    return seconds


def watch(channel: int, rank: int, seconds: float) -> None:
    """End the rank, our parent, if it reports no progress for too long.

    First the rank is asked to write its stacks from a thread. Only if its interpreter is blocked,
    STACKS_SIGNAL makes faulthandler's C code write them: that has crashed processes with
    other running threads.
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
    """Tell the rank that its limit has expired; return its answers until it has written all."""
    answers, deadline = b"", time.monotonic() + _REPORT_SECONDS
    with contextlib.suppress(OSError):  # the rank is gone
        os.write(channel, b"!")
        while _WROTE_ALL not in answers and (left := deadline - time.monotonic()) > 0:
            if select.select([channel], [], [], left)[0]:
                if not (more := os.read(channel, 1 << 16)):
                    break
                answers += more
    return answers


def become(command: Sequence[str], seconds: float) -> NoReturn:
    """Fork the watchdog, then replace this process by the command, which keeps its pid."""
    rank, (ours, ranks) = os.getpid(), _channel()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_FOR_RANKS)
    if not (process := os.fork()):
        os.close(ranks)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        watch(ours, rank, seconds)
        os._exit(0)
    os.close(ours)
    # By default it would end the rank. It is ignored until `Heartbeat` installs a handler.
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.set_inheritable(ranks, True)
    os.environ[VARIABLE] = f"{ranks} {process} {seconds}"
    os.execvp(command[0], list(command))


def main() -> None:
    """Run `watchdog.py SECONDS COMMAND...`, or `--of PID SECONDS` with the channel as stdin."""
    if sys.argv[1] == "--of":
        watch(sys.stdin.fileno(), int(sys.argv[2]), float(sys.argv[3]))
    else:
        become(sys.argv[2:], float(sys.argv[1]))


if __name__ == "__main__":
    main()
