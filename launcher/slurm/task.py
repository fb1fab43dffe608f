"""What each srun task runs: the trainer with its rank variables; then it writes the exit status
into a file.

srun mixes up the statuses of ranks that it kills because of another one's failure; the files do
not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from foundation.errors import exit_status_of
from foundation.files import own_file, write_text
from foundation.retry import Patience, StorageError, outlast
from pretrain.distributed.slurm_variables import rank_variables
from pretrain.rundir.events import EXIT_STOPPED, describe_exit

GRACE_SECONDS = 2.0
PATIENCE_SECONDS = 1800.0  # with a run directory that cannot be written
STOPPING_SECONDS = 10.0  # the same after a request to stop: then nothing depends on the status


def main() -> int:
    """`python CODE launcher.slurm.task LOG COMMAND...`.

    LOG contains `{rank}`; the status file is next to it.
    """
    log, *command = sys.argv[1:]
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
    with open(log, "ab", opener=own_file) as file:
        status = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **rank_variables(os.environ)},
            stdout=file,
            stderr=file,
        ).wait()
    # Whole or absent, and waiting for a full disk: the supervisor decides by it.
    seconds = STOPPING_SECONDS if stops else PATIENCE_SECONDS
    patience = Patience(seconds, stop_requests=lambda: len(stops))
    try:
        outlast(patience, lambda: write_text(log.with_suffix(".status"), str(status)))
    except StorageError as error:
        print(f"error: rank {rank} {describe_exit(status)}, not written: {error}", file=sys.stderr)
    if status not in (0, EXIT_STOPPED):
        # When this task fails, srun kills the others. Until then they can log the error they see.
        time.sleep(GRACE_SECONDS)
    return 0 if status == 0 else 1


if __name__ == "__main__":
    sys.exit(exit_status_of(main))
