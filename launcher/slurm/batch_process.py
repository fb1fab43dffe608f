"""The process of a batch script: runs the supervisor, and restarts it after a signal killed it.

The out-of-memory killer, or an administrator, may end the supervisor, and no other process requeues
the job or records what happened. So this one stays: small, idle, and without heavy imports.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from foundation.programs import own_command

# Passed on to the supervisor, because Slurm may signal the batch script alone (--signal=B:).
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_MOST_SHORT_LIVES = 3  # in a row: a supervisor that always dies at once needs a person
_SHORT_SECONDS = 60.0


class BatchProcess:
    """Runs one command until it exits by itself."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._child: subprocess.Popen[bytes] | None = None
        self._received: list[int] = []  # a child that starts again gets them, too
        for number in _PASSED_ON:
            signal.signal(number, self._pass_on)

    def run(self) -> int:
        """Return the command's exit status; 128 + N if signal N ended it, without a restart."""
        num_short = 0
        while True:
            began = time.monotonic()
            status = self._run_once()
            if status >= 0:
                return status
            if -status in _PASSED_ON:  # its work was over: until then it handles these signals
                return 128 - status
            is_short = time.monotonic() - began < _SHORT_SECONDS
            num_short = num_short + 1 if is_short else 0
            killed = f"error: the supervisor was killed by {signal.Signals(-status).name}"
            if num_short == _MOST_SHORT_LIVES:
                print(f"{killed} {num_short} times in a row; giving up", file=sys.stderr)
                return 128 - status
            print(f"{killed}; starting it again", file=sys.stderr, flush=True)

    def _run_once(self) -> int:
        # The child inherits the blocked signals and receives them once it has handlers for them
        # (StopSignals). Unblocked, one that came while it imports its modules would kill it.
        signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        self._child = subprocess.Popen(self._command)
        received = list(self._received)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        for number in received:
            self._child.send_signal(number)
        status = self._child.wait()
        self._child = None
        return status

    def _pass_on(self, number: int, frame: object) -> None:
        self._received.append(number)
        if self._child is not None:
            self._child.send_signal(number)


def main() -> int:
    """`python CODE launcher.slurm.batch_process ARGUMENTS...`: `launcher batch ARGUMENTS...`."""
    return BatchProcess(own_command("launcher", "batch", *sys.argv[1:])).run()


if __name__ == "__main__":
    sys.exit(main())
