"""Measures the facts of a transformers model on the model itself, and checks its state.

As `pretrain.mixers.check` does with a kind of layer, in float32: the logits of a text that the
adapter reads in segments are compared with what transformers makes of the whole text at once,
without a cache.
"""

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from foundation.errors import ConfigError
from foundation.typed_values import to_tree
from pretrain.config.adopted import HEAD_FLOPS, AdoptedFacts, AdoptedWeight, CachedPart
from pretrain.config.model import ModelConfig
from pretrain.mixers.check import (
    Check,
    Measure,
    apart,
    bytes_kept_by,
    checked,
    flop_counter,
    lane_bytes_off,
)
from pretrain.model.adopted import (
    ROWS,
    AdoptedModel,
    cache_argument,
    held_by,
    parameter_roles,
)
from pretrain.model.memory import Memory, MemoryLayout, selected_lanes
from pretrain.model.transformers_modules import (
    empty_inner,
    fill_parameters,
    library,
    new_cache,
    read_config,
    reason,
)
from pretrain.weights.adopted import PREFIX, open_weights

EXACT = 1e-4  # largest relative difference; of logits, relative to what the memory changes
LANES, LENGTH, HALF = 2, 96, 48  # lanes and tokens of the checks' text, and half of these
SHORT = 64  # tokens for which FLOPs and bytes are counted; then for twice that number
SEVERAL = (17, 1, 30, 1, 1, 46)  # lengths of segments, LENGTH in sum


