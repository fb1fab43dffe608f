"""Streams through a frozen model, whose memory is keys and values instead of hidden states.

In training, memory holds hidden states, and every segment projects all of them to keys and values
again, because the weights have changed (section 3.3 of the paper). With frozen weights the
projections stay the same, so each row is projected once and kept. The result is exact and several
times cheaper. Models that need hidden states, to compress or to read a segment again, carry on what
training carries. Letters of shapes as in `pretrain.model`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pretrain.model.adopted import AdoptedModel, LanguageModel
from pretrain.model.attention_backends import ScoreTerms
from pretrain.model.layer import RowsLayer, StateLayer
from pretrain.model.memory import LayerParts, Memory, MemoryLayout, selected_lanes
from pretrain.model.transformer_xl import TransformerXL
from pretrain.model.visibility import SegmentKeys

# Segments that fit into a buffer behind the memory, before the memory's rows move to the front.
SPARE_SEGMENTS = 8


class HiddenStateStream:
    """A stream that carries on what training carries."""

    def __init__(self, module: LanguageModel, memory_length: int, longest_segment: int) -> None:
        self._module = module.eval()
        self._memory_length = memory_length
        self._longest_segment = longest_segment
        self.memory: Memory | None = None

    @torch.no_grad()
    def nll_BL(
        self, tokens_BL: Tensor, targets_BL: Tensor, starts_BL: Tensor | None = None
    ) -> Tensor:
        """Return negative log-likelihoods in float32, and remember the segment."""
        self._module.expect_keys(self._memory_length, self._longest_segment)
        nll_BL, self.memory = self._module(
            tokens_BL, targets_BL, self.memory, starts_BL, memory_length=self._memory_length
        )
        return nll_BL

    @torch.no_grad()
    def logits_BLV(
        self, tokens_BL: Tensor, starts_BL: Tensor | None = None, num_last: int | None = None
    ) -> Tensor:
        """Return log-probabilities after each of the last `num_last` tokens (default: all)."""
        self._module.expect_keys(self._memory_length, self._longest_segment)
        logits_BLV, self.memory = self._module.logits_BLV(
            tokens_BL, self.memory, starts_BL, self._memory_length, num_last
        )
        return logits_BLV

    def select(self, rows_B: Tensor) -> None:
        """Continue with these lanes, in this order; a lane may occur several times."""
        if self.memory is not None:
            self.memory = selected_lanes(self.memory, rows_B)


class SegmentStream:
    """A stream whose segments have memory tokens, which each segment reads and writes once.

    While new tokens of `logits_BLV` fit into the present segment, they extend it: the whole segment
    is then read again.
    """

    def __init__(self, module: TransformerXL, memory_length: int, longest_segment: int) -> None:
        self._longest_segment = longest_segment
        self._stream = HiddenStateStream(module, memory_length, longest_segment)
        self._before: Memory | None = None  # the memory before the present segment
        # The present segment's tokens and document starts.
        self._present: tuple[Tensor, Tensor] | None = None

    def nll_BL(
        self, tokens_BL: Tensor, targets_BL: Tensor, starts_BL: Tensor | None = None
    ) -> Tensor:
        """Return the losses of these tokens, which are a segment of their own."""
        self._present = None
        return self._stream.nll_BL(tokens_BL, targets_BL, starts_BL)

    def logits_BLV(
        self, tokens_BL: Tensor, starts_BL: Tensor | None = None, num_last: int | None = None
    ) -> Tensor:
        """Return log-probabilities after each of the last `num_last` tokens (default: all)."""
        if starts_BL is None:
            starts_BL = torch.zeros_like(tokens_BL, dtype=torch.bool)
        new, num_last = (tokens_BL, starts_BL), num_last or tokens_BL.shape[1]
        if self._present is not None:
            joined = tuple(torch.cat(pair, dim=1) for pair in zip(self._present, new, strict=True))
            if joined[0].shape[1] <= self._longest_segment:
                new = joined
                self._stream.memory = self._before
        self._before, self._present = self._stream.memory, (new[0], new[1])
        return self._stream.logits_BLV(*self._present, num_last)

    def select(self, rows_B: Tensor) -> None:
        self._stream.select(rows_B)
        if self._before is not None:
            self._before = selected_lanes(self._before, rows_B)
        if self._present is not None:
            self._present = (self._present[0][rows_B], self._present[1][rows_B])


class RowBuffer:
    """The last rows of a stream, in order, in a buffer that is allocated once.

    New rows go to the end of the buffer, and the memory is a window that slides over it. Only when
    the buffer is full do the remembered rows move to its front. Rows [B, X, ..., H] are stored as
    attention reads them, [..., B, X, H].
    """

    def __init__(
        self, like: Tensor, memory_length: int, longest_segment: int, num_tokens: int = 0
    ) -> None:
        """`like` [B, X, ...] determines lanes, shape of a row, dtype and device.

        `num_tokens` is the length of the whole stream (0: unknown), and limits the buffer.
        """
        spare = max(SPARE_SEGMENTS * longest_segment, memory_length // 4)
        num_rows = min(memory_length + spare, num_tokens or memory_length + spare)
        between, width = like.shape[2:-1], like.shape[2:][-1:]
        store = like.new_empty(*between, like.shape[0], num_rows, *width)
        ahead = len(between)
        self._rows = store.permute(ahead, ahead + 1, *range(ahead), *range(ahead + 2, store.dim()))
        self._memory_length = memory_length
        self._start = self._end = 0

    def append(self, new: Tensor) -> Tensor:
        """Return memory and the `new` rows [B, L, ...], a view that the next call may overwrite."""
        count = new.shape[1]
        self._start = max(self._start, self._end - self._memory_length)
        if self._end + count > self._rows.shape[1]:
            kept = self._rows[:, self._start : self._end].clone()
            self._start, self._end = 0, kept.shape[1]
            self._rows[:, : self._end] = kept
        self._rows[:, self._end : self._end + count] = new
        self._end += count
        return self._rows[:, self._start : self._end]

    @property
    def num_remembered(self) -> int:
        """The rows of memory that the next call of `append` returns."""
        return min(self._end - self._start, self._memory_length)

    def select(self, rows_B: Tensor) -> None:
        """Replace the lanes by these of the present ones; the number of lanes stays."""
        part = self._rows[:, self._start : self._end]
        part.copy_(part[rows_B])


class KeyValueCache:
    """The memory of a layer that reads rows: projected keys and values, and terms of distances."""

    def __init__(
        self,
        module: TransformerXL,
        index: int,
        layer: RowsLayer,
        length: int,
        longest_segment: int,
        num_tokens: int,
    ) -> None:
        self._module, self._index, self._layer = module, index, layer
        self._length, self._longest_segment = length, longest_segment
        self._num_tokens = num_tokens
        self._rows: RowBuffer | None = None
        self._terms: ScoreTerms | None = None  # for the largest possible number of keys

    def read(self, hidden_BLD: Tensor, keys: SegmentKeys) -> Tensor:
        """Return the layer's output, and remember the segment."""
        num_keys = hidden_BLD.shape[1] + (self._rows.num_remembered if self._rows else 0)
        return self._layer.read_cached(
            hidden_BLD,
            self._remember,
            keys.positions_CX(self._index, num_keys),
            _nearest(self._all_terms(keys), num_keys),
            visibility=keys.visibility(num_keys, self._length),
        )

    def select(self, rows_B: Tensor) -> None:
        if self._rows is not None:
            self._rows.select(rows_B)

    def _remember(self, new_BL2GH: Tensor) -> Tensor:
        if self._rows is None:
            lengths = (self._length, self._longest_segment, self._num_tokens)
            self._rows = RowBuffer(new_BL2GH, *lengths)
        return self._rows.append(new_BL2GH)

    def _all_terms(self, keys: SegmentKeys) -> ScoreTerms:
        if self._terms is None:
            biases_NH = (self._module.content_bias, self._module.position_bias)
            num_keys = self._length + self._longest_segment
            positions_CX = keys.positions_CX(self._index, num_keys)
            self._terms = _heads_first(self._layer.mixer.terms(positions_CX, *biases_NH))
        return self._terms


