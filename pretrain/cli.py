"""The console script `pretrain`: its commands, and how its process exits."""

from foundation.interruption import ExitWhenInterrupted

with ExitWhenInterrupted():
    from typing import NoReturn

    from foundation.cli import Program, targets
    from pretrain.distributed.threads import wait_briefly
    from pretrain.processes.leaving import end_process
    from pretrain.terminal.log import set_up_logging

SUMMARIES = {
    "new": "write a commented experiment for a corpus, which runs as it is",
    "adopt": "write an experiment that trains a checkpoint of Hugging Face, with carried state",
    "train": "train or resume a run as one rank; 'launcher local' starts several",
    "branch": "begin a new run with a checkpoint of another one and other settings from there on",
    "evaluate": "measure loss at any memory length, and how far back models use context",
    "generate": "sample text from a checkpoint",
    "export": "write a run's model as safetensors, with settings and tokenizer, to a directory",
    "import-original": "convert weights of the original code, or in Hugging Face's layout",
    "describe": "estimate parameters, FLOPs, memory and disk space of a run before it starts",
    "check-mixer": "prove that a kind of layer carries its state right and its facts are true",
    "settings": "explain the settings of an experiment: default, allowed values, meaning",
    "report": "show loss, speed, failures and settings of a run on a page, or several side by side",
    "checkpoint": "list, verify or fetch a run's checkpoints",
    "verify-resume": "kill a run, resume it, and compare it bitwise with an uninterrupted one",
    "scale": "run scaling-law experiments: plan, collect, fit, report",
}
COMMANDS = targets("pretrain.commands.", SUMMARIES)
PROGRAM = Program(
    "pretrain",
    "Train models with recurrent memory, whose state is carried and resumed exactly.",
    COMMANDS,
    libraries=("torch", "deepspeed"),
    other_names=(
        ("sample", "pretrain generate"),
        ("resume", "launcher resume"),
        ("status", "launcher status"),
        ("compare", "pretrain report RUN RUN"),
    ),
    schema="pretrain.config.run:RunConfig",
)
main = PROGRAM.main


def console() -> NoReturn:
    """Run `main` and exit: the entry point of the script and of `python -m pretrain`."""
    wait_briefly()
    set_up_logging("pretrain")
    end_process(main())
