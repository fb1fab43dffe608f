"""`pretrain train | evaluate | ...`: its commands, and how its processes end."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

from data_pipeline.program import Program
from pretrain.terminal.log import set_up_logging

# name -> (module, what it does)
COMMANDS = {
    "train": (
        "pretrain.commands.train",
        "train or resume a run as one rank; 'launcher local' starts several",
    ),
    "evaluate": (
        "pretrain.commands.evaluate",
        "loss and bits per character with memories of any length, and how far back models look",
    ),
    "generate": ("pretrain.commands.generate", "sample text from a checkpoint"),
    "export": (
        "pretrain.commands.export",
        "a run's model as safetensors, settings and tokenizer, in one directory",
    ),
    "import-original": (
        "pretrain.commands.import_original",
        "weights of the original PyTorch code, or in Hugging Face's layout, as an export",
    ),
    "describe": (
        "pretrain.commands.describe",
        "parameters, FLOPs, memory and disk of a run before it starts",
    ),
    "report": (
        "pretrain.commands.report",
        "a run's loss, speed, failures and settings as one page",
    ),
    "compare": (
        "pretrain.commands.compare",
        "several runs side by side: numbers, settings, curves",
    ),
    "checkpoint": ("pretrain.commands.checkpoint", "list, verify or prune what a run has saved"),
    "golden": (
        "pretrain.commands.golden",
        "compare the model with recorded results of the original implementation",
    ),
    "verify-resume": (
        "pretrain.commands.verify_resume",
        "kill a run, resume it, and compare it bitwise with an uninterrupted one",
    ),
    "scale": (
        "pretrain.commands.scale",
        "scaling-law experiments: plan, collect, fit, predict, report, context",
    ),
    "demo": (
        "pretrain.demo.command",
        "build, train, kill, resume, compare, evaluate and sample on this machine, in minutes",
    ),
}
PROGRAM = Program(
    "pretrain",
    "Pretrain Transformer-XL language models, with exact memory and exact resume.",
    COMMANDS,
)
main = PROGRAM.main


def console() -> NoReturn:
    """What the console script and `python -m pretrain` run: `main`, then the end of the process."""
    set_up_logging("pretrain")
    end_process(main())


def end_process(status: int) -> NoReturn:
    """Leave at once. While Python shuts down, gloo's threads now and then abort a process whose work is done."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody may be reading any more
            stream.flush()
    os._exit(status)
