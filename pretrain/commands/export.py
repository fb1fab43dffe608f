"""`pretrain export`: write a run's model to a directory that needs no run and no DeepSpeed."""

from __future__ import annotations

import argparse
from pathlib import Path

from pretrain.rundir.run_paths import run_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    run = "run, or its name in runs/; its latest valid checkpoint is used"
    add("run", type=run_path, metavar="RUN", help=run)
    add("--output", type=Path, required=True, metavar="DIR", help="new directory for the export")
    add("--data", type=Path, help="corpus whose tokenizer is exported (default: the run's)")
    add("--ema", action="store_true", help="export the weight EMA, if the run has one")


def run(arguments: argparse.Namespace) -> int:
    """Write the directory, completely or not at all."""
    import torch  # late, as all that imports it: it takes seconds

    from pretrain.weights.export import refuse_existing, write_export
    from pretrain.weights.trained_model import load_tokenizer, load_trained

    refuse_existing(arguments.output)
    trained = load_trained(arguments.run, torch.device("cpu"), ema=arguments.ema)
    home = trained.tokenizer_directory(arguments.data)
    load_tokenizer(trained, home)
    write_export(arguments.output, trained.module, trained.config, trained.step, home)
    total = sum(parameter.numel() for parameter in trained.module.parameters())
    print(f"{arguments.output}: {total:,} parameters after step {trained.step}")
    return 0
