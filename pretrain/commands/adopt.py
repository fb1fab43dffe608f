"""`pretrain adopt`: an experiment that trains a Hugging Face model with carried state."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundation.errors import ConfigError
from foundation.files import write_new
from foundation.paths import absolute
from foundation.settings import parse_config
from foundation.typed_values import to_tree
from foundation.yaml_files import merge, parse_overrides
from pretrain.config.resolve import resolve
from pretrain.config.run import DataConfig, RunConfig
from pretrain.scaling.new_experiment import (
    TrainingText,
    check_new_file,
    commented_lines,
    fitting_batch,
    next_step,
)

if TYPE_CHECKING:
    from pretrain.model.adopted import AdoptedModel

LANES, SEGMENT, STEPS = 16, 1024, 500  # lanes and tokens, fewer for a small corpus; steps
_OPTIM = {
    "steps": STEPS,
    "learning_rate": 3e-5,
    "betas": [0.9, 0.95],
    "weight_decay": 0.1,
    "clip_norm": 1.0,
    "schedule": {"warmup_steps": STEPS // 20},
}
_COMMENTS = {
    "initial_weights": "weights and tokenizer; the directory must stay there",
    "model.memory_length": "rows of keys and values that lanes carry, per attention layer",
    "model.adopted": "measured by 'pretrain adopt'",
    "optim.learning_rate": "tune it",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `pretrain adopt`."""
    add = parser.add_argument
    add("directory", type=Path, metavar="HF_DIRECTORY", help="config.json and safetensors")
    add("--output", type=Path, required=True, metavar="EXPERIMENT.yaml", help="must not exist")
    add("--corpus", type=Path, required=True, metavar="DIR", help="built with its tokenizer")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the file")


def run(arguments: argparse.Namespace) -> int:
    """Check that the model carries its state correctly, measure it, and write the experiment."""
    file: Path = arguments.output
    check_new_file(file)
    text = TrainingText.of_corpus(arguments.corpus)
    from pretrain.weights.huggingface.adoption import adopted_model, check_adopted  # imports torch

    module = adopted_model(arguments.directory)
    for check in check_adopted(module):
        if not check.passed:
            raise ConfigError(
                f"{arguments.directory} does not carry its state correctly ({check.name}): "
                f"{check.description}; 'pretrain check-mixer --model' shows all checks"
            )
    config = _experiment(arguments, file.stem, module, text)
    shown: dict[str, Any] = {"name": config.name, "initial_weights": str(config.initial_weights)}
    tree = to_tree(config)
    names = ("num_layers", "d_model", "vocab_size", "memory_length", "adopted")
    shown["model"] = {name: tree["model"][name] for name in names}
    shown["data"] = {name: tree["data"][name] for name in ("path", "lanes", "segment_length")}
    shown["optim"] = {name: tree["optim"][name] for name in _OPTIM}
    shown["checkpoint"] = {"interval": config.checkpoint.interval}
    merge(shown, parse_overrides(arguments.overrides))
    write_new(file, "\n".join([*commented_lines(shown, _COMMENTS), ""]))
    print(next_step(file, config))
    return 0


def _experiment(
    arguments: argparse.Namespace, name: str, module: AdoptedModel, text: TrainingText
) -> RunConfig:
    lanes, segment = fitting_batch(DataConfig(lanes=LANES, segment_length=SEGMENT), text)
    has_rows = module.config.facts is not None and module.config.facts.has_rows
    tree = {
        "name": name,
        "initial_weights": str(absolute(arguments.directory)),
        "model": to_tree(replace(module.config, memory_length=segment if has_rows else 0)),
        "data": {"path": str(text.path), "lanes": lanes, "segment_length": segment},
        "optim": _OPTIM,
        "checkpoint": {"interval": STEPS // 5},
    }
    merge(tree, parse_overrides(arguments.overrides))
    return resolve(parse_config(RunConfig, tree, "command line"))
