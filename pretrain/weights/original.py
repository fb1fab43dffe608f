"""Weights of the original PyTorch code, or in Hugging Face's layout, as parameters of this model.

The mapping only splits and renames tensors, so it applies to gradients as well. A state dict is
read without executing anything in it. All of its tensors must be used, and no other ones needed.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from foundation.files import open_regular
from pretrain.config.model import ModelConfig
from pretrain.errors import CheckpointError
from pretrain.model.embedding_and_softmax import bin_ranges
from pretrain.model.parameters import load_parameters
from pretrain.model.transformer_xl import TransformerXL

HUGGING_FACE_PREFIX = "transformer."  # begins all names except the softmax's
FAMILY = "word_emb."  # the original has names that begin with it; other families have none
WRAPPERS = ("module.", "_orig_mod.")  # prefixes by DistributedDataParallel and torch.compile
CHECKED_TOKENS = 16  # of each of two segments
# The original's names within a layer -> ours.
LAYER_NAMES = {
    "dec_attn.r_net.weight": "attention.position_weight",
    "dec_attn.o_net.weight": "attention.output_weight",
    "dec_attn.layer_norm.weight": "attention_norm.gain",
    "dec_attn.layer_norm.bias": "attention_norm.bias",
    "pos_ff.CoreNet.0.weight": "feed_forward.inner_weight",
    "pos_ff.CoreNet.0.bias": "feed_forward.inner_bias",
    "pos_ff.CoreNet.3.weight": "feed_forward.output_weight",
    "pos_ff.CoreNet.3.bias": "feed_forward.output_bias",
    "pos_ff.layer_norm.weight": "feed_forward_norm.gain",
    "pos_ff.layer_norm.bias": "feed_forward_norm.bias",
}


def original_to_ours(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors of the original's state dict under this project's names; tied ones once.

    Names that are tied in the original may be missing. Any other missing or unknown name raises
    CheckpointError.
    """
    remaining = _Remaining(state)
    ours = dict(_embedding(remaining, config))
    ours.update(_biases(remaining, config))
    for layer in range(config.num_layers):
        ours.update(_layer(remaining, config, layer))
    ours.update(_head(remaining, config))
    remaining.refuse_leftovers()
    return ours


class _Remaining:
    """A state dict that records which of its names have been used."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state
        self._unused = set(state) - {"pos_emb.inv_freq"}

    def take(self, name: str) -> Tensor:
        if name not in self._state:
            raise CheckpointError(
                f"the state dict has no {name!r}, which these settings require; "
                "use the configuration it was trained with"
            )
        self._unused.discard(name)
        return self._state[name]

    def skip(self, name: str) -> None:
        self._unused.discard(name)

    def refuse_leftovers(self) -> None:
        if self._unused:
            raise CheckpointError(
                f"the state dict contains {', '.join(sorted(self._unused))}, which these settings "
                "do not use; use the configuration it was trained with"
            )


Named = Iterator[tuple[str, Tensor]]


def _embedding(remaining: _Remaining, config: ModelConfig) -> Named:
    for index, tokens in enumerate(bin_ranges(config)):
        ours, theirs = f"embedding.bins.{index}", "word_emb"
        if config.div_val > 1:
            yield f"{ours}.weight", remaining.take(f"{theirs}.emb_layers.{index}.weight")
            yield f"{ours}.projection", remaining.take(f"{theirs}.emb_projs.{index}")
        else:
            table = remaining.take(f"{theirs}.emb_layers.0.weight")
            yield f"{ours}.weight", table[tokens.start : tokens.stop]
    if config.div_val == 1 and config.embedding_width != config.d_model:
        yield "embedding.projection", remaining.take("word_emb.emb_projs.0")


def _biases(remaining: _Remaining, config: ModelConfig) -> Named:
    for theirs, name in (("r_w_bias", "content_bias"), ("r_r_bias", "position_bias")):
        bias = remaining.take(theirs)
        if config.untie_biases and len(bias) != config.num_layers:
            raise CheckpointError(
                f"{theirs} has {len(bias)} layers, model.num_layers is {config.num_layers}; "
                "use the configuration it was trained with"
            )
        if config.untie_biases:
            yield from (
                (f"layers.{layer}.attention.{name}", bias[layer])
                for layer in range(config.num_layers)
            )
        else:
            yield name, bias


def _layer(remaining: _Remaining, config: ModelConfig, layer: int) -> Named:
    width = config.num_heads * config.head_width
    query_key_value = remaining.take(f"layers.{layer}.dec_attn.qkv_net.weight")
    yield f"layers.{layer}.attention.query_weight", query_key_value[:width]
    yield f"layers.{layer}.attention.key_value_weight", query_key_value[width:]
    for theirs, name in LAYER_NAMES.items():
        yield f"layers.{layer}.{name}", remaining.take(f"layers.{layer}.{theirs}")


def _head(remaining: _Remaining, config: ModelConfig) -> Named:
    projected = config.div_val > 1 or config.embedding_width != config.d_model
    for index, tokens in enumerate(bin_ranges(config)):
        # With div_val 1 the original has one table for all bins.
        rows = slice(None) if config.div_val > 1 else slice(tokens.start, tokens.stop)
        table = f"crit.out_layers.{index if config.div_val > 1 else 0}"
        if config.tie_embeddings:
            remaining.skip(f"{table}.weight")
        else:
            yield f"head.bins.{index}.weight", remaining.take(f"{table}.weight")[rows]
        yield f"head.bins.{index}.bias", remaining.take(f"{table}.bias")[rows]
        if config.ties_projection(index):
            remaining.skip(f"crit.out_projs.{index}")
        elif projected:
            yield f"head.bins.{index}.projection", remaining.take(f"crit.out_projs.{index}")
    if config.cutoffs:
        yield "head.bins.0.cluster_weight", remaining.take("crit.cluster_weight")
        yield "head.bins.0.cluster_bias", remaining.take("crit.cluster_bias")


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Return the named tensors in the file; CheckpointError if it contains anything else."""
    try:
        with open_regular(path) as file:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; give a file written by torch.save") from None
    except IsADirectoryError:
        raise CheckpointError(f"{path} is a directory; give a file written by torch.save") from None
    except Exception as error:  # a file of another kind may raise anything in the reader
        reason = str(error).partition(". ")[0].partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{path} is not a file of plain tensors ({reason}); the original's model.pt is a "
            "pickled model: load it with the original code and torch.save(model.state_dict(), ...)"
        ) from None
    if not isinstance(state, Mapping) or not all(map(_is_named_tensor, state.items())):
        raise CheckpointError(
            f"{path} contains {type(state).__name__}, expected a state dict: dense floating-point "
            "tensors by their names, each with all of its elements in the file"
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
        # With a stride of 0, one stored element would stand for a trillion.
        and tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()
    )


