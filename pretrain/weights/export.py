"""A model as a directory that needs neither a run nor DeepSpeed: writing it and reading it.

`load_trained` reads a trained model on one process, from an export or a checkpoint.

DIR/model.safetensors   every parameter once, in float32, under the model's own names
DIR/tokenizer/          the tokenizer of the corpus
DIR/config.json         the run's settings, the step, size and SHA-256 of each of these files, and
                        a hash of all these values
"""

import contextlib
import dataclasses
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_pipeline.config import CacheConfig
from data_pipeline.corpora.corpus_identity import tokenizer_of
from data_pipeline.corpora.manifest import TOKENIZER_DIRECTORY
from data_pipeline.tokenizer import DESCRIPTION_NAME, MODEL_NAME, Tokenizer
from foundation.errors import ConfigError, DataError
from foundation.files import (
    Content,
    fsync_file,
    make_directory,
    move,
    named_errors,
    read_json,
    sha256_of,
    sync_tree,
    write_json,
)
from foundation.ownership import is_of_another_user
from foundation.paths import path_text, url_of
from foundation.settings import parse_config
from foundation.typed_values import Count, Sha256, from_tree, json_text, one_of, to_tree
from pretrain.checkpoint.directory import step_directory
from pretrain.checkpoint.load import load_weights
from pretrain.checkpoint.verify import latest_valid, verify_and_keep
from pretrain.config.engine import Attention, attention_in
from pretrain.config.model import Precision
from pretrain.config.phases import run_at
from pretrain.config.run import RunConfig
from pretrain.costs.device_memory import MASTER_BYTES
from pretrain.costs.flops import parameter_counts
from pretrain.engines.engine import check_precision
from pretrain.errors import CheckpointError
from pretrain.model.adopted import LanguageModel, build_adopted
from pretrain.model.parameters import dtype_of, load_parameters
from pretrain.model.transformer_xl import TransformerXL
from pretrain.rundir.events import TrainingBegan
from pretrain.rundir.history import last_event
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.run_paths import EXPORTED_WEIGHTS
from pretrain.rundir.run_step import run_step

FORMAT = 2
WEIGHTS = EXPORTED_WEIGHTS
CONFIG = "config.json"
# Of exports for Hugging Face: their model_type, and what the names of their tensors begin with.
HUGGING_FACE_TYPE, HUGGING_FACE_PREFIX = "xl-pretrain", "transformer."
TOKENIZER = "tokenizer"
# All files that an export may have besides config.json.
FILES = (WEIGHTS, f"{TOKENIZER}/{DESCRIPTION_NAME}", f"{TOKENIZER}/{MODEL_NAME}")
LARGEST_CONFIG_BYTES = 1 << 24
EXPORT_AGAIN = "export the run again"
_OS_ERROR = re.compile(r"\(os error (\d+)\)$")
logger = logging.getLogger(__name__)


def is_export(directory: Path) -> bool:
    """Return whether the directory contains an exported model."""
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
            make_directory(beside)
            yield beside
            sync_tree(beside)
            move(beside, output)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors to a safetensors file and sync it; OSError if storage does not take it."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        # The library's error has the number of the system's error only in its text.
        if match := _OS_ERROR.search(str(error)):
            number = int(match[1])
            raise OSError(number, os.strerror(number), str(path)) from None
        raise CheckpointError(f"{path} cannot be written: {error}") from None
    # safetensors creates files that only their owner can read; give them the usual mode.
    shutil.copymode(path.parent, path)
    path.chmod(path.stat().st_mode & 0o666)
    fsync_file(path)


