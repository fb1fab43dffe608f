"""Reading what `pretrain export` wrote: no DeepSpeed, no run directory."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from data_pipeline.config_loader import parse_config
from data_pipeline.errors import CheckpointError
from pretrain.config import RunConfig
from pretrain.model.parameters import load_parameters
from pretrain.model.transformer_xl import TransformerXL

FORMAT = 1
WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def is_export(directory: Path) -> bool:
    """Whether the directory holds an exported model."""
    return (directory / WEIGHTS).is_file() and (directory / CONFIG).is_file()


def load_export(directory: Path) -> tuple[TransformerXL, RunConfig, int]:
    """The model in evaluation mode, the settings it was trained with, and the step.

    CheckpointError, with the file's name, if something is missing or damaged.
    """
    if not is_export(directory):
        raise CheckpointError(f"{directory} holds no {WEIGHTS} and {CONFIG}; give what 'pretrain export' wrote")
    try:
        tree = json.loads((directory / CONFIG).read_text())
        found, step, settings = tree["format"], int(tree["step"]), tree["run"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory / CONFIG} is damaged ({error}); export the run again") from None
    if found != FORMAT:
        raise CheckpointError(f"{directory / CONFIG} has format {found}, this version reads format {FORMAT}")
    config = parse_config(RunConfig, settings, str(directory / CONFIG))
    module = TransformerXL(config.model)
    try:
        load_parameters(module, load_file(directory / WEIGHTS))
    except SafetensorError as error:
        raise CheckpointError(f"{directory / WEIGHTS} is damaged ({error}); export the run again") from None
    return module.eval(), config, step
