"""`launcher local | submit | ...`: its commands. Torch-free: it starts at once on a login node."""

from __future__ import annotations

from data_pipeline.commands import Program

# name -> (module, what it does)
COMMANDS = {
    "local": ("launcher.local", "train on this machine; restart after crashes, give up on a crash loop"),
    "status": ("launcher.status", "how runs stand: state, step, loss, speed, goodput, last checkpoint, last failure"),
    "submit": ("launcher.submit", "hand a run to Slurm, once; it goes on through time limits and crashes"),
    "batch": ("launcher.batch", "the supervisor inside a Slurm job; batch scripts call it"),
    "logs": ("launcher.logs", "what a run's ranks say, as they say it, or only what went wrong"),
    "cancel": ("launcher.cancel", "end a run for good, after a last checkpoint where there is time"),
    "resume": ("launcher.resume", "go on with a run as it was started: in a new Slurm job, or on this machine"),
    "preflight": ("launcher.preflight", "a short job that names slow and broken nodes"),
    "sweep": ("launcher.sweep", "run the cells of a sweep file, several at once; skip what is done"),
}
PROGRAM = Program("launcher", "Keep pretraining runs going.", COMMANDS)
main = PROGRAM.main
