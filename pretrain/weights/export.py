"""A model as a directory that needs neither a run nor DeepSpeed: writing it and reading it.

A run may start from its weights, with any engine and ZeRO stage.

DIR/model.safetensors   every parameter once, in float32, under the model's own names
DIR/tokenizer/          the tokenizer of the corpus
DIR/config.json         the run's settings, the step, size and SHA-256 of each of these files, and
                        a hash of all that
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_pipeline.config import CacheConfig
from data_pipeline.corpora.corpus import tokenizer_of
from data_pipeline.tokenizer import DESCRIPTION_NAME, MODEL_NAME, Tokenizer
from foundation.errors import CheckpointError, ConfigError, DataError
from foundation.files import (
    fsync_directory,
    fsync_file,
    named_errors,
    read_regular,
    sha256_of,
    write_json,
)
from foundation.records import Fields, InvalidField
from foundation.settings import parse_config, to_tree
from pretrain.checkpoint.pieces import opened
from pretrain.config.engine import Attention, attention_in
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.costs.flops import parameters_of
from pretrain.costs.memory import MASTER_BYTES
from pretrain.engines.engine import Engine
from pretrain.model.parameters import load_parameters
from pretrain.model.transformer_xl import TransformerXL
from pretrain.rundir.run_dir import EXPORTED_WEIGHTS

FORMAT = 2
WEIGHTS = EXPORTED_WEIGHTS
CONFIG = "config.json"
TOKENIZER = "tokenizer"
# All that an export may have besides config.json.
FILES = (WEIGHTS, f"{TOKENIZER}/{DESCRIPTION_NAME}", f"{TOKENIZER}/{MODEL_NAME}")
LARGEST_CONFIG_BYTES = 1 << 24
EXPORT_AGAIN = "export the run again"
_OS_ERROR = re.compile(r"\(os error (\d+)\)$")


def is_export(directory: Path) -> bool:
    """Whether the directory contains an exported model."""
    return (directory / WEIGHTS).is_file() and (directory / CONFIG).is_file()


def refuse_existing(output: Path) -> None:
    """Raise ConfigError if the output exists."""
    if output.exists():
        raise ConfigError(f"{output} already exists; choose a new --output")


@contextlib.contextmanager
def new_directory(output: Path) -> Iterator[Path]:
    """Yield a directory beside `output`, renamed to it if the block succeeds, else removed."""
    beside = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        with named_errors(output, beside):
            beside.mkdir(parents=True)
            yield beside
            os.rename(beside, output)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    fsync_directory(output.parent)


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors to a safetensors file and sync it; OSError if storage does not take it."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        # The library has the number of the system's error in its text only.
        if found := _OS_ERROR.search(str(error)):
            number = int(found[1])
            raise OSError(number, os.strerror(number), str(path)) from None
        raise CheckpointError(f"{path} cannot be written: {error}") from None
    # safetensors creates files that only their owner can read; give them the usual mode.
    shutil.copymode(path.parent, path)
    path.chmod(path.stat().st_mode & 0o666)
    fsync_file(path)


def write_export(
    output: Path, module: TransformerXL, config: RunConfig, step: int, tokenizer_home: Path
) -> None:
    """Write to a directory beside `output` and rename it, so that `output` is never incomplete."""
    with new_directory(output) as beside:
        parameters = module.named_parameters()
        write_weights(
            beside / WEIGHTS,
            {name: parameter.detach().contiguous() for name, parameter in parameters},
        )
        if (tokenizer_home / TOKENIZER).is_dir():  # imported weights may come without one
            Tokenizer.load(tokenizer_home / TOKENIZER).save(beside / TOKENIZER)
        files = {name: _entry_of(beside / name) for name in FILES if (beside / name).exists()}
        about = {"format": FORMAT, "step": step, "run": to_tree(config), "files": files}
        write_json(beside / CONFIG, {**about, "hash": _hash_of(about)})


def load_export(
    directory: Path,
    model_settings: Mapping[str, Any] | None = None,
    device: torch.device | None = None,
) -> tuple[TransformerXL, RunConfig, int]:
    """Return the model in evaluation mode, its settings with `model_settings`, and the step.

    The cache of corpora is this user's, whichever directory the settings name.

    Raises CheckpointError, with the file's name, if something is missing or corrupted.
    """
    tree = checked_export(directory)
    config = parse_config(RunConfig, tree["run"], str(directory / CONFIG))
    data = dataclasses.replace(config.data, cache=CacheConfig())
    config = with_model_settings(dataclasses.replace(config, data=data), model_settings)
    require_bytes(config, tree["files"][WEIGHTS]["bytes"], directory / WEIGHTS)
    module = empty_model(config, device)
    try:
        load_parameters(module, load_file(directory / WEIGHTS))
    except SafetensorError as error:
        raise CheckpointError(
            f"{directory / WEIGHTS} is corrupted ({error}); {EXPORT_AGAIN}"
        ) from None
    return module.eval(), config, tree["step"]


def empty_model(config: RunConfig, device: torch.device | None = None) -> TransformerXL:
    """Return a model to load weights into; on a GPU it will attend as the run did."""
    on_gpu = device is not None and device.type == "cuda"
    kernel = config.engine.attention_kernel if on_gpu else "auto"
    return TransformerXL(config.model, attention_kernel=kernel)


def require_bytes(config: RunConfig, num_bytes: int, where: Path) -> None:
    """Raise CheckpointError unless files of that size can hold the model: before it is drawn."""
    parameters = parameters_of(config.model).total
    if MASTER_BYTES * parameters > num_bytes:
        raise CheckpointError(
            f"{where} has {num_bytes:,} bytes, expected {MASTER_BYTES} for each of the "
            f"{parameters:,} parameters that its settings describe; use its own settings"
        )


def with_model_settings(config: RunConfig, settings: Mapping[str, Any] | None) -> RunConfig:
    """Replace some of the model's settings; ConfigError if they are inconsistent."""
    engine, model = config.engine, dataclasses.replace(config.model, **(settings or {}))
    if settings and attention_in(engine, config.model, on_gpu=False)[0] is Attention.SDPA:
        engine = dataclasses.replace(engine, attention_kernel="auto")  # sdpa may not express them
    return dataclasses.replace(config, model=model, engine=engine)


