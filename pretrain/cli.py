"""The console script `pretrain`: its commands, and how its process exits."""

from __future__ import annotations

from foundation.interruption import ExitWhenInterrupted

with ExitWhenInterrupted():
    from typing import NoReturn

    from foundation.cli import Program
    from pretrain.distributed.threads import wait_briefly
    from pretrain.processes.leaving import end_process
    from pretrain.terminal.log import set_up_logging

# name -> (module, what it does); the modules are imported when they are needed
COMMANDS = {
    "new": (
        "pretrain.commands.new",
        "write a commented experiment for a corpus, which runs as it is",
    ),
    "train": (
        "pretrain.commands.train",
        "train or resume a run as one rank; 'launcher local' starts several",
    ),
    "branch": (
        "pretrain.commands.branch",
        "begin a new run with a checkpoint of another one, with other settings from there on",
    ),
    "evaluate": (
        "pretrain.commands.evaluate",
        "measure loss at any memory length, and how far back models use context",
    ),
    "generate": ("pretrain.commands.generate", "sample text from a checkpoint"),
    "export": (
        "pretrain.commands.export",
        "write a run's model as safetensors, with settings and tokenizer, to one directory",
    ),
    "import-original": (
        "pretrain.commands.import_original",
        "convert weights of the original PyTorch code, or in Hugging Face's layout, to an export",
    ),
    "describe": (
        "pretrain.commands.describe",
        "estimate parameters, FLOPs, memory and disk space of a run before it starts",
    ),
    "check-mixer": (
        "pretrain.commands.check_mixer",
        "prove that a kind of layer carries its state right and that its facts are true",
    ),
    "settings": (
        "pretrain.commands.settings",
        "explain the settings of an experiment: default, allowed values, meaning",
    ),
    "report": (
        "pretrain.commands.report",
        "show a run's loss, speed, failures and settings on one page, or several side by side",
    ),
    "checkpoint": ("pretrain.commands.checkpoint", "list, verify or fetch a run's checkpoints"),
    "verify-resume": (
        "pretrain.commands.verify_resume",
        "kill a run, resume it, and compare it bitwise with an uninterrupted one",
    ),
    "scale": ("pretrain.commands.scale", "run scaling-law experiments: plan, collect, fit, report"),
}
PROGRAM = Program(
    "pretrain",
    "Pretrain Transformer-XL language models, with exact memory and exact resume.",
    COMMANDS,
    libraries=("torch", "deepspeed"),
)
main = PROGRAM.main


def console() -> NoReturn:
    """Run `main` and exit: the entry point of the script and of `python -m pretrain`."""
    wait_briefly()
    set_up_logging("pretrain")
    end_process(main())
