"""Reading what `pretrain export` wrote: no DeepSpeed, no run directory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from data_pipeline.config_loader import parse_config
from data_pipeline.errors import CheckpointError
from data_pipeline.files import sha256_of
from pretrain.config.run import RunConfig
from pretrain.model.parameters import load_parameters
from pretrain.model.transformer_xl import TransformerXL

FORMAT = 1
WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def is_export(directory: Path) -> bool:
    """Whether the directory holds an exported model."""
    return (directory / WEIGHTS).is_file() and (directory / CONFIG).is_file()


def with_model_settings(config: RunConfig, settings: Mapping[str, Any] | None) -> RunConfig:
    """The run's settings with some of its model's replaced; ConfigError if they do not go together."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **(settings or {})))


def load_model(directory: Path | str) -> TransformerXL:
    """The model that `pretrain export` wrote, in evaluation mode, on the CPU; needs no DeepSpeed."""
    return load_export(Path(directory))[0]


def load_export(
    directory: Path, model_settings: Mapping[str, Any] | None = None
) -> tuple[TransformerXL, RunConfig, int]:
    """The model in evaluation mode, the settings it was trained with (but for `model_settings`), and the step.

    CheckpointError, with the file's name, if something is missing or damaged.
    """
    tree = checked_export(directory)
    config = with_model_settings(
        parse_config(RunConfig, tree["run"], str(directory / CONFIG)), model_settings
    )
    module = TransformerXL(config.model)
    try:
        load_parameters(module, load_file(directory / WEIGHTS))
    except SafetensorError as error:
        raise CheckpointError(
            f"{directory / WEIGHTS} is damaged ({error}); export the run again"
        ) from None
    return module.eval(), config, tree["step"]


def checked_export(directory: Path) -> dict[str, Any]:
    """What config.json says, after every byte of the weights was compared with it; CheckpointError as `load_export`."""
    if not is_export(directory):
        raise CheckpointError(
            f"{directory} holds no {WEIGHTS} and {CONFIG}; give what 'pretrain export' wrote"
        )
    try:
        tree = json.loads((directory / CONFIG).read_text())
        found, written = tree["format"], str(tree["sha256"])
        tree["step"], tree["run"] = int(tree["step"]), dict(tree["run"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{directory / CONFIG} is damaged ({error}); export the run again"
        ) from None
    if found != FORMAT:
        raise CheckpointError(
            f"{directory / CONFIG} has format {found}, this version reads format {FORMAT}"
        )
    if sha256_of(directory / WEIGHTS) != written:
        raise CheckpointError(
            f"{directory / WEIGHTS} is damaged: its bytes are not those written; export the run again"
        )
    return tree
