"""`pretrain export`: a run's model as a directory that needs nothing else.

DIR/model.safetensors   every parameter once, in float32, under the model's own names
DIR/config.json         the run's settings, the step, and the SHA-256 of the weights
DIR/tokenizer/          the corpus' tokenizer
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from data_pipeline.config_loader import to_tree
from data_pipeline.errors import ConfigError
from data_pipeline.files import fsync_directory, fsync_file, sha256_of, write_json
from pretrain.weights.load_export import CONFIG, FORMAT, WEIGHTS
from pretrain.weights.trained_model import TrainedModel, load_tokenizer, load_trained


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `pretrain export`."""
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="directory of a run; its newest good checkpoint is used",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="new directory")
    parser.add_argument(
        "--ema", action="store_true", help="the running average of the weights, if the run kept one"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the directory, whole or not at all."""
    refuse_existing(arguments.output)
    trained = load_trained(
        arguments.run,
        torch.device("cpu"),
        say=lambda text: print(text, file=sys.stderr),
        ema=arguments.ema,
    )
    load_tokenizer(trained, trained.tokenizer_home)
    write_export(trained, arguments.output)
    total = sum(parameter.numel() for parameter in trained.module.parameters())
    print(f"{arguments.output}: {total:,} parameters after step {trained.step}")
    return 0


def refuse_existing(output: Path) -> None:
    """ConfigError if there is something already."""
    if output.exists():
        raise ConfigError(f"{output} exists already; choose a new --output")


def write_export(trained: TrainedModel, output: Path) -> None:
    """Beside first, then renamed: `output` is never half an export."""
    beside = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    beside.mkdir(parents=True)
    try:
        tensors = {
            name: parameter.detach().contiguous()
            for name, parameter in trained.module.named_parameters()
        }
        save_file(tensors, beside / WEIGHTS, metadata={"format": "pt"})
        shutil.copymode(
            beside, beside / WEIGHTS
        )  # safetensors lets nobody else read what it writes
        (beside / WEIGHTS).chmod((beside / WEIGHTS).stat().st_mode & 0o666)
        fsync_file(beside / WEIGHTS)
        about = {"format": FORMAT, "step": trained.step, "sha256": sha256_of(beside / WEIGHTS)}
        write_json(beside / CONFIG, {**about, "run": to_tree(trained.config)})
        if (trained.tokenizer_home / "tokenizer").is_dir():  # imported weights may come without one
            shutil.copytree(trained.tokenizer_home / "tokenizer", beside / "tokenizer")
        os.rename(beside, output)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    fsync_directory(output.parent)
