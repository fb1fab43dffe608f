"""What each srun task runs: the rank variables from Slurm's, the trainer, and its exit status kept in a file.

srun mixes up the statuses of ranks that it ends because of another one's failure; the files do not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from pretrain.rundir.exit_status import EXIT_STOPPED

GRACE_SECONDS = 2.0


def main() -> int:
    """`python -m launcher.slurm.task LOG COMMAND...`; LOG holds `{rank}`, the status goes beside it."""
    log, *command = sys.argv[1:]
    rank = os.environ["SLURM_PROCID"]
    log = Path(log.replace("{rank}", rank))
    if not log.parent.is_dir():
        host = os.environ.get("SLURMD_NODENAME", "this host")
        print(
            f"error: {host} does not see {log.parent}; put the run on a disk that all hosts share",
            file=sys.stderr,
        )
        return 2
    # Slurm signals every process of the step. This one has to outlive the trainer, to write down how it ended.
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    with open(log, "ab") as file:
        status = subprocess.Popen(
            [sys.executable, *command], env=rank_variables(os.environ), stdout=file, stderr=file
        ).wait()
    log.with_suffix(".status").write_text(str(status))
    if status not in (0, EXIT_STOPPED):
        time.sleep(
            GRACE_SECONDS
        )  # srun ends the others when this task fails: let them say what they saw
    return 0 if status == 0 else 1


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank: Slurm's numbers under the names the trainer reads."""
    return {
        **environment,
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(
            int(environment["SLURM_STEP_NUM_TASKS"]) // int(environment["SLURM_STEP_NUM_NODES"])
        ),
    }


if __name__ == "__main__":
    sys.exit(main())
