"""The program of an srun task: runs a rank's trainer, then writes its exit status into a file.

srun mixes up the statuses of ranks that it kills after another one failed; the files do not.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from foundation.errors import exit_status_of
from foundation.files import own_file, write_text
from pretrain.checkpoint.storage_retry import StorageRetry, with_retries
from pretrain.distributed.slurm_variables import rank_variables
from pretrain.errors import StorageError
from pretrain.rundir.exit_statuses import EXIT_STOPPED, describe_exit
from pretrain.rundir.watchdog import under_watchdog

GRACE_SECONDS = 2.0
PATIENCE_SECONDS = 1800.0  # how long to try to write the status
STOPPING_SECONDS = 10.0  # the same after a request to stop: then nothing depends on the status


def main() -> int:
    """Run a rank: `python CODE launcher.slurm.task LOG COMMAND...`. LOG contains `{rank}`; the
    status file is next to it. With `starts` as the only argument, answer a probe of the node."""
    log, *command = sys.argv[1:]
    if log == "starts":  # a probe: a rank's program would start, too
        print(f"xl|{os.environ['SLURMD_NODENAME']}|{log}|lx")
        return 0
    rank = os.environ["SLURM_PROCID"]
    log = Path(log.replace("{rank}", rank))
    if not log.parent.is_dir():
        node = os.environ.get("SLURMD_NODENAME", "this node")
        print(
            f"error: {node} does not see {log.parent}; put the run on a disk that all nodes share",
            file=sys.stderr,
        )
        return 2
    # Slurm signals every process of the step. This one has to outlive the trainer, to write its
    # exit status.
    stops: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, _: stops.append(number))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the trainer inherits this
    with open(log, "ab", opener=own_file) as file:
        trainer = subprocess.Popen(
            under_watchdog([sys.executable, *command]),
            env={**os.environ, **rank_variables(os.environ)},
            stdout=file,
            stderr=file,
        )
        # People ask for a save by `scancel --signal=USR1`, which the trainer leaves to NCCL.
        signal.signal(signal.SIGUSR1, lambda *_: trainer.send_signal(signal.SIGUSR2))
        status = trainer.wait()
    # The supervisor decides by this file, so it is written whole, with retries on a full disk.
    seconds = STOPPING_SECONDS if stops else PATIENCE_SECONDS
    retry = StorageRetry(seconds, stop_requests=lambda: len(stops))
    try:
        with_retries(retry, lambda: write_status(log, status))
    except StorageError as error:
        end = f"rank {rank} {describe_exit(status)}"
        print(f"error: {end}; its status file was not written: {error}", file=sys.stderr)
    if status not in (0, EXIT_STOPPED):
        # When this task fails, srun kills the others. Until then they can log the error they see.
        time.sleep(GRACE_SECONDS)
    return 0 if status == 0 else 1


def write_status(log: Path, status: int) -> None:
    """Write a rank's exit status next to its log, also if the logs were removed."""
    for folder in (log.parent.parent, log.parent):  # the run directory itself must exist
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
    write_text(log.with_suffix(".status"), str(status))


if __name__ == "__main__":
    sys.exit(exit_status_of(main))
