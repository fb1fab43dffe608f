"""`launcher local | submit | ...`: its commands. Torch-free: it starts at once on a login node."""

from __future__ import annotations

from data_pipeline.program import Program

# name -> (module, what it does)
COMMANDS = {
    "local": (
        "launcher.commands.local",
        "train on this machine; restart after crashes, give up on a crash loop",
    ),
    "status": (
        "launcher.commands.status",
        "how runs stand: state, step, loss, speed, goodput, last checkpoint, last failure",
    ),
    "submit": (
        "launcher.commands.submit",
        "hand a run to Slurm, once; it goes on through time limits and crashes",
    ),
    "batch": ("launcher.slurm.batch", "the supervisor inside a Slurm job; batch scripts call it"),
    "logs": (
        "launcher.commands.logs",
        "what a run's ranks say, as they say it, or only what went wrong",
    ),
    "cancel": (
        "launcher.commands.cancel",
        "end a run for good, after a last checkpoint where there is time",
    ),
    "resume": (
        "launcher.commands.resume",
        "go on with a run as it was started: in a new Slurm job, or on this machine",
    ),
    "preflight": ("launcher.commands.preflight", "a short job that names slow and broken nodes"),
    "sweep": (
        "launcher.commands.sweep",
        "run the cells of a sweep file, several at once; skip what is done",
    ),
}
PROGRAM = Program("launcher", "Keep pretraining runs going.", COMMANDS)
main = PROGRAM.main
