"""The memory that lanes carry from segment to segment: a tuple of tensors.

It is a plain tuple because DeepSpeed's hooks do not look into other objects. Its layout follows
from `pretrain.config.lane_parts`. Only this module knows the layout; others use parts by name, the
parts of a layer, or lanes. Lanes are the first dimension of every tensor.

    memory          layers.0.hidden [B, M, D], layers.1.hidden [B, M, D], ..., documents [B, M]
    with compressed layers.0.hidden, layers.0.compressed [B, K, D], layers.1.hidden, ...,
                    compressed_documents [B, K], documents
    memory tokens   before the first part of documents: memory_tokens [B, X, D]

Rows are in the order of the text, the latest last. `documents` has each row's document, int32,
relative to the last row's: 0 is the same document, -1 the previous one. All lanes have the same
number of rows. A layer with attention remembers its inputs for the last M tokens of each lane
(section 3.2 of the paper). M grows from 0 to the memory length; with compression, up to rate - 1
more rows wait until their group is complete. Letters of shapes as in `pretrain.model`; X is the
number of memory tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from foundation.errors import ConfigError
from foundation.settings import assert_never
from pretrain.config.lane_parts import LaneParts, lane_parts
from pretrain.config.mixer import LanePart
from pretrain.config.model import ModelConfig

Memory = tuple[Tensor, ...]
LayerParts = tuple[Tensor, ...]  # what one layer carries


@dataclass(frozen=True)
class Carried:
    """The parts of a memory."""

    layers: tuple[LayerParts, ...]
    documents_BM: Tensor
    compressed_documents_BK: Tensor | None = None
    tokens_BXD: Tensor | None = None  # outputs of the memory tokens; zeros at the start


class MemoryLayout:
    """Makes, takes apart and changes the memories of a model."""

    def __init__(self, config: ModelConfig, memory_length: int | None = None) -> None:
        """`memory_length` replaces the configured one."""
        self.parts: LaneParts = lane_parts(config, memory_length)
        self._isolates = config.isolate_documents

    def empty(self, num_lanes: int, like: Tensor) -> Memory:
        """Return the memory at the start of a stream, in the device and dtype of `like`."""
        return tuple(_empty(part, num_lanes, like) for part in self.parts)

    def empty_layer(self, layer: int, num_lanes: int, like: Tensor) -> LayerParts:
        """Return what one layer carries at the start of a stream, as in `empty`."""
        return tuple(_empty(part, num_lanes, like) for part in self.parts.layers[layer])

    def usable(self, memory: Memory | None, num_lanes: int, like: Tensor) -> Carried:
        """Return the parts that the next segment reads, each cut to its largest length."""
        if memory is None or self.parts.is_forgotten:
            memory = self.empty(num_lanes, like)
        assert len(memory) == len([*self.parts]), (len(memory), len([*self.parts]))
        assert lane_count(memory) == num_lanes, (lane_count(memory), num_lanes)
        return self.taken_apart(
            tuple(_cut(part, tensor) for part, tensor in zip(self.parts, memory, strict=True))
        )

    def taken_apart(self, memory: Memory) -> Carried:
        """Return the parts of each layer, and the documents."""
        rest, layers = list(memory), []
        for parts in self.parts.layers:
            layers.append(tuple(rest[: len(parts)]))
            del rest[: len(parts)]
        shared = dict(zip((part.name for part in self.parts.shared), rest, strict=True))
        return Carried(
            tuple(layers),
            shared["documents"],
            shared.get("compressed_documents"),
            shared.get("memory_tokens"),
        )

    def joined(self, carried: Carried) -> Memory:
        """Return the memory with these parts, as the inverse of `taken_apart`."""
        layers = (tensor for parts in carried.layers for tensor in parts)
        shared = (carried.tokens_BXD, carried.compressed_documents_BK, carried.documents_BM)
        return (*layers, *(tensor for tensor in shared if tensor is not None))

    def named(self, memory: Memory) -> dict[str, Tensor]:
        """Return the tensors by the names of their parts."""
        return {part.name: tensor for part, tensor in zip(self.parts, memory, strict=True)}

    def of_named(self, tensors: Mapping[str, Tensor], num_lanes: int) -> Memory:
        """Return the memory of these named tensors; ConfigError if one does not fit."""
        parts = {part.name: part for part in self.parts}
        for name in {**parts, **tensors}:
            part, tensor = parts.get(name), tensors.get(name)
            if part is None or tensor is None or not _fits(part, tensor, num_lanes):
                saved = "missing" if tensor is None else f"{tensor.dtype} {[*tensor.shape]}"
                own = f"{[*_shape(part, num_lanes, 0)]}" if part else "nothing of that name"
                raise ConfigError(f"{name} of the memory is {saved}, the model has {own}")
        return tuple(tensors[name] for name in parts)

    def vectors(self, memory: Memory) -> list[Tensor]:
        """Return the first part of each layer as vectors, [B, rows, X]; a state is one vector.

        Of a layer that carries nothing there are no rows.
        """
        layers = zip(self.taken_apart(memory).layers, self.parts.layers, strict=True)
        nothing = torch.empty(lane_count(memory), 0, 1)
        return [_vectors(parts[0], kept[0]) if parts else nothing for kept, parts in layers]

    def moved(self, memory: Memory, device: torch.device, dtype: torch.dtype) -> Memory:
        """Return the memory on a device, with activations in `dtype`."""
        parts = zip(self.parts, memory, strict=True)
        return tuple(tensor.to(device, _dtype(part, dtype)) for part, tensor in parts)

    def after_forgotten_segment(self, memory: Memory | None, starts_BL: Tensor) -> Memory | None:
        """Return the memory after a segment whose hidden states are not kept.

        Rows stay, and their documents count from the segment's end. If documents are isolated, a
        lane where a document started gets the state of an empty memory.
        """
        if memory is None:
            return None
        started_B1 = starts_BL.sum(1, keepdim=True, dtype=torch.int32).to(memory[-1].device)
        parts = zip(self.parts, memory, strict=True)
        return tuple(self._after_documents(part, tensor, started_B1) for part, tensor in parts)

    def _after_documents(self, part: LanePart, tensor: Tensor, started_B1: Tensor) -> Tensor:
        match part.kind:
            case "rows":
                return tensor
            case "documents":
                return tensor - started_B1
            case "state":
                if not self._isolates:
                    return tensor
                has_started = started_B1.view(-1, *[1] * len(part.shape)) > 0
                return tensor.masked_fill(has_started, 0.0)
            case _:
                assert_never(part.kind)


def num_rows(memory: Memory | None) -> int:
    """Return M, the most uncompressed rows that any layer has."""
    return memory[-1].shape[1] if memory else 0


def num_compressed_rows(config: ModelConfig, memory: Memory | None) -> int:
    """Return K, the number of compressed rows of a layer."""
    if memory is None:
        return 0
    documents_BK = MemoryLayout(config).taken_apart(memory).compressed_documents_BK
    return 0 if documents_BK is None else documents_BK.shape[1]


def lane_count(memory: Memory) -> int:
    """Return B, the number of lanes."""
    return memory[-1].shape[0]


def detached(memory: Memory) -> Memory:
    """Return the same memory, detached from the graph."""
    return tuple(part.detach() for part in memory)


def selected_lanes(memory: Memory, lanes: Tensor | slice) -> Memory:
    """Return the memory of these lanes, in this order; a lane may occur several times."""
    return tuple(part[lanes] for part in memory)


def _empty(part: LanePart, num_lanes: int, like: Tensor) -> Tensor:
    return like.new_zeros(_shape(part, num_lanes, 0), dtype=_dtype(part, like.dtype))


def _shape(part: LanePart, num_lanes: int, rows: int) -> tuple[int, ...]:
    match part.kind:
        case "rows" | "documents":
            return num_lanes, rows, *part.shape
        case "state":
            return num_lanes, *part.shape
        case _:
            assert_never(part.kind)


def _dtype(part: LanePart, activations: torch.dtype) -> torch.dtype:
    match part.kind:
        case "rows" | "state":
            # At least float32: a model in float64 keeps its states in float64.
            wider = torch.promote_types(activations, torch.float32)
            return wider if part.in_float32 else activations
        case "documents":
            return torch.int32
        case _:
            assert_never(part.kind)


def _cut(part: LanePart, tensor: Tensor) -> Tensor:
    """Return the last rows that fit; a state as it is."""
    match part.kind:
        case "rows" | "documents":
            surplus = tensor.shape[1] - part.length - part.waiting
            return tensor[:, surplus:] if surplus > 0 else tensor
        case "state":
            return tensor
        case _:
            assert_never(part.kind)


def _vectors(part: LanePart, tensor: Tensor) -> Tensor:
    match part.kind:
        case "rows" | "documents":
            return tensor.flatten(2)
        case "state":
            return tensor.flatten(1)[:, None]
        case _:
            assert_never(part.kind)


def _fits(part: LanePart, tensor: Tensor, num_lanes: int) -> bool:
    """Return whether shape and kind of dtype fit the part; the number of rows may be any."""
    rows = tensor.shape[1] if tensor.dim() > 1 else 0
    is_float = _dtype(part, torch.float32).is_floating_point
    return (
        tuple(tensor.shape) == _shape(part, num_lanes, rows)
        and tensor.is_floating_point() == is_float
    )


def segment_documents(remembered_BM: Tensor, num_tokens: int, starts_BL: Tensor | None) -> Tensor:
    """Return the document of each token, [B, L]; 0 is the document of the memory's last row."""
    if starts_BL is None:
        return remembered_BM.new_zeros(len(remembered_BM), num_tokens)
    return starts_BL.cumsum(1, dtype=torch.int32)