def adopted_model(directory: Path) -> AdoptedModel:
    """Return the model of a directory with its weights in float32, and its facts measured.

    ConfigError with the reason if it cannot be adopted.
    """
    tree = read_config(directory)
    inner: Any = empty_inner(tree)
    with open_weights(directory, tree) as weight:
        fill_parameters(inner, lambda name, _: weight(name).float())
    try:
        return AdoptedModel(_measured(tree, inner.eval()), inner)
    except ConfigError:
        raise
    except (ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
        raise ConfigError(
            f"{type(inner).__name__} does not read with its cache: {reason(error)}"
        ) from None


def _measured(tree: Mapping[str, Any], inner: Any) -> ModelConfig:
    with library() as transformers:
        version = transformers.__version__
    parts, num_layers = _parts(inner)
    vocabulary, width = inner.get_output_embeddings().weight.shape
    (one, kept_one), (two, kept_two) = (_costs(inner, count) for count in (SHORT, 2 * SHORT))
    of_pair = max(0.0, (two - one) / SHORT)
    facts = AdoptedFacts(
        family=type(inner).__name__,
        transformers=version,
        config=dict(tree),
        parts=parts,
        weights=_weights(inner),
        flops_per_token=one - of_pair * SHORT - HEAD_FLOPS * vocabulary * width,
        flops_per_pair=of_pair,
        kept_per_token=(kept_two - kept_one) / SHORT,
    )
    return ModelConfig(
        vocab_size=vocabulary,
        num_layers=num_layers,
        d_model=width,
        memory_length=LENGTH if facts.has_rows else 0,
        adopted=to_tree(facts),
    )


def _tokens(lanes: int, count: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (lanes, count), generator=torch.Generator().manual_seed(count))


def _cache_after(inner: Any, num_tokens: int) -> Any:
    """Return the model's own cache after it has read random tokens."""
    cache = new_cache(inner)
    tokens = _tokens(1, num_tokens, inner.get_output_embeddings().weight.shape[0])
    with torch.no_grad():
        inner(input_ids=tokens, use_cache=True, **{cache_argument(inner): cache})
    return cache


def _parts(inner: Any) -> tuple[tuple[CachedPart, ...], int]:
    """Return the parts of the model's own cache, and its number of layers."""
    cache, half = _cache_after(inner, 8), _cache_after(copy.deepcopy(inner).bfloat16(), 8)
    layers_of: dict[CachedPart, list[int]] = defaultdict(list)
    for number, (layer, rounded) in enumerate(zip(cache.layers, half.layers, strict=True)):
        types = {name: tensor.dtype for name, tensor in held_by(rounded).items()}
        for name, tensor in held_by(layer).items():
            part = CachedPart(
                layers=(),
                name=name,
                kind="rows" if name in ROWS else "state",
                shape=tuple(tensor.shape[2 if name in ROWS else 1 :]),
                in_float32=types[name] is torch.float32,
                # One row of the window is the token's own.
                window=max(0, (getattr(layer, "sliding_window", 0) or 0) - 1) * (name in ROWS),
            )
            layers_of[part].append(number)
    if not layers_of:
        raise ConfigError(f"{type(inner).__name__} leaves nothing in a cache of transformers")
    parts = (replace(part, layers=tuple(layers)) for part, layers in layers_of.items())
    return tuple(parts), len(cache.layers)


def _weights(inner: Any) -> tuple[AdoptedWeight, ...]:
    weights: Counter[AdoptedWeight] = Counter()
    embedding, roles = inner.get_input_embeddings().weight, parameter_roles(inner)
    for name, parameter in inner.named_parameters():
        role, part = roles[PREFIX + name], "layers"
        if role == "table":
            part = "embedding" if parameter is embedding else "head"
        rows, *columns = parameter.shape or (1,)
        width = torch.Size(columns).numel()
        weights[AdoptedWeight(part=part, role=role, rows=rows, columns=width, copies=1)] += 1
    return tuple(replace(weight, copies=copies) for weight, copies in weights.items())


def _costs(inner: Any, num_tokens: int) -> tuple[float, int]:
    """Return FLOPs per token of a forward pass, and the bytes that it keeps for the backward."""
    tokens = _tokens(1, num_tokens, inner.get_output_embeddings().weight.shape[0])
    with flop_counter() as counter:
        kept = bytes_kept_by(inner, lambda: inner(input_ids=tokens, use_cache=False).logits)
    return counter.get_total_flops() / num_tokens, kept


class AdoptedSubject:
    """A model, the text that it reads [B, T], and the logits of transformers for the whole text."""

    def __init__(self, model: AdoptedModel) -> None:
        self.model = model
        self.tokens_BT = _tokens(LANES, LENGTH, model.config.vocab_size)
        with torch.no_grad():
            self.whole_BTV = model.inner(input_ids=self.tokens_BT, use_cache=False).logits

    @torch.no_grad()
    def read(
        self, cuts: Sequence[int], memory: Memory | None = None, **options: Any
    ) -> tuple[Tensor, Memory]:
        """Return logits of the text's end, read in segments of lengths `cuts`, and the memory."""
        parts = []
        for tokens_BL in self.tokens_BT[:, -sum(cuts) :].split(list(cuts), dim=1):
            logits_BLV, memory = self.model.read(tokens_BL, memory, **options)
            parts.append(logits_BLV)
        assert memory is not None
        return torch.cat(parts, dim=1), memory

    @cached_property
    def memory(self) -> Memory:
        """What the lanes carry after the first half of the text."""
        with torch.no_grad():
            return self.model.read(self.tokens_BT[:, :HALF])[1]

    def error(self, logits_BLV: Tensor) -> float:
        """Return the largest difference of the text's end, as a fraction of what memory changes."""
        alone_BLV, _ = self.read([HALF])
        if not (effect := apart([alone_BLV], [self.whole_BTV[:, -HALF:]])):
            raise ValueError("the logits do not depend on what was read before")
        return apart([logits_BLV], [self.whole_BTV[:, -logits_BLV.shape[1] :]]) / effect


def check_adopted(model: AdoptedModel) -> list[Check]:
    """Return all checks of an adopted model."""
    return checked(CHECKS, AdoptedSubject(model))


def _read_in(cuts: Sequence[int]) -> Callable[[AdoptedSubject], float]:
    return lambda subject: subject.error(subject.read(cuts)[0])


def _gradients(subject: AdoptedSubject) -> float:
    tokens_BL, gradients = subject.tokens_BT, []
    for segments in (1, 4):
        subject.model.zero_grad()
        subject.model(tokens_BL, tokens_BL, num_segments=segments)[0].mean().backward()
        gradients.append([p.grad for p in subject.model.parameters() if p.grad is not None])
    subject.model.zero_grad()
    return apart(gradients[1], gradients[0]) / max(float(g.abs().max()) for g in gradients[0])


def _positions(subject: AdoptedSubject) -> float:
    """Read a segment after rows whose positions begin at 1, 7 and 1000: only distances count."""
    logits = (subject.read([HALF], subject.memory, first_position=first) for first in (1, 7, 1000))
    return max(subject.error(logits_BLV) for logits_BLV, _ in logits)


def _saved(subject: AdoptedSubject) -> float:
    """Continue from saved and loaded parts, with the lanes in another order."""
    layout, order = MemoryLayout(subject.model.config), torch.tensor([1, 0])
    named = {name: part.contiguous() for name, part in layout.named(subject.memory).items()}
    loaded = layout.of_named(load(save(named)), LANES)
    with torch.no_grad():
        rest_BLV, _ = subject.model.read(
            subject.tokens_BT[order, HALF:], selected_lanes(loaded, order)
        )
    return subject.error(rest_BLV[order])


def _lane_bytes(subject: AdoptedSubject) -> float:
    return lane_bytes_off(subject.read([LENGTH])[1], subject.model.config)


CHECKS: dict[str, Measure] = {
    "segments": ("several segments, and the whole text by transformers", EXACT, _read_in(SEVERAL)),
    "stream": ("token by token, and the whole text", EXACT, _read_in([1] * LENGTH)),
    "gradients": ("gradients through four segments and of the whole", EXACT, _gradients),
    "positions": ("rows at higher positions: distances alone count", EXACT, _positions),
    "saved": ("read on from saved parts, in another order of lanes", EXACT, _saved),
    "lane bytes": ("bytes of a lane, facts and counted", 0.0, _lane_bytes),
}
