"""`pretrain train | evaluate | generate | describe | golden | verify-resume | demo`: finds the command, runs it.

Each command is a module with `add_arguments(parser)` and `run(arguments) -> exit status`. Only the module of the
command that was asked for is imported: importing torch takes seconds, and `describe` and `--help` need none of it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from data_pipeline.errors import UserError, exit_status_of
from data_pipeline.yaml_files import did_you_mean

# name -> (module, what it does)
COMMANDS = {
    "train": ("pretrain.train", "train or resume one run (one rank's program; 'launcher local' starts several)"),
    "evaluate": (
        "pretrain.evaluate_command",
        "loss and bits per character with memories of any length, and how far back models look",
    ),
    "generate": ("pretrain.generate", "sample text from a checkpoint"),
    "export": ("pretrain.export", "a run's model as safetensors, settings and tokenizer, in one directory"),
    "import-original": (
        "pretrain.import_original",
        "weights of the original PyTorch code, or in Hugging Face's layout, as an export",
    ),
    "describe": ("pretrain.describe", "parameters, FLOPs, memory and disk of a run before it starts"),
    "checkpoint": ("pretrain.checkpoint_command", "list, verify or prune what a run has saved"),
    "golden": ("pretrain.golden", "compare the model with recorded results of the original implementation"),
    "verify-resume": (
        "pretrain.verify_resume",
        "kill a run, resume it, and compare it bitwise with an uninterrupted one",
    ),
    "bench": ("pretrain.bench.command", "measure the speeds the project promises, as ratios in one run"),
    "scale": ("pretrain.scale", "scaling-law experiments: plan, collect, fit, predict, report, context"),
    "demo": ("pretrain.demo.command", "the whole story on this machine in minutes"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of the command line; returns its exit status."""
    return exit_status_of(lambda: _dispatch(sys.argv[1:] if arguments is None else list(arguments)))


def console() -> NoReturn:
    """What the console script and `python -m pretrain` run: `main`, then the end of the process."""
    end_process(main())


def end_process(status: int) -> NoReturn:
    """Leave at once. While Python shuts down, gloo's threads now and then abort a process whose work is done."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody may be reading any more
            stream.flush()
    os._exit(status)


def usage() -> str:
    """What `pretrain --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: pretrain COMMAND ...",
            "",
            "Pretrain Transformer-XL language models, with exact memory and exact resume.",
            "",
            *lines,
            "",
            "'pretrain COMMAND --help' says more about one of them.",
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
        raise UserError(f"'pretrain {name}' is no command{did_you_mean(name, list(COMMANDS))}")
    module_name, summary = COMMANDS[name]
    module = importlib.import_module(module_name)
    parser = argparse.ArgumentParser(prog=f"pretrain {name}", description=f"{summary[0].upper()}{summary[1:]}.")
    module.add_arguments(parser)
    return module.run(_parsed(parser, rest))


def _parsed(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Settings may stand between the options, but for commands with actions, where argparse refuses that."""
    try:
        return parser.parse_intermixed_args(arguments)
    except TypeError:
        return parser.parse_args(arguments)
