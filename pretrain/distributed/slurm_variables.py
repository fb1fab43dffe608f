"""The variables of a rank from those of a Slurm task.

The only module that maps them. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping

# The file in which rank 0 of an attempt tells the others where they meet (rendezvous.py).
PORT_FILE_VARIABLE = "PRETRAIN_PORT_FILE"


def is_slurm_task(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of the tasks of a step."""
    return "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE of this task.

    KeyError if srun did not start it.
    """
    num_tasks = environment["SLURM_STEP_NUM_TASKS"]
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": num_tasks,
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(
            int(num_tasks) // int(environment.get("SLURM_STEP_NUM_NODES", "1"))
        ),
    }
