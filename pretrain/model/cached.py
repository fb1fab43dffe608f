"""Streams through a frozen model, whose memory is keys and values instead of hidden states.

In training, memory holds hidden states, and every segment projects all of them to keys and values
again, because the weights have changed (section 3.3 of the paper). With frozen weights the
projections stay the same, so each row is projected once and kept. The result is exact and several
times cheaper. Letters of shapes as in `pretrain.model`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pretrain.model.attention_paths import DistanceTerms
from pretrain.model.layer import TransformerLayer
from pretrain.model.memory import Memory
from pretrain.model.transformer_xl import TransformerXL

SPARE_SEGMENTS = 8  # fit into the buffer after the memory before its rows move to the front


class HiddenStateStream:
    """A stream that remembers hidden states, as in training."""

    def __init__(self, module: TransformerXL, memory_length: int) -> None:
        self._module = module.eval()
        self._memory_length = memory_length
        self._memory: Memory | None = None

    @torch.no_grad()
    def nll_BL(
        self, tokens_BL: Tensor, targets_BL: Tensor, starts_BL: Tensor | None = None
    ) -> Tensor:
        """Return negative log-likelihoods in float32, and remember the segment."""
        nll_BL, self._memory = self._module(
            tokens_BL, targets_BL, self._memory, starts_BL, memory_length=self._memory_length
        )
        return nll_BL

    @torch.no_grad()
    def logits_BLV(
        self, tokens_BL: Tensor, starts_BL: Tensor | None = None, num_last: int | None = None
    ) -> Tensor:
        """Return log-probabilities after each of the last `num_last` tokens (default: all)."""
        logits_BLV, self._memory = self._module.logits_BLV(
            tokens_BL, self._memory, starts_BL, self._memory_length, num_last
        )
        return logits_BLV

    def select(self, rows_B: Tensor) -> None:
        """Continue with these of the present rows, in this order; one may occur several times."""
        if self._memory is not None:
            self._memory = tuple(part[rows_B] for part in self._memory)


class RowBuffer:
    """The last rows of a stream, in order, in a buffer that is allocated once.

    New rows go to the end of the buffer, and the memory is a window that slides over it. Only when
    the buffer is full do the remembered rows move to its front. Rows [B, X, ..., H] are stored as
    attention reads them, [..., B, X, H].
    """

    def __init__(self, like: Tensor, memory_length: int, longest_segment: int) -> None:
        """`like` [B, X, ...] determines lanes, shape of a row, dtype and device."""
        spare = max(SPARE_SEGMENTS * longest_segment, memory_length // 4)
        between, width = like.shape[2:-1], like.shape[2:][-1:]
        store = like.new_empty(*between, like.shape[0], memory_length + spare, *width)
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

    def select(self, rows_B: Tensor) -> None:
        """Keep these lanes, as many as there are, in place of the present ones."""
        part = self._rows[:, self._start : self._end]
        part.copy_(part[rows_B])


class CachedStream:
    """A stream that remembers projected keys and values and projects positions once."""

    def __init__(self, module: TransformerXL, memory_length: int, longest_segment: int) -> None:
        assert not module.config.compressed_length, (
            "compressed rows are computed from hidden states"
        )
        self._module = module.eval()
        self._memory_length = memory_length
        self._longest_segment = longest_segment
        self._layers = [layer for layer in module.layers if isinstance(layer, TransformerLayer)]
        self._caches: list[RowBuffer] = []
        self._documents: RowBuffer | None = None
        self._document_B: Tensor | None = None
        self._positions_CX: Tensor | None = None  # for the largest possible number of keys
        self._terms: list[DistanceTerms] = []

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
        for buffer in self._caches:
            buffer.select(rows_B)
        if self._documents is not None and self._document_B is not None:
            self._documents.select(rows_B)
            self._document_B = self._document_B[rows_B]

    def _hidden_states(self, tokens_BL: Tensor, starts_BL: Tensor | None) -> Tensor:
        assert tokens_BL.shape[1] <= self._longest_segment, (tokens_BL.shape, self._longest_segment)
        hidden_BLD = self._module.embedding(tokens_BL)
        positions_CX = self._positions(hidden_BLD)
        documents_BC = self._documents_BC(tokens_BL, starts_BL)
        num_keys = documents_BC.shape[1]
        visibility = self._module.visibility(documents_BC, hidden_BLD, self._memory_length)
        for index, layer in enumerate(self._layers):
            hidden_BLD = layer.read_cached(
                hidden_BLD,
                lambda new, index=index: self._remember(index, new),
                positions_CX[-num_keys:],
                _nearest(self._terms[index], num_keys),
                visibility=visibility,
            )
        return hidden_BLD

    def _positions(self, like: Tensor) -> Tensor:
        if self._positions_CX is None:
            module = self._module
            num_keys = self._memory_length + self._longest_segment
            self._positions_CX = module.positions_CX(num_keys, like)
            biases_NH = (module.content_bias, module.position_bias)
            self._terms = [
                _heads_first(layer.attention.terms(self._positions_CX, *biases_NH))
                for layer in self._layers
            ]
        return self._positions_CX

    def _remember(self, index: int, new_BL2GH: Tensor) -> Tensor:
        if index == len(self._caches):
            self._caches.append(RowBuffer(new_BL2GH, self._memory_length, self._longest_segment))
        return self._caches[index].append(new_BL2GH)

    def _documents_BC(self, tokens_BL: Tensor, starts_BL: Tensor | None) -> Tensor:
        if self._documents is None or self._document_B is None:
            self._document_B = tokens_BL.new_zeros(len(tokens_BL), dtype=torch.int32)
            empty = torch.empty_like(tokens_BL, dtype=torch.int32)
            self._documents = RowBuffer(empty, self._memory_length, self._longest_segment)
        new_BL = self._document_B[:, None].expand_as(tokens_BL)
        if starts_BL is not None:
            new_BL = new_BL + starts_BL.cumsum(1, dtype=torch.int32)
        self._document_B = new_BL[:, -1]
        return self._documents.append(new_BL)


Stream = HiddenStateStream | CachedStream


def new_stream(module: TransformerXL, memory_length: int, longest_segment: int) -> Stream:
    """Return the cheapest stream for the model; segments have up to `longest_segment` tokens."""
    if module.config.compressed_length:  # compressed rows are computed from hidden states
        return HiddenStateStream(module, memory_length)
    return CachedStream(module, memory_length, longest_segment)


def _heads_first(terms: DistanceTerms) -> DistanceTerms:
    """Return the terms with projected positions laid out as attention reads them."""
    if terms.position_CNH is None:
        return terms
    position_NCH = terms.position_CNH.transpose(0, 1).contiguous()
    return replace(terms, position_CNH=position_NCH.transpose(0, 1))


def _nearest(terms: DistanceTerms, num_keys: int) -> DistanceTerms:
    """Return the terms of the `num_keys` shortest distances."""
    positions, biases = terms.position_CNH, terms.distance_bias_CN
    return replace(
        terms,
        position_CNH=None if positions is None else positions[-num_keys:],
        distance_bias_CN=None if biases is None else biases[-num_keys:],
    )
