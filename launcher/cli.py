"""`launcher local | submit | ...`: its commands. Torch-free: it starts at once on a login node."""

from __future__ import annotations

from foundation.interruption import ExitWhenInterrupted

with ExitWhenInterrupted():
    from collections.abc import Sequence

    from foundation.cli import Program
    from pretrain.terminal.log import set_up_logging

# name -> (module, what it does)
COMMANDS = {
    "local": ("launcher.commands.local", "train on this machine, restarting after crashes"),
    "status": (
        "launcher.commands.status",
        "show the states of runs: step, loss, speed, checkpoint, failure",
    ),
    "submit": (
        "launcher.commands.submit",
        "submit a run to Slurm, once; it outlives time limits and crashes",
    ),
    "batch": (
        "launcher.slurm.job_supervisor",
        "supervise a run inside a Slurm job; batch scripts call it",
    ),
    "logs": (
        "launcher.commands.logs",
        "show the log of a run's ranks, also as it grows, or only errors",
    ),
    "cancel": ("launcher.commands.cancel", "stop a run, after a last checkpoint if there is time"),
    "signal": (
        "launcher.commands.cancel:signal",
        "ask a run that trains for a checkpoint, an evaluation, or to save and stop",
    ),
    "resume": (
        "launcher.commands.resume",
        "continue a run as it was started: in a new Slurm job, or here",
    ),
    "settings": (
        "launcher.commands.new_cluster:settings",
        "explain a cluster file's settings: default, values, meaning",
    ),
    "new-cluster": (
        "launcher.commands.new_cluster",
        "write a commented cluster file for the Slurm of this machine",
    ),
    "preflight": (
        "launcher.commands.preflight",
        "run a short job that finds slow and broken nodes",
    ),
    "sweep": ("launcher.commands.sweep", "run the cells of a sweep file, several at a time"),
}
PROGRAM = Program(
    "launcher", "Keep pretraining runs going.", COMMANDS, libraries=("torch", "deepspeed")
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns its exit status. Supervisors set up logging again, under their own name.
    """
    set_up_logging("launcher")
    return PROGRAM.main(arguments)
