"""The variables of a rank, which may be a Slurm task's. Torch-free."""

from collections.abc import Mapping

from foundation.errors import ConfigError

# The file where rank 0 of an attempt writes the port at which the ranks meet (rendezvous.py).
PORT_FILE_VARIABLE = "PRETRAIN_PORT_FILE"
GPUS_VARIABLE = "PRETRAIN_GPUS"  # how many GPUs each node of the job has


def is_slurm_task(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this process as one of the tasks of a step."""
    return "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE of this task of srun."""
    num_tasks = number_in(environment, "SLURM_STEP_NUM_TASKS")
    num_nodes = number_in(environment, "SLURM_STEP_NUM_NODES", "1")
    return {
        "RANK": str(number_in(environment, "SLURM_PROCID")),
        "WORLD_SIZE": str(num_tasks),
        "LOCAL_RANK": str(number_in(environment, "SLURM_LOCALID")),
        "LOCAL_WORLD_SIZE": str(num_tasks // max(1, num_nodes)),
    }


def rank_numbers(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Return rank, number of ranks and local rank: RANK and so on, else Slurm's, else one process.

    ConfigError if they contradict each other.
    """
    if "RANK" not in environment and is_slurm_task(environment) and "MASTER_ADDR" in environment:
        # Without MASTER_ADDR it is one process, such as a command in an interactive job step.
        environment = rank_variables(environment)
    rank, world_size, local_rank = 0, 1, 0
    if "RANK" in environment:
        rank, world_size = number_in(environment, "RANK"), number_in(environment, "WORLD_SIZE")
        local_rank = number_in(environment, "LOCAL_RANK", "0")
    else:
        for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"):  # mpirun sets the second
            if number_in(environment, name, "1") > 1:
                raise ConfigError(
                    f"found {name}={environment[name]} and no RANK; start ranks with 'launcher "
                    f"local' or torchrun, or unset {name} for one process"
                )
    if not 0 <= rank < world_size or local_rank < 0:
        raise ConfigError(
            f"found RANK={rank}, WORLD_SIZE={world_size} and LOCAL_RANK={local_rank}, expected "
            "0 <= RANK < WORLD_SIZE and 0 <= LOCAL_RANK; correct the variables"
        )
    return rank, world_size, local_rank


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