class CarriedState:
    """The state of a layer without rows: what it carries in training."""

    def __init__(self, layer: StateLayer, index: int, state: MemoryLayout) -> None:
        self._layer, self._index, self._state = layer, index, state
        self._parts: LayerParts | None = None
        self._document_B1: Tensor | None = None  # the last token's document

    def read(self, hidden_BLD: Tensor, keys: SegmentKeys) -> Tensor:
        """Return the layer's output, and carry its state on."""
        parts = self._parts
        if parts is None or self._state.parts.is_forgotten:
            parts = self._state.empty_layer(self._index, len(hidden_BLD), hidden_BLD)
        documents_BL = None
        if keys.isolated_documents_BL is not None:
            before_B1 = 0 if self._document_B1 is None else self._document_B1
            documents_BL = keys.isolated_documents_BL - before_B1
            self._document_B1 = keys.isolated_documents_BL[:, -1:]
        output_BLD, *carried = self._layer(hidden_BLD, *parts, documents_BL, dropout=None)
        self._parts = tuple(carried)
        return output_BLD

    def select(self, rows_B: Tensor) -> None:
        if self._parts is not None:
            self._parts = selected_lanes(self._parts, rows_B)
        if self._document_B1 is not None:
            self._document_B1 = self._document_B1[rows_B]


