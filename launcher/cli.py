"""`launcher local | submit | ...`: its commands. Torch-free: it starts at once on a login node."""

from __future__ import annotations

from foundation.interruption import ExitWhenInterrupted

with ExitWhenInterrupted():
    from collections.abc import Sequence

    from foundation.cli import Program
    from pretrain.terminal.log import set_up_logging

# name -> (module, what it does)
COMMANDS = {
    "local": (
        "launcher.commands.local",
        "train on this machine; restart after crashes, give up on a crash loop",
    ),
    "status": (
        "launcher.commands.status",
        "show the state of runs: step, loss, speed, goodput, last checkpoint, last failure",
    ),
    "submit": (
        "launcher.commands.submit",
        "submit a run to Slurm, once; it continues through time limits and crashes",
    ),
    "batch": (
        "launcher.slurm.job_supervisor",
        "the supervisor inside a Slurm job; batch scripts call it",
    ),
    "logs": (
        "launcher.commands.logs",
        "show the log of a run's ranks, also while it is written, or only the errors",
    ),
    "cancel": (
        "launcher.commands.cancel",
        "stop a run, after a last checkpoint if there is time",
    ),
    "resume": (
        "launcher.commands.resume",
        "continue a run the way it was started: in a new Slurm job, or on this machine",
    ),
    "settings": (
        "launcher.commands.settings",
        "explain the settings of a cluster file: default, allowed values, meaning",
    ),
    "new-cluster": (
        "launcher.commands.new_cluster",
        "write a commented cluster file for the Slurm of this machine",
    ),
    "preflight": (
        "launcher.commands.preflight",
        "run a short job that finds slow and broken nodes",
    ),
    "sweep": (
        "launcher.commands.sweep",
        "run the cells of a sweep file, several at a time; skip those that are done",
    ),
}
PROGRAM = Program(
    "launcher",
    "Keep pretraining runs going.",
    COMMANDS,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns its exit status. Supervisors set up logging again, under their own name.
    """
    set_up_logging("launcher")
    return PROGRAM.main(arguments)
