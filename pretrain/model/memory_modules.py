"""The modules that write memory: compression of the rows that leave it, and memory tokens.

With compression (Rae et al. 2019) the rows that leave are compressed instead of dropped,
`compression_rate` at a time, oldest first, each group to one row that never has a gradient. Memory
tokens: Bulatov et al. 2022 (arXiv 2207.06881).

Letters of shapes as in `pretrain.model`; X is the number of memory tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from pretrain.config.model import ModelConfig
from pretrain.model.layer import RowsLayer
from pretrain.model.memory import grouped_documents
from pretrain.model.parameters import new_norm, normal, zeros


class Compression(nn.Module):
    """The compression of one layer: a convolution over each group of rows.

    It has the compression rate as width and stride, and learns from attention reconstruction alone
    (section 3.2 of Rae et al. 2019): what this layer's attention reads by content from the
    compressed rows should equal what it would have read from the rows themselves. The gradient of
    that error reaches nothing else, and the model's loss does not reach the convolution.
    """

    def __init__(self, config: ModelConfig, attention: Any) -> None:
        super().__init__()
        self._rate = config.compression_rate
        self._head_width = config.head_width
        self._heads_per_key = config.num_heads // config.key_heads
        shape = (config.d_model, self._rate * config.d_model)
        self.weight = normal(*shape, std=config.matrix_init_std)
        self.bias = zeros(config.d_model)
        # Attention's weights, registered here too: ZeRO-3 gathers a module's parameters when the
        # module is called.
        self.query_weight = attention.query_weight
        self.key_value_weight = attention.key_value_weight

    def forward(
        self,
        leaving_BXD: Tensor,
        segment_BLD: Tensor,
        documents_BX: Tensor | None,
        documents_BL: Tensor | None,
        *,
        layer: RowsLayer,
    ) -> tuple[Tensor, Tensor]:
        """Return the compressed rows [B, K, D] and the reconstruction error (0 without gradients).

        Given the documents of leaving rows and segment, documents are isolated: in a group, rows of
        another document than the last row's count as 0, and no query reads rows of another
        document. Rows are normalized as in `layer`. This also runs without rows to compress: under
        ZeRO-3 every rank must run every module.
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
        norm, key_norm = layer.input_norm, layer.mixer.key_norm
        with torch.no_grad():
            leaving_BXD, segment_BLD = (_normed(rows, norm) for rows in (leaving_BXD, segment_BLD))
            query_BLNH = linear(segment_BLD, self.query_weight).unflatten(
                -1, (-1, self._head_width)
            )
            query_BNLH = _normed(query_BLNH, layer.mixer.query_norm).transpose(1, 2)
            expected_BNLH = self._read(query_BNLH, leaving_BXD, key_norm, seen_BLX)
        found_BNLH = self._read(query_BNLH, _normed(compressed_BKD, norm), key_norm, seen_BLK)
        squares_BNLH = (found_BNLH - expected_BNLH).square()
        if seen_BLK is None:
            return compressed_BKD, squares_BNLH.mean()
        # Queries that see no compressed row count as 0. In a mean over the other queries, a lane's
        # weight would depend on the lanes in its forward pass.
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
            rows.repeat_interleave(self._heads_per_key, dim=2).transpose(1, 2)
            for rows in (_normed(key_BXGH, key_norm), value_BXGH)
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
    """The vectors that a segment reads from the previous one, and writes for the next.

    Layers get [read tokens | segment | write tokens] as one causal sequence. Both groups start as
    what the previous segment has written. If that is zeros, nothing was written, and they start as
    learned vectors. What the last layer returns for the write tokens is carried on. With pre-norm
    layers it would grow from segment to segment, so it is normalized here.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.initial = normal(config.memory_tokens, config.d_model, std=config.init_std)
        self.norm = new_norm(config) if config.norm_position == "pre" else None
        self._scale = config.embedding_scale
        self._count = config.memory_tokens  # `initial` may be sharded, without this dimension

    def forward(
        self, hidden_BLD: Tensor, written_BXD: Tensor, is_new_document_B: Tensor | None
    ) -> Tensor:
        """Return the segment between its read and its write tokens, [B, X + L + X, D].

        Where documents are isolated and a new one has started, the write tokens start as learned
        vectors. Masks hide the read tokens from the new document's tokens.
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

    Read tokens have the document of the token before the segment, write tokens the last token's.
    """
    if not count:
        return documents_BL
    before_BX = documents_BL.new_zeros(len(documents_BL), count)
    return torch.cat([before_BX, documents_BL, documents_BL[:, -1:].expand(-1, count)], dim=1)
