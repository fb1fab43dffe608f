"""The variables of a rank from those of a Slurm task.

The only module that maps them. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping

from foundation.errors import ConfigError

# The file in which rank 0 of an attempt tells the others where they meet (world.py).
PORT_FILE_VARIABLE = "PRETRAIN_PORT_FILE"


def is_slurm_task(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of the tasks of a step."""
    return "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE of this task.

    ConfigError if srun did not start it.
    """
    num_tasks = number_in(environment, "SLURM_STEP_NUM_TASKS")
    num_nodes = number_in(environment, "SLURM_STEP_NUM_NODES", "1")
    return {
        "RANK": str(number_in(environment, "SLURM_PROCID")),
        "WORLD_SIZE": str(num_tasks),
        "LOCAL_RANK": str(number_in(environment, "SLURM_LOCALID")),
        "LOCAL_WORLD_SIZE": str(num_tasks // max(1, num_nodes)),
    }


def number_in(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    """Return the whole number in a variable; ConfigError if it holds something else or is unset."""
    text = environment.get(name, default)
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(
            f"the rank variable {name} is {'not set' if text is None else repr(text)}, expected a "
            "whole number; correct it, or start ranks with 'launcher local'"
        ) from None
