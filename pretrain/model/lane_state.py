"""What lanes carry from segment to segment: the memory, a tuple of tensors.

It is a plain tuple because DeepSpeed's hooks walk nothing else. Its layout is that of
`pretrain.config.lane_parts`, and only this module knows it: the others see parts by name, the parts
of a layer, or lanes. Lanes are the first dimension of every tensor.

    memory          layers.0.hidden [B, M, D], layers.1.hidden [B, M, D], ..., documents [B, M]
    with compressed layers.0.hidden, layers.0.compressed [B, K, D], layers.1.hidden, ...,
                    compressed_documents [B, K], documents
    memory tokens   before the first part of documents: memory_tokens [B, X, D]

The rows of all parts end at the lane's last token. `documents` has the document of each row, int32
and relative to the last row's: 0 is the same, -1 the one before. All lanes have as many rows.

A layer with attention remembers its inputs for the last M tokens of each lane (section 3.2 of the
paper). M grows from 0 to the memory length. With compression (Rae et al. 2019) the rows that leave
are compressed instead of dropped, `compression_rate` at a time, oldest first, each such group to
one row that never has a gradient. So M may exceed the memory length by up to rate - 1 rows that
wait for their group. Memory tokens: Bulatov et al. 2022 (arXiv 2207.06881).

Letters of shapes as in `pretrain.model`; X is the number of memory tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from foundation.settings import assert_never
from pretrain.config.lane_parts import LanePart, LaneParts, lane_parts
from pretrain.config.model import ModelConfig
from pretrain.model.layer import RelativeAttention, TransformerLayer
from pretrain.model.parameters import norm_of, normal, zeros

Memory = tuple[Tensor, ...]
LayerParts = tuple[Tensor, ...]  # what one layer carries


@dataclass(frozen=True)
class Carried:
    """A memory taken apart."""

    layers: tuple[LayerParts, ...]
    documents_BM: Tensor
    compressed_documents_BK: Tensor | None = None
    tokens_BXD: Tensor | None = None  # what memory tokens have written; zeros: nothing


class LaneState:
    """Makes, takes apart and changes the memories of a model."""

    def __init__(self, config: ModelConfig, memory_length: int | None = None) -> None:
        """`memory_length` replaces the configured one."""
        self.parts: LaneParts = lane_parts(config, memory_length)
        self._isolates = config.isolate_documents

    def empty(self, num_lanes: int, like: Tensor) -> Memory:
        """Return the memory at the start of a stream; `like` has device and type of activations."""
        return tuple(_empty(part, num_lanes, like) for part in self.parts)

    def empty_layer(self, layer: int, num_lanes: int, like: Tensor) -> LayerParts:
        """Return what one layer carries at the start of a stream, as in `empty`."""
        return tuple(_empty(part, num_lanes, like) for part in self.parts.layers[layer])

    def usable(self, memory: Memory | None, num_lanes: int, like: Tensor) -> Carried:
        """Return what the next segment reads: no more rows than the parts have when full."""
        if memory is None or self.parts.is_forgotten:
            memory = self.empty(num_lanes, like)
        assert len(memory) == len([*self.parts]), (len(memory), len([*self.parts]))
        assert lanes_of(memory) == num_lanes, (lanes_of(memory), num_lanes)
        return self.taken_apart(
            tuple(_cut(part, each) for part, each in zip(self.parts, memory, strict=True))
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
        """Return the memory that `taken_apart` takes apart."""
        layers = (each for parts in carried.layers for each in parts)
        shared = (carried.tokens_BXD, carried.compressed_documents_BK, carried.documents_BM)
        return (*layers, *(each for each in shared if each is not None))

    def named(self, memory: Memory) -> dict[str, Tensor]:
        """Return the tensors by the names of their parts."""
        return {part.name: each for part, each in zip(self.parts, memory, strict=True)}

    def of_named(self, tensors: Mapping[str, Tensor], num_lanes: int) -> Memory | None:
        """Return the memory of these tensors; None if it cannot be one of that many lanes."""
        if tensors.keys() != {part.name for part in self.parts}:
            return None
        memory = tuple(tensors[part.name] for part in self.parts)
        fit = (_fits(part, each, num_lanes) for part, each in zip(self.parts, memory, strict=True))
        return memory if all(fit) else None

    def vectors(self, memory: Memory) -> list[Tensor]:
        """Return the first part of each layer as vectors, [B, rows, X]; a state is one."""
        firsts = (
            (kept[0], parts[0])
            for kept, parts in zip(self.taken_apart(memory).layers, self.parts.layers, strict=True)
        )
        return [_vectors(part, each) for each, part in firsts]

    def moved(self, memory: Memory, device: torch.device, dtype: torch.dtype) -> Memory:
        """Return the memory on a device, activations in `dtype`."""
        parts = zip(self.parts, memory, strict=True)
        return tuple(each.to(device, _dtype(part, dtype)) for part, each in parts)

    def after_forgotten_segment(self, memory: Memory | None, starts_BL: Tensor) -> Memory | None:
        """Return the same memory after a segment that is not remembered.

        Documents count from the segment's end. If documents are isolated, the state of a lane in
        which one started is that of an empty memory.
        """
        if memory is None:
            return None
        started_B1 = starts_BL.sum(1, keepdim=True, dtype=torch.int32).to(memory[-1].device)
        parts = zip(self.parts, memory, strict=True)
        return tuple(self._after_documents(part, each, started_B1) for part, each in parts)

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
    """Return M, the most rows of a layer that are not compressed."""
    return memory[-1].shape[1] if memory else 0


def num_compressed_rows(config: ModelConfig, memory: Memory | None) -> int:
    """Return K, the number of compressed rows of a layer."""
    if memory is None:
        return 0
    documents_BK = LaneState(config).taken_apart(memory).compressed_documents_BK
    return 0 if documents_BK is None else documents_BK.shape[1]


def lanes_of(memory: Memory) -> int:
    """Return B, the number of lanes."""
    return memory[-1].shape[0]


def detached(memory: Memory) -> Memory:
    """Return the same memory, through which no gradient goes."""
    return tuple(part.detach() for part in memory)


def selected_lanes(memory: Memory, lanes: Tensor | slice) -> Memory:
    """Return the memory of these lanes, in this order; one may occur several times."""
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
            # A model in float64 has its states in float64.
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
    """Whether this can be the part of that many lanes, with any number of rows."""
    rows = tensor.shape[1] if tensor.dim() > 1 else 0
    is_float = _dtype(part, torch.float32).is_floating_point
    return (
        tuple(tensor.shape) == _shape(part, num_lanes, rows)
        and tensor.is_floating_point() == is_float
    )


def segment_documents(remembered_BM: Tensor, num_tokens: int, starts_BL: Tensor | None) -> Tensor:
    """Return the document of each token of the segment, [B, L]; 0 is the last row's in memory."""
    if starts_BL is None:
        return remembered_BM.new_zeros(len(remembered_BM), num_tokens)
    return starts_BL.cumsum(1, dtype=torch.int32)


