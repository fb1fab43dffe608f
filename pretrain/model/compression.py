"""The Compressive Transformer's memory (Rae et al. 2019): rows that leave the memory are compressed, not forgotten.

B lanes, L tokens of the segment, E leaving rows, c compression rate, K = E / c compressed rows, D d_model, N heads,
H head width.
"""

from __future__ import annotations

from itertools import starmap

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from pretrain.config.run import ModelConfig
from pretrain.model.attention import RelativeAttention
from pretrain.model.layer import TransformerLayer
from pretrain.model.memory import Memory, keep_last_rows
from pretrain.model.parameters import normal, zeros


def num_leaving_rows(num_recent: int, num_tokens: int, memory_length: int, rate: int) -> int:
    """How many rows leave the memory after a segment: whole groups of `rate` beyond `memory_length`.

    Groups are counted from the stream's start, so what one holds does not depend on how the stream is cut.
    """
    return max(0, num_recent + num_tokens - memory_length) // rate * rate


def leaving_rows(recent_BMX: Tensor, segment_BLX: Tensor, count: int) -> Tensor:
    """The first `count` rows of memory and segment, without gradient."""
    from_segment = max(0, count - recent_BMX.shape[1])
    return torch.cat([recent_BMX[:, :count], segment_BLX[:, :from_segment].detach()], dim=1)


def grouped_documents(documents_BE: Tensor, rate: int) -> tuple[Tensor, Tensor]:
    """The document of each compressed row, [B, K], that of its last row; and which rows are of it, [B, K, c]."""
    documents_BKc = documents_BE.unflatten(1, (documents_BE.shape[1] // rate, rate))
    return documents_BKc[:, :, -1], documents_BKc == documents_BKc[:, :, -1:]


def with_compressed(old: Memory, new: Memory, length: int, last_document_B1: Tensor) -> Memory:
    """The compressed rows after a segment whose last token is of `last_document_B1`; documents count back from it."""
    parts = keep_last_rows(tuple(starmap(_joined, zip(old, new, strict=True))), length)
    return (*(part.contiguous() for part in parts[:-1]), parts[-1] - last_document_B1)


def _joined(old_BKX: Tensor, new_BKX: Tensor) -> Tensor:
    return torch.cat([old_BKX, new_BKX.detach()], dim=1)


class Compression(nn.Module):
    """One layer's compression function: the mean or maximum of c rows, or a convolution of width and stride c.

    The convolution learns from one thing only: what this layer's attention reads from the compressed rows, by content,
    shall be what it would have read from the rows themselves ("attention reconstruction"). No gradient of it reaches
    anything else, and the model's loss does not reach the convolution.
    """

    def __init__(self, config: ModelConfig, attention: RelativeAttention) -> None:
        super().__init__()
        self._kind = config.compression
        self._rate = config.compression_rate
        self._head_width = config.head_width
        self._heads_per_key = config.num_heads // config.key_heads
        if self._kind == "conv":
            self.weight = normal(
                config.d_model, config.compression_rate * config.d_model, std=config.init_std
            )
            self.bias = zeros(config.d_model)
            # The attention's own, held here too: ZeRO-3 gathers what a module holds when the module is called.
            self.query_weight = attention.query_weight
            self.key_value_weight = attention.key_value_weight

    def forward(
        self,
        leaving_BED: Tensor,
        own_BKc: Tensor | None,
        segment_BLD: Tensor,
        *,
        layer: TransformerLayer,
    ) -> tuple[Tensor, Tensor]:
        """The compressed rows [B, K, D] and the reconstruction error, zero where nothing learns from it.

        Rows that `own_BKc` denies are left out. `layer` lends its norms. Also called with no row to compress: every
        rank must run every module.
        """
        groups_BKcD = leaving_BED.unflatten(1, (leaving_BED.shape[1] // self._rate, self._rate))
        compressed_BKD = self._compressed(groups_BKcD, own_BKc)
        if self._kind != "conv" or not torch.is_grad_enabled():
            return compressed_BKD, compressed_BKD.new_zeros(())
        norm, query_norm, key_norm = (
            layer.input_norm,
            layer.attention.query_norm,
            layer.attention.key_norm,
        )
        with torch.no_grad():
            leaving_BED, segment_BLD = (_normed(rows, norm) for rows in (leaving_BED, segment_BLD))
            query_BNLH = self._query(segment_BLD, query_norm)
            expected_BNLH = self._read(query_BNLH, leaving_BED, key_norm)
        found_BNLH = self._read(query_BNLH, _normed(compressed_BKD, norm), key_norm)
        return compressed_BKD, (found_BNLH - expected_BNLH).square().mean()

    def _compressed(self, groups_BKcD: Tensor, own_BKc: Tensor | None) -> Tensor:
        own_BKc1 = None if own_BKc is None else own_BKc[..., None]
        if self._kind == "max":
            lowest = float("-inf")
            return (groups_BKcD if own_BKc1 is None else groups_BKcD.where(own_BKc1, lowest)).amax(
                2
            )
        if own_BKc1 is not None:
            groups_BKcD = groups_BKcD.where(own_BKc1, 0.0)
        if self._kind == "conv":
            return linear(groups_BKcD.flatten(2), self.weight, self.bias)
        return groups_BKcD.sum(2) / (self._rate if own_BKc1 is None else own_BKc1.sum(2))

    def _query(self, segment_BLD: Tensor, query_norm: nn.Module | None) -> Tensor:
        query_BLNH = linear(segment_BLD, self.query_weight).unflatten(-1, (-1, self._head_width))
        return _normed(query_BLNH, query_norm).transpose(1, 2)

    def _read(self, query_BNLH: Tensor, rows_BXD: Tensor, key_norm: nn.Module | None) -> Tensor:
        """What the queries read from the rows by content alone, with attention's weights held still."""
        key_value = linear(rows_BXD, self.key_value_weight.detach()).unflatten(
            -1, (2, -1, self._head_width)
        )
        key_BXGH, value_BXGH = key_value.unbind(2)
        key_BNXH, value_BNXH = (
            each.repeat_interleave(self._heads_per_key, dim=2).transpose(1, 2)
            for each in (_normed(key_BXGH, key_norm), value_BXGH)
        )
        scores_BNLX = query_BNLH @ key_BNXH.transpose(2, 3) * self._head_width**-0.5
        return scores_BNLX.softmax(-1) @ value_BNXH


def _normed(rows: Tensor, norm: nn.Module | None) -> Tensor:
    return rows if norm is None else norm(rows, frozen=True)
