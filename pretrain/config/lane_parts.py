"""What each lane carries from segment to segment: every tensor of its memory, by the settings.

A kind of layer carries what its facts say. Checkpoints, elastic resumes, offloaded memories,
evaluation and costs go through this list and know no kind of layer. Torch-free.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pretrain.config.mixer import LanePart
from pretrain.config.model import ModelConfig


@dataclass(frozen=True)
class LaneParts:
    """The parts of a memory in the order of its tensors: layer by layer, then what layers share."""

    layers: tuple[tuple[LanePart, ...], ...]
    # In this order: memory tokens, if any; documents of compressed rows, if any; documents of rows.
    shared: tuple[LanePart, ...]
    is_forgotten: bool = False  # nothing is carried, not even states

    @property
    def memory_length(self) -> int:
        """The most uncompressed rows that any layer has."""
        return self.shared[-1].length

    def __iter__(self) -> Iterator[LanePart]:
        for parts in self.layers:
            yield from parts
        yield from self.shared

    def num_bytes(self, activation_bytes: int) -> int:
        """Return the bytes of one lane when the memory is full."""
        return sum(part.num_bytes(activation_bytes) for part in self)


def lane_parts(model: ModelConfig, memory_length: int | None = None) -> LaneParts:
    """Return what a lane carries, with `memory_length` instead of the configured one if given.

    If it is 0 and the configured length is not, nothing is carried, not even states.
    """
    lengths = model.memory_lengths(memory_length)
    length = max(lengths)
    shared: list[LanePart] = []
    if model.memory_tokens:
        shape = (model.memory_tokens, model.d_model)
        shared.append(LanePart(name="memory_tokens", kind="state", shape=shape))
    if model.compressed_length:
        compressed = model.compressed_length if length else 0
        shared.append(LanePart(name="compressed_documents", kind="documents", length=compressed))
    waiting = _waiting(model, length)
    shared.append(LanePart(name="documents", kind="documents", length=length, waiting=waiting))
    if facts := model.facts:
        layers = tuple(facts.layer_parts(model.num_layers, length))
    else:
        layers = tuple(_layer_parts(model, *numbered) for numbered in enumerate(lengths))
    return LaneParts(layers, tuple(shared), is_forgotten=length == 0 < model.longest_memory)


def _layer_parts(model: ModelConfig, index: int, length: int) -> tuple[LanePart, ...]:
    """Return the parts of a layer: what its mixer carries, or rows of its inputs."""
    name, mixer = f"layers.{index}", model.mixer(index)
    if not mixer.has_rows:
        return tuple(replace(part, name=f"{name}.{part.name}") for part in mixer.states(model))
    shape, waiting = (model.d_model,), _waiting(model, length)
    hidden = LanePart(
        name=f"{name}.hidden", kind="rows", shape=shape, length=length, waiting=waiting
    )
    if not model.compressed_length:
        return (hidden,)
    compressed = model.compressed_length if length else 0
    return hidden, LanePart(name=f"{name}.compressed", kind="rows", shape=shape, length=compressed)


def _waiting(model: ModelConfig, length: int) -> int:
    return model.compression_rate - 1 if model.compressed_length and length else 0