def document_starts(tokens_BL: Tensor, end_id: int) -> Tensor:
    """Return which tokens follow the end of a document, [B, L]; the first has none before it."""
    starts_BL = torch.zeros_like(tokens_BL, dtype=torch.bool)
    starts_BL[:, 1:] = tokens_BL[:, :-1] == end_id
    return starts_BL


def last_rows(old_BMX: Tensor, new_BLX: Tensor, length: int) -> Tensor:
    """Return the last `length` of the old rows and the new ones."""
    surplus = old_BMX.shape[1] + new_BLX.shape[1] - length
    # A new tensor of exactly the rows kept: a view would keep the whole segment's activations
    # alive.
    first_new = max(0, surplus - old_BMX.shape[1])
    return torch.cat([old_BMX[:, max(0, surplus) :], new_BLX[:, first_new:]], dim=1)


def num_leaving_rows(num_recent: int, num_tokens: int, memory_length: int, rate: int) -> int:
    """Return how many rows leave the memory after a segment: whole groups beyond `memory_length`.

    Groups are counted from the start of the stream, so what a group holds does not depend on where
    segments end.
    """
    return max(0, num_recent + num_tokens - memory_length) // rate * rate


def leaving_rows(recent_BMX: Tensor, segment_BLX: Tensor, count: int) -> Tensor:
    """Return the first `count` rows of memory and segment, without gradient."""
    from_segment = max(0, count - recent_BMX.shape[1])
    return torch.cat([recent_BMX[:, :count], segment_BLX[:, :from_segment]], dim=1).detach()


