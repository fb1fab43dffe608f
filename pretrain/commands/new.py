"""`pretrain new`: a commented experiment for a corpus, which runs as it is."""

import argparse
from pathlib import Path

from data_pipeline.config import CacheConfig
from data_pipeline.corpora.manifest import read_manifest
from data_pipeline.corpora.remote_corpus import local_corpus_directory
from foundation.errors import ConfigError
from foundation.files import refuse_overwrite, write_new
from foundation.paths import absolute
from foundation.settings import require_name
from foundation.sizes import amount_of, size_of
from foundation.yaml_files import require_yaml_name
from pretrain.config.resolve import resolve
from pretrain.scaling.new_experiment import TrainingText, experiment_text, new_experiment
from pretrain.terminal.text import counted, si


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `pretrain new`."""
    add, parameters = parser.add_argument, amount_of("parameters")
    add("experiment", type=Path, metavar="EXPERIMENT.yaml", help="file to write; must not exist")
    add("--corpus", type=Path, required=True, metavar="DIR", help="a built corpus, or its URL")
    add("--parameters", type=parameters, default=1e7, metavar="N", help="e.g. 1.5B (default 10M)")
    add("--steps", type=size_of("steps"), metavar="N", help="default: by corpus and parameters")
    add("--paper", action="store_true", help="the paper's parts and rate instead of today's")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the file")


def run(arguments: argparse.Namespace) -> int:
    """Write the file; print what it trains and the command that starts it."""
    file: Path = arguments.experiment
    require_yaml_name(file)
    refuse_overwrite(file)
    require_name("the experiment's file name", file.stem)
    if not 0 < arguments.parameters < 1e12:
        raise ConfigError(
            f"--parameters={arguments.parameters:g} must be above 0 and below 1e12, such as 10M"
        )
    if arguments.steps is not None and arguments.steps < 1:
        raise ConfigError(f"--steps={arguments.steps} must be 1 or more, such as 1000")
    path = absolute(arguments.corpus)
    manifest = read_manifest(local_corpus_directory(path, CacheConfig()) / "train")
    text = TrainingText(
        path=path,
        tokens=manifest.tokens,
        longest_document=manifest.longest_whole,
        vocab_size=manifest.vocab_size,
    )
    steps, paper = arguments.steps or 0, arguments.paper
    overrides = arguments.overrides
    config = new_experiment(file.stem, text, arguments.parameters, paper, steps, overrides)
    config = resolve(config)
    write_new(file, experiment_text(config, file, text, overrides))
    tokens = config.optim.steps * config.tokens_per_step
    print(
        f"{file}: {counted(config.optim.steps, 'step')} of {config.tokens_per_step:,} tokens, "
        f"{si(tokens)}tokens in all; next: launcher local {file} --ranks 2"
    )
    return 0
