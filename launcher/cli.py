"""`launcher local | submit | ...`: its commands. Torch-free: it starts at once on a login node."""

from foundation.interruption import ExitWhenInterrupted

with ExitWhenInterrupted():
    from collections.abc import Sequence

    from foundation.cli import Program, targets
    from pretrain.terminal.log import set_up_logging

SUMMARIES = {
    "local": "train on this machine, restarting after crashes",
    "status": "show the states of runs: step, loss, speed, checkpoint, failure",
    "submit": "submit a run to Slurm, once; it outlives time limits and crashes",
    "logs": "show the log of a run's ranks, also as it grows, or only errors",
    "cancel": "stop a run, after a last checkpoint if there is time",
    "resume": "continue a run as it was started: in a new Slurm job, or here",
    "new-cluster": "write a commented cluster file for the Slurm of this machine",
    "preflight": "run a short job that finds slow and broken nodes",
    "sweep": "run the cells of a sweep file, several at a time",
}
COMMANDS = targets("launcher.commands.", SUMMARIES) | {
    "batch": (
        "launcher.slurm.job_supervisor",
        "supervise a run inside a Slurm job; batch scripts call it",
    ),
    "signal": (
        "launcher.commands.cancel:signal",
        "ask a run that trains for a checkpoint, an evaluation, or to save and stop",
    ),
    "settings": (
        "launcher.commands.new_cluster:settings",
        "explain a cluster file's settings: default, values, meaning",
    ),
}
PROGRAM = Program(
    "launcher",
    "Keep pretraining runs going.",
    COMMANDS,
    libraries=("torch", "deepspeed"),
    other_names=(
        ("stop", "launcher signal RUN stop"),
        ("branch", "pretrain branch"),
        ("report", "pretrain report"),
        ("train", "launcher local"),
    ),
    schema="pretrain.config.run:RunConfig",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status. Supervisors set up logging again, by their name."""
    set_up_logging("launcher")
    return PROGRAM.main(arguments)