def grouped_documents(documents_BX: Tensor, rate: int) -> tuple[Tensor, Tensor]:
    """Return the document of each compressed row, [B, K], and which rows of its group are of it.

    The document of a compressed row is that of the last row in its group. The second result is
    [B, K, rate].
    """
    documents_BKX = documents_BX.unflatten(1, (documents_BX.shape[1] // rate, rate))
    return documents_BKX[:, :, -1], documents_BKX == documents_BKX[:, :, -1:]


class Compression(nn.Module):
    """The compression of one layer: a convolution over each group of rows.

    It has the compression rate as width and stride, and learns from attention reconstruction alone
    (section 3.2 of Rae et al. 2019): what this layer's attention reads by content from the
    compressed rows should equal what it would have read from the rows themselves. The gradient of
    that error reaches nothing else, and the model's loss does not reach the convolution.
    """

    def __init__(self, config: ModelConfig, attention: RelativeAttention) -> None:
        super().__init__()
        self._rate = config.compression_rate
        self._head_width = config.head_width
        self._heads_per_key = config.num_heads // config.key_heads
        shape = (config.d_model, self._rate * config.d_model)
        self.weight = normal(*shape, std=config.matrix_init_std)
        self.bias = zeros(config.d_model)
        # Attention's own, registered here too: ZeRO-3 gathers a module's parameters when the module
        # is called.
        self.query_weight = attention.query_weight
        self.key_value_weight = attention.key_value_weight

    def forward(
        self,
        leaving_BXD: Tensor,
        segment_BLD: Tensor,
        documents_BX: Tensor | None,
        documents_BL: Tensor | None,
        *,
        layer: TransformerLayer,
    ) -> tuple[Tensor, Tensor]:
        """Return the compressed rows [B, K, D] and the reconstruction error (0 without gradients).

        With the documents of leaving rows and segment, documents are isolated: a group's rows of
        another document than its last row's are left out, and no query reads rows of another
        document. The norms are those of `layer`. This is called without rows to compress as well:
        under ZeRO-3 every rank must run every module.
        """
        groups_BKXD = leaving_BXD.unflatten(1, (leaving_BXD.shape[1] // self._rate, self._rate))
        own_BKX = seen_BLX = seen_BLK = None
        if documents_BX is not None and documents_BL is not None:
            documents_BK, own_BKX = grouped_documents(documents_BX, self._rate)
            seen_BLX, seen_BLK = (
                documents_BL[:, :, None] == rows[:, None] for rows in (documents_BX, documents_BK)
            )
        if own_BKX is not None:
            groups_BKXD = groups_BKXD.where(own_BKX[..., None], 0.0)
        compressed_BKD = linear(groups_BKXD.flatten(2), self.weight, self.bias)
        if not torch.is_grad_enabled():
            return compressed_BKD, compressed_BKD.new_zeros(())
        norm, key_norm = layer.input_norm, layer.attention.key_norm
        with torch.no_grad():
            leaving_BXD, segment_BLD = (_normed(rows, norm) for rows in (leaving_BXD, segment_BLD))
            query_BLNH = linear(segment_BLD, self.query_weight).unflatten(
                -1, (-1, self._head_width)
            )
            query_BNLH = _normed(query_BLNH, layer.attention.query_norm).transpose(1, 2)
            expected_BNLH = self._read(query_BNLH, leaving_BXD, key_norm, seen_BLX)
        found_BNLH = self._read(query_BNLH, _normed(compressed_BKD, norm), key_norm, seen_BLK)
        squares_BNLH = (found_BNLH - expected_BNLH).square()
        if seen_BLK is None:
            return compressed_BKD, squares_BNLH.mean()
        # Queries that see no compressed row count as 0. The mean over the others would weigh a lane
        # by those that share its forward pass.
        sees_B1L1 = seen_BLK.any(2)[:, None, :, None]
        return compressed_BKD, squares_BNLH.where(sees_B1L1, 0.0).mean()

    def _read(
        self,
        query_BNLH: Tensor,
        rows_BXD: Tensor,
        key_norm: nn.Module | None,
        seen_BLX: Tensor | None,
    ) -> Tensor:
        """Return what the queries read from the rows by content; attention's weights stay fixed.

        Meaningless for a query that sees no row.
        """
        key_value = linear(rows_BXD, self.key_value_weight.detach())
        key_BXGH, value_BXGH = key_value.unflatten(-1, (2, -1, self._head_width)).unbind(2)
        key_BNXH, value_BNXH = (
            each.repeat_interleave(self._heads_per_key, dim=2).transpose(1, 2)
            for each in (_normed(key_BXGH, key_norm), value_BXGH)
        )
        scores_BNLX = query_BNLH @ key_BNXH.transpose(2, 3) * self._head_width**-0.5
        if seen_BLX is not None:
            # Not -inf: where a query sees no row, the softmax's gradient would be NaN.
            lowest = torch.finfo(scores_BNLX.dtype).min
            scores_BNLX = scores_BNLX.masked_fill(~seen_BLX[:, None], lowest)
        return scores_BNLX.softmax(-1) @ value_BNXH


def _normed(rows: Tensor, norm: nn.Module | None) -> Tensor:
    return rows if norm is None else norm(rows, frozen=True)


class MemoryTokens(nn.Module):
    """The vectors that a segment reads from the one before, and writes for the next.

    Layers get [read tokens | segment | write tokens] as one causal sequence. Both groups start as
    what the segment before has written, or as learned vectors if there is nothing: zeros. What the
    last layer returns for the write tokens is carried on. Layers that normalize their inputs leave
    their sum to grow from segment to segment, so it is normalized here.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.initial = normal(config.memory_tokens, config.d_model, std=config.init_std)
        self.norm = norm_of(config) if config.norm_position == "pre" else None
        self._scale = config.embedding_scale
        self._count = config.memory_tokens  # ZeRO-3 has sharded the parameter when it is asked

    def forward(
        self, hidden_BLD: Tensor, written_BXD: Tensor, is_new_document_B: Tensor | None
    ) -> Tensor:
        """Return the segment between its read and its write tokens, [B, X + L + X, D].

        Where documents are isolated, the write tokens know nothing of what was written before a new
        document started; that the tokens of this document see no read tokens is up to the masks.
        """
        initial_XD = self.initial * self._scale
        has_written_B11 = written_BXD.flatten(1).any(1)[:, None, None]
        read_BXD = write_BXD = torch.where(has_written_B11, written_BXD, initial_XD)
        if is_new_document_B is not None:
            write_BXD = torch.where(is_new_document_B[:, None, None], initial_XD, read_BXD)
        return torch.cat([read_BXD, hidden_BLD, write_BXD], dim=1)

    def split(self, hidden_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the segment's tokens of the last layer's output, and what is written."""
        written_BXD = hidden_BLD[:, -self._count :]
        written_BXD = written_BXD.clone() if self.norm is None else self.norm(written_BXD)
        return hidden_BLD[:, self._count : -self._count], written_BXD


def documents_with_tokens(documents_BL: Tensor, count: int) -> Tensor:
    """Return the documents of read tokens, segment and write tokens.

    Read tokens belong to the document of the token before the segment, write tokens to the last.
    """
    if not count:
        return documents_BL
    before_BX = documents_BL.new_zeros(len(documents_BL), count)
    return torch.cat([before_BX, documents_BL, documents_BL[:, -1:].expand(-1, count)], dim=1)
