"""The weights that a run starts from: of an export, or of a checkpoint that a run has kept."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from data_pipeline.corpora.corpus_identity import tokenizer_of
from data_pipeline.tokenizer import MODEL_NAME, read_model
from foundation.errors import DataError, named_setting, shown
from foundation.files import read_json
from foundation.settings import parse_config
from pretrain.checkpoint.directory import step_directory
from pretrain.checkpoint.index import read_index
from pretrain.checkpoint.load import FragmentReader
from pretrain.checkpoint.pieces import open_tensors
from pretrain.checkpoint.verify import verify
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.engines.engine import Engine
from pretrain.errors import CheckpointError
from pretrain.model.transformer_xl import TransformerXL
from pretrain.rundir.events import TrainingBegan
from pretrain.rundir.history import last_event
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.run_paths import RUNS
from pretrain.rundir.run_step import RunStep, run_step
from pretrain.weights.adopted import check_source, open_weights
from pretrain.weights.export import (
    CONFIG,
    HUGGING_FACE_PREFIX,
    HUGGING_FACE_TYPE,
    LARGEST_CONFIG_BYTES,
    TOKENIZER,
    WEIGHTS,
    checked_export,
    is_export,
)


@dataclass(frozen=True)
class _Origin:
    """What is known of the weights."""

    model: ModelConfig
    shapes: dict[str, list[int]]
    tokenizer: str  # fingerprint of its tokenizer; "" if that is unknown
    settings: Path  # the file that has the model's settings


def check_initial_weights(run: RunConfig) -> None:
    """Raise an error, before anything is written, if the run cannot start from its weights.

    CheckpointError unless names and shapes fit the run's model, and settings that no shape shows,
    as the activation, are equal; DataError if the weights were trained with another tokenizer.
    """
    weights = run.initial_weights
    if weights is None:
        return
    if run.model.facts:
        check_source(weights, run.model.facts.config)
        ours = tokenizer_of(run.data.directory()).model
        files = [weights / name for name in ("tokenizer.json", MODEL_NAME)]
        theirs = [read_model(file) for file in files if file.is_file()]
        if theirs and ours not in theirs:
            raise DataError(
                f"initial_weights={weights} has another tokenizer than {run.data.path}; build the "
                f"corpus with tokenizer.path={weights}"
            )
        return
    with named_setting("initial_weights"):
        named = _kept(weights)
        origin = _of_checkpoint(*named) if named else _of_export(weights)
    _refuse_other_tokens(run, weights, origin)
    _refuse_other_function(run, weights, origin)
    _refuse_other_shapes(run, weights, origin)


def model_of_weights(weights: Path) -> ModelConfig:
    """Return the model of the weights."""
    with named_setting("initial_weights"):
        named = _kept(weights)
        return RunDir.open(named.run).config.model if named else _model_of_export(weights)[0]


def load_initial_weights(engine: Engine, run: RunConfig) -> None:
    """Copy the weights, if any, into the engine's fp32 master weights."""
    weights = run.initial_weights
    if weights is None:
        return
    if run.model.facts:
        with open_weights(weights, run.model.facts.config) as tensor:
            for fragment in engine.fragments():
                view = fragment.values["weight"]
                whole = tensor(fragment.name).reshape(-1)
                view.copy_(whole[fragment.start : fragment.start + view.numel()])
    elif named := _kept(weights):
        directory = step_directory(RunDir(named.run).checkpoints, named.step or 0)
        with FragmentReader(read_index(directory)) as reader:
            for fragment in engine.fragments():
                view = fragment.values["weight"]
                reader.copy_into(view, fragment.name, fragment.start, "weight")
    else:
        _, prefix = _model_of_export(weights)
        with open_tensors(weights / WEIGHTS) as handle:
            for fragment in engine.fragments():
                view = fragment.values["weight"]
                whole = handle.get_tensor(f"{prefix}{fragment.name}").reshape(-1)
                view.copy_(whole[fragment.start : fragment.start + view.numel()])
    engine.after_load(0)