def import_state(state: Mapping[str, Tensor], config: ModelConfig) -> TransformerXL:
    """Return the model in evaluation mode; CheckpointError unless names and shapes match."""
    while all(name.startswith(WRAPPERS) for name in state) and state:
        state = {name.partition(".")[2]: tensor for name, tensor in state.items()}
    known = (FAMILY, f"{HUGGING_FACE_PREFIX}{FAMILY}")
    if not any(name.startswith(known) for name in state):
        raise CheckpointError(
            f"the state dict begins with {next(iter(state), 'nothing')!r}, expected weights of the "
            "original Transformer-XL or of its class in transformers; set initial_weights for an "
            "export of this project"
        )
    if any(name.startswith(HUGGING_FACE_PREFIX) for name in state):
        state = from_hugging_face(state, config)
    _refuse_untied(state, config)
    module = TransformerXL(config)
    load_parameters(module, original_to_ours(state, config))  # compares shapes before it copies
    return module.eval()


def from_hugging_face(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Convert to the original's names: reverse the cluster rows, move biases out of the layers."""
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
            raise CheckpointError(f"every layer has its own {bias}; set model.untie_biases=true")
    return original


def _refuse_untied(state: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Raise CheckpointError if an output table that the settings tie differs from the embedding."""
    for name, tensor in state.items():
        embedding = name.replace("crit.out_layers.", "word_emb.emb_layers.")
        twins = config.tie_embeddings and name != embedding and embedding in state
        if twins and not torch.equal(tensor, state[embedding]):
            raise CheckpointError(
                f"{name} differs from {embedding}; set model.tie_embeddings=false"
            )


@torch.no_grad()
def checked_loss(module: TransformerXL) -> float:
    """Return the mean loss of two segments of random tokens; CheckpointError if not finite."""
    generator = torch.Generator().manual_seed(0)
    tokens_BL = torch.randint(
        module.config.vocab_size, (2, 2 * CHECKED_TOKENS + 1), generator=generator
    )
    losses, memory = [], None
    for start in (0, CHECKED_TOKENS):
        part = slice(start, start + CHECKED_TOKENS)
        nll_BL, memory = module(tokens_BL[:, part], tokens_BL[:, 1:][:, part], memory)
        losses.append(nll_BL.mean())
    loss = torch.stack(losses).mean().item()
    if not math.isfinite(loss):
        raise CheckpointError(
            f"a forward pass gives a loss of {loss}; the weights contain inf or NaN"
        )
    return loss
