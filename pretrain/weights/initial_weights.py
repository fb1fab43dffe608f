"""Starting a run from the weights of an export, with any engine and ZeRO stage."""

from __future__ import annotations

from pathlib import Path

import torch

from data_pipeline.corpora.corpus import tokenizer_of
from foundation.errors import CheckpointError, DataError
from foundation.settings import parse_config
from pretrain.checkpoint.pieces import opened
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.engines.engine import Engine
from pretrain.model.transformer_xl import TransformerXL
from pretrain.weights.export import CONFIG, WEIGHTS, checked_export


def check_initial_weights(run: RunConfig) -> None:
    """Raise an error, before anything is written, if the run cannot start from its weights.

    CheckpointError unless names and shapes are those of the run's model and the export computed the
    same function of its weights; DataError if the export has another tokenizer.
    """
    export = run.initial_weights
    if export is None:
        return
    tree = checked_export(export)
    _refuse_other_tokens(run, export)
    with opened(export / WEIGHTS) as handle:
        names = handle.keys()
        shapes = {name: list(handle.get_slice(name).get_shape()) for name in names}
        _refuse_other_shapes(run, export, shapes)
    trained = parse_config(RunConfig, tree["run"], str(export / CONFIG))
    _refuse_other_function(run, export, trained.model)


def load_initial_weights(engine: Engine, run: RunConfig) -> None:
    """Copy the export's weights, if any, into the engine's fp32 master weights."""
    if run.initial_weights is None:
        return
    with opened(run.initial_weights / WEIGHTS) as handle:
        for fragment in engine.fragments():
            view = fragment.values["weight"]
            whole = handle.get_tensor(fragment.name).view(-1)
            view.copy_(whole[fragment.start : fragment.start + view.numel()])
    engine.after_load(0)


def _refuse_other_tokens(run: RunConfig, export: Path) -> None:
    if not (export / "tokenizer").is_dir():
        return
    homes = (export, run.data.directory())
    its, ours = (tokenizer_of(home).fingerprint for home in homes)
    if its != ours:
        raise DataError(
            f"initial_weights={export} was trained with tokenizer {its[:16]}, {run.data.path} has "
            f"{ours[:16]}; build the corpus with tokenizer.path={export / 'tokenizer'}"
        )


def _refuse_other_shapes(run: RunConfig, export: Path, found: dict[str, list[int]]) -> None:
    with torch.device("meta"):
        parameters = TransformerXL(run.model).named_parameters()
        expected = {name: list(value.shape) for name, value in parameters}
    names = found.keys() | expected.keys()
    odd = sorted(name for name in names if found.get(name) != expected.get(name))
    if odd:
        name = odd[0]
        raise CheckpointError(
            f"initial_weights={export}: {name} has shape {found.get(name, 'none')}, the run's "
            f"model expects {expected.get(name, 'none')} ({len(odd)} differ); use the model "
            f"settings in {export / 'config.json'}"
        )


def _refuse_other_function(run: RunConfig, export: Path, trained: ModelConfig) -> None:
    """The same weights under another norm position, activation or positions: another model."""
    its, ours = trained.function_settings(), run.model.function_settings()
    odd = sorted(name for name in its.keys() | ours.keys() if its.get(name) != ours.get(name))
    if odd:
        found = "; ".join(
            f"model.{name} is {getattr(trained, name)} there and {getattr(run.model, name)} here"
            for name in odd
        )
        raise CheckpointError(
            f"initial_weights={export} were trained as another function: {found}; use the model "
            f"settings in {export / CONFIG}"
        )
