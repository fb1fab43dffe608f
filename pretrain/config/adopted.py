"""The facts of an adopted model: a causal language model of Hugging Face transformers. Torch-free.

`pretrain adopt` measures them once, on the model itself, and writes them to the experiment as
`model.adopted`. No family is known by name: what lanes carry is what the model's own cache holds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from foundation.errors import ConfigError
from foundation.typed_values import InvalidValue, from_tree
from pretrain.config.mixer import LanePart, Role

HEAD_FLOPS = 2  # per element of the output matrix and token


@dataclass(frozen=True, kw_only=True)
class CachedPart:
    """A tensor that each layer in `layers` keeps in the model's cache."""

    layers: tuple[int, ...]
    name: str  # keys, values, or a state and its number, as in `recurrent_states.0`
    kind: Literal["rows", "state"]
    shape: tuple[int, ...]  # of a lane's state, or of one of its rows
    in_float32: bool
    window: int = 0  # the most rows that a layer reads; 0: no limit

    def lane_part(self, layer: int, memory_length: int) -> LanePart:
        """Return the part of one layer; `memory_length` is the most rows it may have."""
        length = min(memory_length, self.window or memory_length) if self.kind == "rows" else 0
        name = f"layers.{layer}.{self.name}"
        return LanePart(
            name=name, kind=self.kind, shape=self.shape, length=length, in_float32=self.in_float32
        )


@dataclass(frozen=True, kw_only=True)
class AdoptedWeight:
    """Parameters of one shape."""

    part: Literal["layers", "embedding", "head"]
    role: Role
    rows: int
    columns: int
    copies: int


@dataclass(frozen=True, kw_only=True)
class AdoptedFacts:
    """What the system knows of an adopted model."""

    family: str  # the class in transformers
    transformers: str  # the version that measured the facts
    config: dict[str, Any]  # config.json, as transformers reads it
    parts: tuple[CachedPart, ...]
    weights: tuple[AdoptedWeight, ...]
    flops_per_token: float  # in a forward pass, without attention and the output matrix
    flops_per_pair: float  # in a forward pass's attention, for each token and key
    kept_per_token: float  # bytes kept for the backward pass, in float32, without logits

    @property
    def has_rows(self) -> bool:
        return any(part.kind == "rows" for part in self.parts)

    def layer_parts(self, num_layers: int, memory_length: int) -> Iterator[tuple[LanePart, ...]]:
        """Yield what each layer carries."""
        for layer in range(num_layers):
            parts = (part for part in self.parts if layer in part.layers)
            yield tuple(part.lane_part(layer, memory_length) for part in parts)

    @property
    def description(self) -> str:
        """What is carried and what is not, as a sentence."""
        states = sum(len(part.layers) for part in self.parts if part.kind == "state")
        rows = {layer for part in self.parts if part.kind == "rows" for layer in part.layers}
        attention = f", and keys and values of attention in {len(rows)}" if rows else ""
        return f"lanes carry {states} states{attention}, over borders of documents, too"


def adopted_facts(tree: dict[str, Any]) -> AdoptedFacts:
    """Return `model.adopted` as its type; ConfigError if it was not written by `pretrain adopt`."""
    try:
        return from_tree(AdoptedFacts, tree)
    except InvalidValue as error:
        raise ConfigError(f"model.adopted: {error}; write it with `pretrain adopt`") from None
