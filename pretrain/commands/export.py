"""`pretrain export`: write a run's model to a directory of its own.

Reading it needs no run and no DeepSpeed; Hugging Face transformers also reads one without this
project.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from foundation.errors import ConfigError
from foundation.settings import assert_never
from pretrain.config.model import ExportFormat
from pretrain.rundir.history import setting_changes
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.run_paths import run_path
from pretrain.rundir.run_step import run_step

if TYPE_CHECKING:
    from data_pipeline.tokenizer import Tokenizer
    from pretrain.weights.export import TrainedModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `pretrain export`."""
    add = parser.add_argument
    add("run", type=run_path, metavar="RUN", help="run, its name, or RUN@STEP")
    add("--output", type=Path, required=True, metavar="DIR", help="new directory for the export")
    add("--data", type=Path, help="corpus whose tokenizer is exported (default: the run's)")
    add("--ema", action="store_true", help="export the weight EMA, if the run has one")
    add("--format", choices=get_args(ExportFormat), default="own", help="default %(default)s")


def run(arguments: argparse.Namespace) -> int:
    """Write the directory, completely or not at all."""
    import torch  # late, as is all that imports torch: it takes seconds

    from pretrain.weights.export import load_tokenizer, load_trained, refuse_existing, write_export

    refuse_existing(arguments.output)
    trained = load_trained(arguments.run, torch.device("cpu"), ema=arguments.ema)
    home = trained.tokenizer_directory(arguments.data)
    tokenizer = load_tokenizer(trained, home)
    export_format: ExportFormat = arguments.format
    match export_format:
        case "own":
            if trained.config.model.adopted:
                raise ConfigError("an adopted model is exported with --format huggingface")
            write_export(arguments.output, trained.module, trained.config, trained.step, home)
        case "huggingface":
            _write_huggingface(arguments, trained, tokenizer)
        case _:
            assert_never(export_format)
    total = sum(parameter.numel() for parameter in trained.module.parameters())
    print(f"{arguments.output}: {total:,} parameters after step {trained.step}")
    return 0


def _write_huggingface(
    arguments: argparse.Namespace, trained: TrainedModel, tokenizer: Tokenizer
) -> None:
    from pretrain.model.adopted import AdoptedModel
    from pretrain.weights.export import is_export, new_directory
    from pretrain.weights.huggingface.export import write_huggingface
    from pretrain.weights.huggingface.tokenizer_files import tokenizer_files

    module, source = trained.module, trained.config.initial_weights
    if isinstance(module, AdoptedModel) and source:
        from pretrain.weights.adopted import write_back

        with new_directory(arguments.output) as beside:
            write_back(beside, module, source)
        return
    evaluation, changes = None, []
    if not is_export(arguments.run):
        run_dir = RunDir.open(run_step(arguments.run).run)
        lines, changes = run_dir.read_metrics(), setting_changes(run_dir.ledger.read())
        until = [x for x in lines if x["kind"] == "evaluation" and x["step"] <= trained.step]
        evaluation = until[-1] if until else None
    write_huggingface(arguments.output, trained, tokenizer, evaluation, changes)
    if tokenizer_files(tokenizer) is None:
        print(
            f"{arguments.output} has no tokenizer: transformers has none of kind "
            f"{tokenizer.kind}; encode with data_pipeline.Tokenizer.load"
        )
