"""A trained model on one process, from a checkpoint or an export, to evaluate or sample from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from data_pipeline.corpora.corpus import tokenizer_of
from data_pipeline.corpora.manifest import TOKENIZER_DIRECTORY
from data_pipeline.tokenizer import Tokenizer
from foundation.errors import CheckpointError, ConfigError, DataError
from foundation.files import is_of_another_user, path_text, url_of
from pretrain.checkpoint import marker
from pretrain.checkpoint.elastic_reader import load_weights
from pretrain.config.choices import Precision
from pretrain.config.run import RunConfig, run_at
from pretrain.engines.engine import check_precision
from pretrain.model.parameters import dtype_of
from pretrain.model.transformer_xl import TransformerXL
from pretrain.rundir.events import TrainingBegan
from pretrain.rundir.ledger import last_of
from pretrain.rundir.run_dir import RunDir, run_path
from pretrain.weights.export import (
    empty_model,
    is_export,
    load_export,
    require_bytes,
    with_model_settings,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedModel:
    """Trained weights in evaluation mode, and what they belong to."""

    module: TransformerXL
    config: RunConfig
    step: int
    tokenizer_home: Path  # the directory that contains tokenizer/: the corpus, or the export itself
    tokenizer: str = ""  # fingerprint of the one it was trained with; "" if that is unknown
    untrusted: str = ""  # whose settings choose nothing: an export, another user's run

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
        """Where to read the corpus that the user named, by default the run's.

        ConfigError without one for an export, and for another user's run of a corpus at a URL:
        files of others do not choose what is contacted.
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
        """Where to read the tokenizer: beside the corpus that the user named, or its own.

        ConfigError as for `corpus_directory`; an export has its own.
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

    A run is given as its directory, or as its name in runs/.

    `say` gets the name of each corrupted checkpoint that is skipped. `ema` selects the weight EMA;
    an export has it if it was made from it. `model_settings` replace those of training and must not
    change any weight's shape; ConfigError if they are inconsistent. `precision` is that of weights
    and activations: by default the run's on a GPU, float32 on a CPU.
    """
    run, device = Path(run), device or inference_device()
    run = run if is_export(run) else run_path(run)
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
    run_dir = RunDir.open(run)
    found = marker.latest_valid(run_dir.checkpoints, say)
    if found is None:
        raise CheckpointError(f"{run} has no checkpoint yet; train until the first one is saved")
    config = with_model_settings(run_dir.config, model_settings)
    require_bytes(config, found.num_bytes, found.directory)
    module = empty_model(config, device)
    load_weights(module, found, ema)
    began = last_of(run_dir.ledger.read(), TrainingBegan)
    tokenizer, home, untrusted = began.tokenizer if began else "", config.data.path, ""
    if url_of(home) is not None and is_of_another_user(run_dir.config_file):
        untrusted = f"{run} is another user's run"
    else:
        home = config.data.directory()
    module = _placed(module, config, device, precision)
    return TrainedModel(module, config, found.step, home, tokenizer, untrusted)


def precision_on(device: torch.device, config: RunConfig) -> Precision:
    """Return what a trained model computes in by default: on a GPU as in training."""
    return config.engine.number_format if device.type == "cuda" else "fp32"


def _placed(
    module: TransformerXL, config: RunConfig, device: torch.device, precision: Precision | None
) -> TransformerXL:
    precision = precision or precision_on(device, config)
    check_precision(precision, device)
    return module.to(device, dtype_of(precision)).eval()


def load_tokenizer(trained: TrainedModel, data: Path | None = None) -> Tokenizer:
    """Return the tokenizer of the corpus in `data`; DataError if the model has another one.

    By default that of the run's corpus, or the one in the export.
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
    if tokenizer.vocab_size != trained.config.model.vocab_size:
        raise DataError(
            f"{data} has a tokenizer of {tokenizer.vocab_size} tokens, the model was trained with "
            f"{trained.config.model.vocab_size}; give the corpus of the run "
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