def document_starts(tokens_BL: Tensor, end_id: int) -> Tensor:
    """Return which tokens follow the end of a document, [B, L]; never the first one."""
    starts_BL = torch.zeros_like(tokens_BL, dtype=torch.bool)
    starts_BL[:, 1:] = tokens_BL[:, :-1] == end_id
    return starts_BL


def last_rows(old_BMX: Tensor, new_BLX: Tensor, length: int) -> Tensor:
    """Return the last `length` rows of the old and the new ones together."""
    surplus = old_BMX.shape[1] + new_BLX.shape[1] - length
    # Copy the rows: a view would keep the activations of the whole segment in memory.
    first_new = max(0, surplus - old_BMX.shape[1])
    return torch.cat([old_BMX[:, max(0, surplus) :], new_BLX[:, first_new:]], dim=1)


def num_leaving_rows(num_recent: int, num_tokens: int, memory_length: int, rate: int) -> int:
    """Return how many rows leave the memory after a segment: whole groups beyond `memory_length`.

    Groups count from the start of the stream, so their rows do not depend on the segment length.
    """
    return max(0, num_recent + num_tokens - memory_length) // rate * rate


def leaving_rows(recent_BMX: Tensor, segment_BLX: Tensor, count: int) -> Tensor:
    """Return the first `count` rows of memory and segment, without gradient."""
    from_segment = max(0, count - recent_BMX.shape[1])
    return torch.cat([recent_BMX[:, :count], segment_BLX[:, :from_segment]], dim=1).detach()


def grouped_documents(documents_BX: Tensor, rate: int) -> tuple[Tensor, Tensor]:
    """Return the document of each compressed row, [B, K]: the one of its group's last row.

    Also return which rows of the group belong to that document, [B, K, rate].
    """
    documents_BKX = documents_BX.unflatten(1, (documents_BX.shape[1] // rate, rate))
    return documents_BKX[:, :, -1], documents_BKX == documents_BKX[:, :, -1:]