def write_export(
    output: Path, module: LanguageModel, config: RunConfig, step: int, tokenizer_home: Path
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
        files = {name: _file_entry(beside / name) for name in FILES if (beside / name).exists()}
        about = {"format": FORMAT, "step": step, "run": to_tree(config), "files": files}
        write_json(beside / CONFIG, {**about, "hash": _tree_hash(about)})


def load_export(
    directory: Path,
    model_settings: Mapping[str, Any] | None = None,
    device: torch.device | None = None,
) -> tuple[LanguageModel, RunConfig, int]:
    """Return the model in evaluation mode, its settings with `model_settings`, and the step.

    Corpora are cached where this user's are, not where the export's settings say.

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


def empty_model(config: RunConfig, device: torch.device | None = None) -> LanguageModel:
    """Return a model to load weights into; on a GPU it has the run's attention kernel."""
    on_gpu = device is not None and device.type == "cuda"
    if config.model.adopted:
        return build_adopted(config.model)
    kernel = config.engine.attention_kernel if on_gpu else "auto"
    return TransformerXL(config.model, attention_kernel=kernel)


def require_bytes(config: RunConfig, num_bytes: int, where: Path) -> None:
    """Raise CheckpointError if `num_bytes` cannot hold the model's weights; call it first."""
    parameters = parameter_counts(config.model).total
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
    """Return config.json's contents; CheckpointError if it, or a file that it lists, is wrong."""
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
        if _file_entry(directory / name) != expected:
            raise CheckpointError(
                f"{directory / name} is corrupted: it differs from what {CONFIG} lists; "
                f"{EXPORT_AGAIN}"
            )
    return tree


@dataclass(frozen=True)
class _Config:
    """The contents of config.json."""

    format: int
    step: Count
    run: dict[str, Any]
    files: dict[Annotated[str, one_of(*FILES)], Content]
    hash: Sha256


def _read_config(path: Path) -> dict[str, Any]:
    """Return the contents of config.json; CheckpointError if its types or its hash are wrong."""
    try:
        tree = read_json(path, LARGEST_CONFIG_BYTES)
        if "model_type" in tree:
            raise CheckpointError(
                f"{path} is for Hugging Face transformers: it can be initial_weights; for "
                "commands of this project export the run without --format"
            )
        if (version := tree.get("format")) != FORMAT:
            raise CheckpointError(
                f"{path} has format {version}, this version reads format {FORMAT}; {EXPORT_AGAIN}"
            )
        if from_tree(_Config, tree).hash != _tree_hash(tree):
            raise ValueError("it was changed after it was written")
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is corrupted ({error}); {EXPORT_AGAIN}") from None
    return tree


def _tree_hash(tree: Mapping[str, Any]) -> str:
    """Return the hash of everything in config.json but the hash itself."""
    content = {name: value for name, value in tree.items() if name != "hash"}
    return hashlib.sha256(json_text(content, sort_keys=True).encode()).hexdigest()


def _file_entry(path: Path) -> dict[str, Any]:
    """Return the size and SHA-256 of a file; CheckpointError unless it is a regular one."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing or not a regular file; {EXPORT_AGAIN}")
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


@dataclass(frozen=True)
class TrainedModel:
    """Trained weights in evaluation mode, and what they belong to."""

    module: LanguageModel
    config: RunConfig
    step: int
    tokenizer_home: Path  # the directory that contains tokenizer/: the corpus, or the export itself
    tokenizer: str = ""  # fingerprint of the one it was trained with; "" if that is unknown
    untrusted: str = ""  # why its settings choose no corpus, such as "DIR is an export"

    def __post_init__(self) -> None:
        self.module.trained_keys = self.trained_keys

    @property
    def trained_keys(self) -> tuple[int, ...]:
        """The most keys that a segment saw in training, in each layer."""
        model = self.config.model
        return tuple(
            model.most_keys(length, self.segment_length) for length in model.memory_lengths()
        )

    @property
    def segment_length(self) -> int:
        """The segment length of the last update, in whichever phase it was."""
        return run_at(self.config, max(0, self.step - 1)).data.segment_length

    def corpus_directory(self, named: Path | None = None) -> Path:
        """Return where to read the corpus that the user named, by default the run's.

        An export, and another user's run of a corpus at a URL, need a named one, else ConfigError:
        files that others wrote must not choose which server is contacted.
        """
        data = self.config.data
        if named:
            data = replace(data, path=named, manifest_hashes=())
        elif self.untrusted:
            raise ConfigError(
                f"{self.untrusted}, whose settings do not choose what is read; "
                f"name a corpus with --data (it was trained on {path_text(data.path)})"
            )
        return data.directory()

    def tokenizer_directory(self, named: Path | None = None) -> Path:
        """Return the directory of tokenizer/: the corpus that the user named, or the model's own.

        ConfigError as for `corpus_directory`, but not for an export, which has a tokenizer.
        """
        is_elsewhere = named is not None or url_of(self.tokenizer_home) is not None
        return self.corpus_directory(named) if is_elsewhere else self.tokenizer_home


def load_trained(
    run: Path | str,
    device: torch.device | None = None,
    say: Callable[[str], None] = logger.warning,
    model_settings: Mapping[str, Any] | None = None,
    ema: bool = False,
    precision: Precision | None = None,
) -> TrainedModel:
    """Load an export, or the latest valid checkpoint of a run; by default onto a GPU, if any.

    A run is given as its directory, or as its name in runs/, with `@STEP` for another checkpoint.

    `say` gets the name of each corrupted checkpoint that is skipped. `ema` selects a run's weight
    EMA; an export has it only if it was written with --ema. `model_settings` replace settings of
    training and must not change any weight's shape; ConfigError if they are inconsistent.
    `precision` is for weights and activations: by default the run's on a GPU, float32 on a CPU.
    """
    run, device = Path(run), device or inference_device()
    if is_export(run):
        if ema:
            raise ConfigError(
                f"{run} is an export and has one set of weights; use --ema when exporting the run"
            )
        module, config, step = load_export(run, model_settings, device)
        own = tokenizer_of(run).fingerprint if (run / TOKENIZER_DIRECTORY).is_dir() else ""
        whose = f"{run} is an export"
        module = _placed(module, config, device, precision)
        return TrainedModel(module, config, step, run, own, whose)
    run, step = run_step(run)
    root = (run_dir := RunDir.open(run)).checkpoints
    checkpoint = verify_and_keep(step_directory(root, step)) if step else latest_valid(root, say)
    if checkpoint is None:
        raise CheckpointError(f"{run} has no checkpoint yet; train until the first one is saved")
    config = with_model_settings(run_dir.config, model_settings)
    require_bytes(config, checkpoint.num_bytes, checkpoint.directory)
    module = empty_model(config, device)
    load_weights(module, checkpoint, ema)
    began = last_event(run_dir.ledger.read(), TrainingBegan)
    tokenizer, home, untrusted = began.tokenizer if began else "", config.data.path, ""
    files = run_dir.config_file, run_dir.ledger.path  # both say what the settings are
    if url_of(home) is not None and any(map(is_of_another_user, files)):
        untrusted = f"{run} is another user's run"
    else:
        home = config.data.directory()
    module = _placed(module, config, device, precision)
    return TrainedModel(module, config, checkpoint.step, home, tokenizer, untrusted)


def precision_on(device: torch.device, config: RunConfig) -> Precision:
    """Return the default precision of a trained model: on a GPU that of training, else fp32."""
    return config.engine.number_format if device.type == "cuda" else "fp32"


def _placed(
    module: LanguageModel, config: RunConfig, device: torch.device, precision: Precision | None
) -> LanguageModel:
    precision = precision or precision_on(device, config)
    check_precision(precision, device)
    return module.to(device, dtype_of(precision)).eval()


def load_tokenizer(trained: TrainedModel, data: Path | None = None) -> Tokenizer:
    """Return the tokenizer of the corpus in `data`; DataError if the model has another one.

    By default the tokenizer of the run's corpus, or the one in the export.
    """
    data = trained.tokenizer_directory(data)
    if (
        data == trained.tokenizer_home
        and is_export(data)
        and not (data / TOKENIZER_DIRECTORY).is_dir()
    ):
        raise DataError(
            f"{data} was imported without a tokenizer; give a corpus that has it with --data"
        )
    tokenizer = tokenizer_of(data)
    model = trained.config.model
    if tokenizer.vocab_size != model.vocab_size and not model.adopted:
        raise DataError(
            f"{data} has a tokenizer of {tokenizer.vocab_size} tokens, the model was trained with "
            f"{model.vocab_size}; give the corpus of the run "
            f"({path_text(trained.config.data.path)}) "
            "or one built with its tokenizer (tokenizer.path)"
        )
    if trained.tokenizer and tokenizer.fingerprint != trained.tokenizer:
        raise DataError(
            f"{data} has tokenizer {tokenizer.fingerprint[:16]}, the model was trained with "
            f"{trained.tokenizer[:16]}; give a corpus that was built with that one (tokenizer.path)"
        )
    return tokenizer


def inference_device() -> torch.device:
    """Return the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