class CachedStream:
    """A stream whose layers remember keys and values, or states; it computes positions once."""

    def __init__(
        self, module: TransformerXL, memory_length: int, longest_segment: int, num_tokens: int = 0
    ) -> None:
        assert not module.config.compressed_length, (
            "compressed rows are computed from hidden states"
        )
        self._module = module.eval()
        self._expected = (memory_length, longest_segment)
        if num_tokens:
            memory_length, longest_segment = (
                min(length, num_tokens) for length in (memory_length, longest_segment)
            )
        self._memory_length = memory_length
        self._longest_segment = longest_segment
        self._num_tokens = num_tokens
        self._state = MemoryLayout(module.config, memory_length)
        self._caches = [self._cache_of(*numbered) for numbered in enumerate(module.layers)]
        self._documents: RowBuffer | None = None
        self._document_B: Tensor | None = None
        # Each layer's positions, for the largest possible number of keys.
        self._positions: list[Tensor] | None = None

    @torch.no_grad()
    def nll_BL(
        self, tokens_BL: Tensor, targets_BL: Tensor, starts_BL: Tensor | None = None
    ) -> Tensor:
        return self._module.head(self._hidden_states(tokens_BL, starts_BL), targets_BL)

    @torch.no_grad()
    def logits_BLV(
        self, tokens_BL: Tensor, starts_BL: Tensor | None = None, num_last: int | None = None
    ) -> Tensor:
        hidden_BLD = self._hidden_states(tokens_BL, starts_BL)
        return self._module.head(hidden_BLD[:, -(num_last or 0) :], None)

    def select(self, rows_B: Tensor) -> None:
        for cache in self._caches:
            cache.select(rows_B)
        if self._documents is not None and self._document_B is not None:
            self._documents.select(rows_B)
            self._document_B = self._document_B[rows_B]

    def _cache_of(self, index: int, layer: Any) -> KeyValueCache | CarriedState:
        if not self._module.config.mixer(index).has_rows:
            return CarriedState(layer, index, self._state)
        length = self._state.parts.layers[index][0].length
        lengths = (length, self._longest_segment, self._num_tokens)
        return KeyValueCache(self._module, index, layer, *lengths)

    def _hidden_states(self, tokens_BL: Tensor, starts_BL: Tensor | None) -> Tensor:
        assert tokens_BL.shape[1] <= self._longest_segment, (tokens_BL.shape, self._longest_segment)
        hidden_BLD = self._module.embedding(tokens_BL)
        if self._positions is None:
            self._module.expect_keys(*self._expected)
            num_keys = self._memory_length + self._longest_segment
            self._positions = self._module.positions(num_keys, hidden_BLD)
        documents_BC = self._documents_BC(tokens_BL, starts_BL)
        keys = SegmentKeys(
            self._module.config,
            hidden_BLD.dtype,
            self._positions,
            documents_BC,
            hidden_BLD.shape[1],
        )
        for cache in self._caches:
            hidden_BLD = cache.read(hidden_BLD, keys)
        return hidden_BLD

    def _documents_BC(self, tokens_BL: Tensor, starts_BL: Tensor | None) -> Tensor:
        if self._documents is None or self._document_B is None:
            self._document_B = tokens_BL.new_zeros(len(tokens_BL), dtype=torch.int32)
            empty = torch.empty_like(tokens_BL, dtype=torch.int32)
            lengths = (self._memory_length, self._longest_segment, self._num_tokens)
            self._documents = RowBuffer(empty, *lengths)
        new_BL = self._document_B[:, None].expand_as(tokens_BL)
        if starts_BL is not None:
            new_BL = new_BL + starts_BL.cumsum(1, dtype=torch.int32)
        self._document_B = new_BL[:, -1]
        return self._documents.append(new_BL)