def _kept(weights: Path) -> RunStep | None:
    """Return the checkpoint that RUN@STEP names, or the latest one of RUN; None for an export."""
    head, at, step = str(weights).rpartition("@")
    run = Path(head) if at else weights
    in_runs = run.parent / RUNS / run.name  # for NAME, also once it was made absolute
    if not RunDir(run).exists() and RunDir(in_runs).exists():
        run = in_runs
    if is_export(weights) or not RunDir(run).exists():
        return None
    return run_step(f"{run}@{step if at else 'last'}")


def _of_checkpoint(path: Path, step: int | None) -> _Origin:
    run_dir = RunDir.open(path)
    verify(step_directory(run_dir.checkpoints, step or 0))
    began = last_event(run_dir.ledger.read(), TrainingBegan)
    model, tokenizer = run_dir.config.model, began.tokenizer if began else ""
    return _Origin(model, _shapes(model), tokenizer, run_dir.config_file)


def _of_export(export: Path) -> _Origin:
    model, prefix = _model_of_export(export)
    with open_tensors(export / WEIGHTS) as handle:
        names = [name for name in handle.keys() if name.startswith(prefix)]  # noqa: SIM118
        shapes = {
            name.removeprefix(prefix): list(handle.get_slice(name).get_shape()) for name in names
        }
    tokenizer = tokenizer_of(export).fingerprint if (export / TOKENIZER).is_dir() else ""
    return _Origin(model, shapes, tokenizer, export / CONFIG)


def _model_of_export(export: Path) -> tuple[ModelConfig, str]:
    """Return the model of an export of either format, and what its tensors' names begin with."""
    tree = read_json(export / CONFIG, LARGEST_CONFIG_BYTES) if is_export(export) else {}
    kind = tree.get("model_type") if isinstance(tree, dict) else None
    if kind is None:
        run = parse_config(RunConfig, checked_export(export)["run"], str(export / CONFIG))
        return run.model, ""
    if kind != HUGGING_FACE_TYPE:
        raise CheckpointError(
            f"{export} has the model_type {shown(kind)} of Hugging Face, expected an export of "
            "this project; 'pretrain adopt' trains hybrids of other families on"
        )
    settings = {
        field.name: tree[field.name]
        for field in dataclasses.fields(ModelConfig)
        if field.name in tree
    }
    return parse_config(ModelConfig, settings, str(export / CONFIG)), HUGGING_FACE_PREFIX


def _shapes(model: ModelConfig) -> dict[str, list[int]]:
    with torch.device("meta"):
        parameters = TransformerXL(model).named_parameters()
        return {name: list(value.shape) for name, value in parameters}


def _refuse_other_tokens(run: RunConfig, weights: Path, origin: _Origin) -> None:
    ours = tokenizer_of(run.data.directory()).fingerprint if origin.tokenizer else ""
    if origin.tokenizer != ours:
        own = f" with tokenizer.path={weights / TOKENIZER}" if is_export(weights) else ""
        raise DataError(
            f"initial_weights={weights} was trained with tokenizer {origin.tokenizer[:16]}, "
            f"{run.data.path} has {ours[:16]}; build the corpus{own or ' with its tokenizer'}"
        )


def _refuse_other_shapes(run: RunConfig, weights: Path, origin: _Origin) -> None:
    found, expected = origin.shapes, _shapes(run.model)
    names = found.keys() | expected.keys()
    odd = sorted(name for name in names if found.get(name) != expected.get(name))
    if odd:
        name = odd[0]
        raise CheckpointError(
            f"initial_weights={weights}: {name} has shape {found.get(name, 'none')}, the run's "
            f"model expects {expected.get(name, 'none')} ({len(odd)} differ); use the model "
            f"settings in {origin.settings}"
        )


def _refuse_other_function(run: RunConfig, weights: Path, origin: _Origin) -> None:
    """Raise CheckpointError if settings that no shape depends on, as the activation, differ."""
    trained = origin.model
    its, ours = trained.function_settings(), run.model.function_settings()
    odd = sorted(name for name in its.keys() | ours.keys() if its.get(name) != ours.get(name))
    if odd:
        differences = "; ".join(
            f"model.{name} is {getattr(trained, name)}, in this run {getattr(run.model, name)}"
            for name in odd
        )
        raise CheckpointError(
            f"initial_weights={weights} were trained as another function: {differences}; use the "
            f"model settings in {origin.settings}"
        )
