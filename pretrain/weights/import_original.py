"""`pretrain import-original`: weights of the original PyTorch code, or in Hugging Face's layout, as an export.

The export is what `pretrain evaluate` and `pretrain generate` read. Nothing of the state dict is executed, no tensor is
left over, and none is made up.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from data_pipeline.config_loader import load_config
from data_pipeline.errors import CheckpointError, ConfigError
from data_pipeline.tokenizer import Tokenizer
from pretrain.config.run import ModelConfig, RunConfig
from pretrain.model.parameters import load_parameters
from pretrain.model.transformer_xl import TransformerXL
from pretrain.weights.export import refuse_existing, write_export
from pretrain.weights.original import original_to_ours
from pretrain.weights.trained_model import TrainedModel

HUGGING_FACE_PREFIX = "transformer."  # of everything but the softmax
CHECKED_TOKENS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `pretrain import-original`."""
    parser.add_argument(
        "state_dict", type=Path, metavar="STATE_DICT", help="file written by torch.save(state_dict)"
    )
    parser.add_argument(
        "--config", type=Path, required=True, metavar="YAML", help="settings the weights belong to"
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="new directory, as of 'export'"
    )
    parser.add_argument(
        "settings", nargs="*", metavar="a.b=value", help="settings that replace those of the file"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the export after a forward pass through the imported model."""
    refuse_existing(arguments.output)
    config = with_vocabulary(load_config(RunConfig, arguments.config, arguments.settings))
    module = import_state(read_state(arguments.state_dict), config.model)
    loss = checked_loss(module)
    write_export(TrainedModel(module, config, 0, config.data.directory()), arguments.output)
    total = sum(parameter.numel() for parameter in module.parameters())
    print(
        f"{arguments.output}: {total:,} parameters; {loss:.3f} nats per token on random tokens "
        f"(guessing evenly: {math.log(config.model.vocab_size):.3f})"
    )
    return 0


def with_vocabulary(config: RunConfig) -> RunConfig:
    """The vocabulary's size from the corpus' tokenizer if there is one; ConfigError if they differ or none tells it."""
    tokenizer = config.data.directory() / "tokenizer"
    if not tokenizer.is_dir():
        if not config.model.vocab_size:
            raise ConfigError(
                f"{tokenizer} does not exist and model.vocab_size is 0; set it, or data.path to a corpus whose "
                "tokenizer numbers tokens as the weights do"
            )
        return config
    vocab_size = Tokenizer.load(tokenizer).vocab_size
    if config.model.vocab_size not in (0, vocab_size):
        raise ConfigError(
            f"{config.data.path} has a tokenizer of {vocab_size} tokens, model.vocab_size is "
            f"{config.model.vocab_size}; give the data whose tokens the weights were trained on"
        )
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocab_size=vocab_size)
    )


def read_state(path: Path) -> dict[str, Tensor]:
    """The named tensors in the file; CheckpointError if it holds, or would execute, anything else."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; give a file written by torch.save") from None
    except Exception as error:  # of whatever a file that is none may make of the reader
        reason = str(error).partition(". ")[0].partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{path} is no file of plain tensors ({reason}); the original saves whole models: load its model.pt with "
            "its own code and torch.save(model.state_dict(), ...)"
        ) from None
    if not isinstance(state, Mapping) or not all(map(_is_named_tensor, state.items())):
        raise CheckpointError(
            f"{path} holds {type(state).__name__}, expected a state dict: names with dense tensors of real numbers"
        )
    return dict(state)


def _is_named_tensor(item: tuple[object, object]) -> bool:
    name, tensor = item
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        return False
    return (
        tensor.is_floating_point()
        and tensor.layout == torch.strided
        and not tensor.is_meta
        and tensor.dim() > 0
    )


def import_state(state: Mapping[str, Tensor], config: ModelConfig) -> TransformerXL:
    """The model with these weights, in evaluation mode; CheckpointError unless names and shapes fit exactly."""
    if any(name.startswith(HUGGING_FACE_PREFIX) for name in state):
        state = from_hugging_face(state, config)
    _refuse_untied(state, config)
    module = TransformerXL(config)
    load_parameters(
        module, {name: tensor.float() for name, tensor in original_to_ours(state, config).items()}
    )
    return module.eval()


def from_hugging_face(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The original's names and order: cluster rows reversed, biases beside the layers instead of inside."""
    original = {name.removeprefix(HUGGING_FACE_PREFIX): tensor for name, tensor in state.items()}
    for name in ("crit.cluster_weight", "crit.cluster_bias"):
        if name in original:
            original[name] = original[name].flip(0)
    for bias in ("r_w_bias", "r_r_bias"):
        names = [f"layers.{layer}.dec_attn.{bias}" for layer in range(config.num_layers)]
        of_layers = [original.pop(name) for name in names if name in original]
        if config.untie_biases and len(of_layers) == config.num_layers:
            original[bias] = torch.stack(of_layers)
        elif any(
            bias not in original or not torch.equal(tensor, original[bias]) for tensor in of_layers
        ):
            raise CheckpointError(f"the layers have a {bias} each; set model.untie_biases=true")
    return original


def _refuse_untied(state: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Output tables that the settings tie must equal the embedding's, or the import would lose them."""
    for name, tensor in state.items():
        embedding = name.replace("crit.out_layers.", "word_emb.emb_layers.")
        twins = config.tie_embeddings and name != embedding and embedding in state
        if twins and not torch.equal(tensor, state[embedding]):
            raise CheckpointError(
                f"{name} differs from {embedding}; set model.tie_embeddings=false"
            )


@torch.no_grad()
def checked_loss(module: TransformerXL) -> float:
    """The mean loss of two segments of random tokens; CheckpointError unless it is finite."""
    generator = torch.Generator().manual_seed(0)
    tokens_BL = torch.randint(
        module.config.vocab_size, (2, 2 * CHECKED_TOKENS + 1), generator=generator
    )
    losses, memory = [], None
    for begin in (0, CHECKED_TOKENS):
        part = slice(begin, begin + CHECKED_TOKENS)
        nll_BL, memory = module(tokens_BL[:, part], tokens_BL[:, 1:][:, part], memory)
        losses.append(nll_BL.mean())
    loss = torch.stack(losses).mean().item()
    if not math.isfinite(loss):
        raise CheckpointError(
            f"a forward pass gives a loss of {loss}; the weights hold infinities or NaN"
        )
    return loss