Stream = HiddenStateStream | SegmentStream | CachedStream


def last_logits_BTV(
    read: Callable[[Tensor, Tensor, int], Tensor],
    tokens_BT: Tensor,
    starts_BT: Tensor,
    segment_length: int,
    num_last: int,
) -> Tensor:
    """Return the logits of the last `num_last` tokens of a text that is read in segments.

    `read` takes tokens, which of them start a document, and how many logits to return.
    """
    num_tokens, parts = tokens_BT.shape[1], []
    for start in range(0, num_tokens, segment_length):
        stop = min(start + segment_length, num_tokens)
        count = stop - max(start, num_tokens - num_last)
        part_BLV = read(tokens_BT[:, start:stop], starts_BT[:, start:stop], max(1, count))
        if count > 0:
            parts.append(part_BLV)
    return torch.cat(parts, dim=1)


def new_stream(
    module: LanguageModel, memory_length: int, longest_segment: int, num_tokens: int = 0
) -> Stream:
    """Return the cheapest stream for the model; segments have up to `longest_segment` tokens.

    `num_tokens`, the length of the whole stream (0: unknown), only limits the space that it takes:
    positions follow from the given memory length and segments.
    """
    if isinstance(module, AdoptedModel):
        return HiddenStateStream(module, memory_length, longest_segment)
    if module.config.memory_tokens:
        return SegmentStream(module, memory_length, longest_segment)
    if module.config.compressed_length:  # compressed rows are computed from hidden states
        return HiddenStateStream(module, memory_length, longest_segment)
    return CachedStream(module, memory_length, longest_segment, num_tokens)


def _heads_first(terms: ScoreTerms) -> ScoreTerms:
    """Return the terms with projected positions laid out as attention reads them."""
    if terms.position_CNH is None:
        return terms
    position_NCH = terms.position_CNH.transpose(0, 1).contiguous()
    return replace(terms, position_CNH=position_NCH.transpose(0, 1))


def _nearest(terms: ScoreTerms, num_keys: int) -> ScoreTerms:
    """Return the terms of the `num_keys` shortest distances."""
    positions, biases = terms.position_CNH, terms.distance_bias_CN
    return replace(
        terms,
        position_CNH=None if positions is None else positions[-num_keys:],
        distance_bias_CN=None if biases is None else biases[-num_keys:],
    )