def checked_export(directory: Path) -> dict[str, Any]:
    """Return the contents of config.json after verifying it and the files that it lists.

    Raises CheckpointError as `load_export` does.
    """
    if not is_export(directory):
        raise CheckpointError(
            f"{directory} contains no {WEIGHTS} and {CONFIG}; give the output of 'pretrain export'"
        )
    path = directory / CONFIG
    tree = _read_config(path)
    for name in FILES:
        if (directory / name).exists() and name not in tree["files"]:
            raise CheckpointError(f"{directory / name} is not listed in {CONFIG}; {EXPORT_AGAIN}")
    for name, expected in tree["files"].items():
        if _entry_of(directory / name) != expected:
            raise CheckpointError(
                f"{directory / name} is corrupted: it differs from what {CONFIG} lists; "
                f"{EXPORT_AGAIN}"
            )
    return tree


def _read_config(path: Path) -> dict[str, Any]:
    """Return the contents of config.json, with the fields of the right types; else an error."""
    try:
        tree = json.loads(read_regular(path, LARGEST_CONFIG_BYTES))
        fields = Fields(tree)
        if fields.has("model_type"):
            raise CheckpointError(
                f"{path} is for Hugging Face transformers; export the run without --format to read "
                "it here"
            )
        if (found := fields.integer("format")) != FORMAT:
            raise CheckpointError(
                f"{path} has format {found}, this version reads format {FORMAT}; {EXPORT_AGAIN}"
            )
        fields.only(("format", "step", "run", "files", "hash")).integer("step")
        fields.object("run")
        fields.object("files").only(FILES)
        for entry in fields.objects("files").values():
            entry.integer("bytes")
            entry.sha256("sha256")
        if fields.sha256("hash") != _hash_of(tree):
            raise InvalidField("it was changed after it was written")
    except (ValueError, RecursionError, InvalidField) as error:
        raise CheckpointError(f"{path} is corrupted ({error}); {EXPORT_AGAIN}") from None
    return tree


def _hash_of(tree: Mapping[str, Any]) -> str:
    """Return the hash of everything in config.json but the hash itself."""
    content = {name: value for name, value in tree.items() if name != "hash"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _entry_of(path: Path) -> dict[str, Any]:
    """Return the size and SHA-256 of a file; CheckpointError unless it is a regular one."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing or not a regular file; {EXPORT_AGAIN}")
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


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
    if not (export / TOKENIZER).is_dir():
        return
    homes = (export, run.data.directory())
    its, ours = (tokenizer_of(home).fingerprint for home in homes)
    if its != ours:
        raise DataError(
            f"initial_weights={export} was trained with tokenizer {its[:16]}, {run.data.path} has "
            f"{ours[:16]}; build the corpus with tokenizer.path={export / TOKENIZER}"
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
            f"settings in {export / CONFIG}"
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
