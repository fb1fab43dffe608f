"""What `pretrain evaluate --probe` measures, and the files that it writes. Imports torch."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.errors import ConfigError
from data_pipeline.files import write_json, write_text
from pretrain.evaluation.evaluate import TrainedScorer
from pretrain.evaluation.probes.probe_page import render
from pretrain.evaluation.probes.probe_run import ProbeResults, run_probes
from pretrain.evaluation.probes.probe_settings import ProbeSettings
from pretrain.scaling.probed import PROBES
from pretrain.weights.export import is_export
from pretrain.weights.trained_model import TrainedModel, load_tokenizer

PAGE = "probes.html"


def probe_settings(
    arguments: argparse.Namespace, trained: TrainedModel, memory_length: int, segment_length: int
) -> ProbeSettings:
    """Return what the flags and the model's settings ask for."""
    return ProbeSettings(
        names=tuple(dict.fromkeys(arguments.probe)),
        memory_length=memory_length,
        segment_length=segment_length,
        lanes=arguments.lanes or trained.config.evaluation.lanes,
        max_tokens=arguments.max_tokens,
        trials=arguments.trials,
        longest_distance=arguments.longest_distance,
        seed=arguments.seed,
    )


def probe_directory(arguments: argparse.Namespace, path: Path) -> Path:
    """Return where page and numbers go; ConfigError for an export, to which nothing is added."""
    if arguments.output:
        return arguments.output / path.name if len(arguments.runs) > 1 else arguments.output
    if is_export(path):
        raise ConfigError(f"{path} is an export, to which nothing is added; give --output DIR")
    return path


def probe_with_status(
    scorer: TrainedScorer, path: Path, corpus: Corpus | None, settings: ProbeSettings
) -> ProbeResults:
    """Take the probes; a terminal shows which one is running."""
    tokenizer = load_tokenizer(scorer.trained, corpus.directory.parent if corpus else None)
    console = Console(stderr=True)
    if not console.is_terminal:
        return run_probes(scorer, tokenizer, corpus, settings)
    with console.status(f"{path}: probes") as status:
        return run_probes(
            scorer, tokenizer, corpus, settings, lambda words: status.update(f"{path}: {words}")
        )


def write_probes(directory: Path, path: Path, step: int, results: ProbeResults) -> dict[str, Any]:
    """Write page and numbers, each whole or not at all; return the numbers."""
    values = {"step": step, **results.values()}
    with warnings.catch_warnings():
        # `use_threads` makes denormal floats 0, which numpy notices when matplotlib is imported.
        warnings.filterwarnings("ignore", "The value of the smallest subnormal")
        html = render(path.name, step, results)
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / PAGE, html)
    write_json(directory / PROBES, values)
    return values
