"""`pretrain adopt`: an experiment that trains a Hugging Face model with carried state."""

import argparse
from dataclasses import replace
from pathlib import Path

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
    commented_settings,
    fitting_batch,
    next_step,
)

LANES, SEGMENT, STEPS = 16, 1024, 500  # lanes and tokens, fewer for a small corpus; steps
_OPTIM = {
    "steps": STEPS,
    "learning_rate": 3e-5,
    "betas": [0.9, 0.95],
    "weight_decay": 0.1,
    "clip_norm": 1.0,
    "schedule": {"warmup_steps": STEPS // 20},
}
_SHOWN = (
    "name", "initial_weights", "model.num_layers", "model.d_model", "model.vocab_size",
    "model.memory_length", "model.adopted", "data.path", "data.lanes", "data.segment_length",
    *(f"optim.{name}" for name in _OPTIM), "checkpoint.interval",
)  # fmt: skip
_COMMENTS = {
    **dict.fromkeys(_SHOWN, ""),
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
    from pretrain.weights.initial_weights import check_initial_weights

    module = adopted_model(arguments.directory)
    for check in check_adopted(module):
        if not check.passed:
            raise ConfigError(
                f"{arguments.directory} does not carry its state correctly ({check.name}): "
                f"{check.description}; 'pretrain check-mixer --model' shows all checks"
            )
    lanes, segment = fitting_batch(DataConfig(lanes=LANES, segment_length=SEGMENT), text)
    rows = segment if module.config.longest_memory else 0
    tree = {
        "name": file.stem,
        "initial_weights": str(absolute(arguments.directory)),
        "model": to_tree(replace(module.config, memory_length=rows)),
        "data": {"path": str(text.path), "lanes": lanes, "segment_length": segment},
        "optim": _OPTIM,
        "checkpoint": {"interval": STEPS // 5},
    }
    merge(tree, parse_overrides(arguments.overrides))
    config = resolve(parse_config(RunConfig, tree, "command line"))
    check_initial_weights(config)
    write_new(file, commented_settings(config, _COMMENTS, arguments.overrides))
    print(next_step(file, config))
    return 0
