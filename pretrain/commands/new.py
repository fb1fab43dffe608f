"""`pretrain new`: a commented experiment for a corpus, which runs as it is."""

import argparse
from pathlib import Path

from foundation.errors import ConfigError
from foundation.files import write_new
from foundation.sizes import amount_of, size_of
from foundation.typed_values import json_text, to_tree
from foundation.yaml_files import parse_overrides
from pretrain.config.model import ModelConfig
from pretrain.config.resolve import resolve
from pretrain.scaling.new_experiment import (
    TrainingText,
    check_new_file,
    experiment_text,
    new_experiment,
    next_step,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `pretrain new`."""
    add, parameters = parser.add_argument, amount_of("parameters")
    add("experiment", type=Path, metavar="EXPERIMENT.yaml", help="file to write; must not exist")
    add("--corpus", type=Path, required=True, metavar="DIR", help="a built corpus, or its URL")
    add("--parameters", type=parameters, metavar="N", help="about 1.5B; default: yours, or 10M")
    add("--steps", type=size_of("steps"), metavar="N", help="default: by corpus and parameters")
    add("--paper", action="store_true", help="the paper's parts and rate instead of today's")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the file")


def run(arguments: argparse.Namespace) -> int:
    """Write the file; print what it trains and the command that starts it."""
    file: Path = arguments.experiment
    check_new_file(file)
    if arguments.parameters is not None and not 0 < arguments.parameters < 1e12:
        raise ConfigError(
            f"--parameters={arguments.parameters:g} must be above 0 and below 1e12, such as 10M"
        )
    if arguments.steps is not None and arguments.steps < 1:
        raise ConfigError(f"--steps={arguments.steps} must be 1 or more, such as 1000")
    text = TrainingText.of_corpus(arguments.corpus)
    steps, paper = arguments.steps, arguments.paper
    overrides, of_weights = arguments.overrides, list[str]()
    tree = parse_overrides(overrides)
    given_steps = tree["optim"].get("steps") if isinstance(tree.get("optim"), dict) else None
    if steps is None and isinstance(given_steps, int) and 0 < given_steps <= 1e12:
        steps = given_steps  # the warm-up and the intervals follow from it
        overrides = [setting for setting in overrides if not setting.startswith("optim.steps=")]
    if weights := str(tree.get("initial_weights") or ""):
        from pretrain.weights.initial_weights import model_of_weights  # late: it imports torch

        of_weights = model_overrides(model_of_weights(Path(weights)))
    asked, settings = arguments.parameters, [*of_weights, *overrides]
    config = resolve(new_experiment(file.stem, text, asked, paper, steps or 0, settings))
    if weights:
        from pretrain.weights.initial_weights import check_initial_weights

        check_initial_weights(config)
    usual = model_overrides(ModelConfig())
    shown = [*(setting for setting in of_weights if setting not in usual), *overrides]
    write_new(file, experiment_text(config, file, text, shown))
    print(next_step(file, config))
    return 0


def model_overrides(model: ModelConfig) -> list[str]:
    """Return all settings of a model but its vocabulary, which is the corpus'."""
    settings = to_tree(model).items()
    return [f"model.{name}={json_text(value)}" for name, value in settings if name != "vocab_size"]
