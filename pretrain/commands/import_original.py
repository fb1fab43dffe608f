"""`pretrain import-original`: convert weights of the original code or Hugging Face to an export."""

import argparse
import dataclasses
import math
from pathlib import Path
from tempfile import TemporaryDirectory

from data_pipeline.builder.given_tokenizer import given_tokenizer
from data_pipeline.config import TokenizerConfig
from data_pipeline.corpora.manifest import TOKENIZER_DIRECTORY
from data_pipeline.tokenizer import Tokenizer
from foundation.errors import ConfigError
from foundation.settings import load_config
from pretrain.config.run import RunConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `pretrain import-original`."""
    add = parser.add_argument
    add("state_dict", type=Path, metavar="STATE_DICT", help="as torch.save wrote it")
    add("--config", type=Path, required=True, metavar="YAML", help="experiment file of the weights")
    add("--vocabulary", type=Path, metavar="FILE", help="words in order of ids, or a tokenizer")
    add("--end-token", default="", metavar="TOKEN", help="ends documents (default: from files)")
    add("--output", type=Path, required=True, metavar="DIR", help="new directory for the export")
    add("settings", nargs="*", metavar="KEY=VALUE", help="config overrides")


def run(arguments: argparse.Namespace) -> int:
    """Write the export if a forward pass through the imported model succeeds."""
    # Late: torch takes seconds.
    from pretrain.weights.export import refuse_existing, write_export
    from pretrain.weights.original import checked_loss, import_state, read_state_dict

    refuse_existing(arguments.output)
    config = load_config(RunConfig, arguments.config, arguments.settings)
    with TemporaryDirectory(prefix="xl-pretrain-import-") as name:
        home = config.data.directory()
        if arguments.vocabulary:
            home = Path(name)
            settings = TokenizerConfig(kind="words", end_token=arguments.end_token)
            given_tokenizer(arguments.vocabulary, settings).load().save(home / TOKENIZER_DIRECTORY)
        config = with_known_vocabulary(config, home)
        module = import_state(read_state_dict(arguments.state_dict), config.model)
        loss = checked_loss(module)
        write_export(arguments.output, module, config, 0, home)
    total = sum(parameter.numel() for parameter in module.parameters())
    print(
        f"{arguments.output}: {total:,} parameters; {loss:.3f} nats per token on random tokens "
        f"(uniform guessing: {math.log(config.model.vocab_size):.3f})"
    )
    return 0


def with_known_vocabulary(config: RunConfig, home: Path) -> RunConfig:
    """Set the vocabulary's size from the tokenizer in `home`; ConfigError if settings disagree."""
    tokenizer = home / TOKENIZER_DIRECTORY
    if not tokenizer.is_dir():
        if not config.model.vocab_size:
            raise ConfigError(
                f"{tokenizer} does not exist and model.vocab_size is 0; set it, or set data.path "
                "to a corpus whose tokenizer gives tokens the same ids as the weights, or give "
                "--vocabulary"
            )
        return config
    vocab_size = Tokenizer.load(tokenizer).vocab_size
    if config.model.vocab_size not in (0, vocab_size):
        raise ConfigError(
            f"{tokenizer} has {vocab_size} tokens, model.vocab_size is "
            f"{config.model.vocab_size}; use the tokenizer that the weights were trained with"
        )
    model = dataclasses.replace(config.model, vocab_size=vocab_size)
    return dataclasses.replace(config, model=model)
