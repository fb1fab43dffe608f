"""A model as a directory that needs neither a run nor DeepSpeed: writing it and reading it.

DIR/model.safetensors   every parameter once, in float32, under the model's own names
DIR/config.json         the run's settings, the step, and the SHA-256 of the weights
DIR/tokenizer/          the tokenizer of the corpus
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from data_pipeline.config_loader import parse_config, to_tree
from data_pipeline.errors import CheckpointError, ConfigError
from data_pipeline.files import fsync_directory, fsync_file, sha256_of, write_json
from pretrain.config.run import RunConfig
from pretrain.model.parameters import load_parameters
from pretrain.model.transformer_xl import TransformerXL

FORMAT = 1
WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def is_export(directory: Path) -> bool:
    """Whether the directory contains an exported model."""
    return (directory / WEIGHTS).is_file() and (directory / CONFIG).is_file()


def refuse_existing(output: Path) -> None:
    """Raise ConfigError if the output exists."""
    if output.exists():
        raise ConfigError(f"{output} already exists; choose a new --output")


def write_export(
    output: Path, module: TransformerXL, config: RunConfig, step: int, tokenizer_home: Path
) -> None:
    """Write to a directory beside `output` and rename it, so that `output` is never incomplete."""
    beside = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    beside.mkdir(parents=True)
    try:
        weights = beside / WEIGHTS
        parameters = module.named_parameters()
        tensors = {name: parameter.detach().contiguous() for name, parameter in parameters}
        try:
            save_file(tensors, weights, metadata={"format": "pt"})
        except SafetensorError as error:  # also a full disk
            raise CheckpointError(f"{weights} cannot be written: {error}") from None
        # safetensors creates files that only their owner can read; give them the usual mode.
        shutil.copymode(beside, weights)
        weights.chmod(weights.stat().st_mode & 0o666)
        fsync_file(weights)
        about = {"format": FORMAT, "step": step, "sha256": sha256_of(weights)}
        write_json(beside / CONFIG, {**about, "run": to_tree(config)})
        if (tokenizer_home / "tokenizer").is_dir():  # imported weights may come without one
            shutil.copytree(tokenizer_home / "tokenizer", beside / "tokenizer")
        os.rename(beside, output)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    fsync_directory(output.parent)


def load_model(directory: Path | str) -> TransformerXL:
    """Return the exported model in evaluation mode, on the CPU; needs no DeepSpeed."""
    return load_export(Path(directory))[0]


def load_export(
    directory: Path, model_settings: Mapping[str, Any] | None = None
) -> tuple[TransformerXL, RunConfig, int]:
    """Return the model in evaluation mode, its settings with `model_settings`, and the step.

    Raises CheckpointError, with the file's name, if something is missing or corrupted.
    """
    tree = checked_export(directory)
    config = parse_config(RunConfig, tree["run"], str(directory / CONFIG))
    config = with_model_settings(config, model_settings)
    module = TransformerXL(config.model)
    try:
        load_parameters(module, load_file(directory / WEIGHTS))
    except SafetensorError as error:
        raise CheckpointError(
            f"{directory / WEIGHTS} is corrupted ({error}); export the run again"
        ) from None
    return module.eval(), config, tree["step"]


def with_model_settings(config: RunConfig, settings: Mapping[str, Any] | None) -> RunConfig:
    """Replace some of the model's settings; ConfigError if they are inconsistent."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **(settings or {})))


def checked_export(directory: Path) -> dict[str, Any]:
    """Return the contents of config.json after verifying the checksum of the weights.

    Raises CheckpointError as `load_export` does.
    """
    if not is_export(directory):
        raise CheckpointError(
            f"{directory} contains no {WEIGHTS} and {CONFIG}; give the output of 'pretrain export'"
        )
    try:
        tree = json.loads((directory / CONFIG).read_text())
        found, written = tree["format"], str(tree["sha256"])
        tree["step"], tree["run"] = int(tree["step"]), dict(tree["run"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{directory / CONFIG} is corrupted ({error}); export the run again"
        ) from None
    if found != FORMAT:
        raise CheckpointError(
            f"{directory / CONFIG} has format {found}, this version reads format {FORMAT}"
        )
    if sha256_of(directory / WEIGHTS) != written:
        raise CheckpointError(
            f"{directory / WEIGHTS} is corrupted: its checksum differs from the one in {CONFIG}; "
            "export the run again"
        )
    return tree
