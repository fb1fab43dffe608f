"""`launcher local | submit | ...`: finds the command, runs it. Torch-free: it starts at once on a login node."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from data_pipeline.errors import UserError, exit_status_of
from data_pipeline.yaml_files import did_you_mean

# name -> (module, what it does)
COMMANDS = {
    "local": ("launcher.local", "train on this machine; restart after crashes, give up on a crash loop"),
    "status": ("launcher.status", "how runs stand: state, step, loss, speed, goodput, last checkpoint, last failure"),
    "submit": ("launcher.submit", "hand a run to Slurm, once; it goes on through time limits and crashes"),
    "batch": ("launcher.batch", "the supervisor inside a Slurm job; batch scripts call it"),
    "logs": ("launcher.logs", "what a run's ranks say, as they say it, or only what went wrong"),
    "cancel": ("launcher.cancel", "end a run for good, after a last checkpoint where there is time"),
    "resume": ("launcher.resume", "go on with a run as it was started: in a new Slurm job, or on this machine"),
    "sweep": ("launcher.sweep", "run the cells of a sweep file, several at once; skip what is done"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of the command line; returns its exit status."""
    return exit_status_of(lambda: _dispatch(sys.argv[1:] if arguments is None else list(arguments)))


def usage() -> str:
    """What `launcher --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: launcher COMMAND ...",
            "",
            "Keep pretraining runs going.",
            "",
            *lines,
            "",
            "'launcher COMMAND --help' says more about one of them.",
        ]
    )


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(usage(), file=sys.stderr)
        return 2
    name, *rest = arguments
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in COMMANDS:
        raise UserError(f"'launcher {name}' is no command{did_you_mean(name, list(COMMANDS))}")
    module_name, summary = COMMANDS[name]
    module = importlib.import_module(module_name)
    parser = argparse.ArgumentParser(prog=f"launcher {name}", description=f"{summary[0].upper()}{summary[1:]}.")
    module.add_arguments(parser)
    return module.run(parser.parse_intermixed_args(rest))
