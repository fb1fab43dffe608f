"""Relative attention in four terms (section 3.3 of the paper), heads first.

B lanes, L queries, M memory rows, C = M + L keys, D d_model, N heads, H head width.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from pretrain.config import AttentionKernel, ModelConfig
from pretrain.kernels.cpu_attention import relative_attention
from pretrain.kernels.triton_support import interprets_kernels, unsupported_reason
from pretrain.model.dropout import DropoutStream, Site, drop, realised_rate
from pretrain.model.masks import Visibility
from pretrain.model.parameters import normal


def relative_shift(padded: Tensor) -> Tensor:
    """A view in which row i of [X, L, 1 + C] is moved left by L - 1 - i, so that column j holds distance i + M - j.

    The first column is the padding the shift needs. Entries of keys after the query are leftovers: mask them.
    """
    batch, num_queries, width = padded.shape
    return padded.view(batch, width, num_queries)[:, 1:].view(batch, num_queries, width - 1)


def relative_scores(
    content_query_NBLH: Tensor, position_query_NBLH: Tensor, key_NBCH: Tensor, position_key_NCH: Tensor
) -> Tensor:
    """Content plus position scores [N, B, L, C]: the queries carry the bias u or v and the scale."""
    N, B, L, H = position_query_NBLH.shape
    C = key_NBCH.shape[2]
    # A zero key in front yields the shift's padding column for free; one product per head serves all lanes.
    padded_key_NPH = pad(position_key_NCH, (0, 0, 1, 0))
    position_NXP = torch.bmm(position_query_NBLH.reshape(N, B * L, H), padded_key_NPH.transpose(1, 2))
    position_NBLC = relative_shift(position_NXP.view(N * B, L, C + 1)).view(N, B, L, C)
    return torch.matmul(content_query_NBLH, key_NBCH.transpose(2, 3)).add_(position_NBLC)


@functools.cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class RelativeAttention(nn.Module):
    """Queries from the segment, keys and values from memory and segment; no norm, no residual.

    Score of query i and key j: [(q_i + u) . k_j + (q_i + v) . (W_R R_dist)] / sqrt(H). With `untie_biases` u and v are
    parameters of this layer, else they are handed in.
    """

    def __init__(self, config: ModelConfig, layer: int, kernel: AttentionKernel = "auto") -> None:
        super().__init__()
        width = config.num_heads * config.head_width
        std = config.init_std
        self._layer = layer
        self._kernel: AttentionKernel = kernel
        self._num_heads = config.num_heads
        self._rate = config.dropout
        self._attention_rate = config.attention_dropout
        self._scale = 1.0 / math.sqrt(config.head_width)
        self.query_weight = normal(width, config.d_model, std=std)
        self.key_value_weight = normal(2 * width, config.d_model, std=std)
        self.position_weight = normal(width, config.d_model, std=std)
        self.output_weight = normal(config.d_model, width, std=std)
        if config.untie_biases:
            self.content_bias = normal(config.num_heads, config.head_width, std=std)
            self.position_bias = normal(config.num_heads, config.head_width, std=std)

    def forward(
        self,
        segment_BLD: Tensor,
        memory_BMD: Tensor,
        positions_CD: Tensor,
        content_bias_NH: Tensor | None,
        position_bias_NH: Tensor | None,
        *,
        visibility: Visibility,
        dropout: DropoutStream | None,
    ) -> Tensor:
        """The attended values [B, L, D]."""
        if content_bias_NH is None or position_bias_NH is None:
            content_bias_NH, position_bias_NH = self.content_bias, self.position_bias
        query_BLNH = self._split_heads(linear(segment_BLD, self.query_weight))
        # Memory and segment are projected apart: memory rows need neither a query nor, mostly, an input gradient.
        parts = [
            linear(part_BXD, self.key_value_weight).unflatten(-1, (2, self._num_heads, -1))
            for part_BXD in (memory_BMD, segment_BLD)
            if part_BXD.shape[1]
        ]
        position_CNH = self._split_heads(linear(positions_CD, self.position_weight))
        attended_BLNH = self._chosen(query_BLNH)(
            query_BLNH, parts, position_CNH, content_bias_NH, position_bias_NH, visibility, dropout
        )
        output_BLD = linear(attended_BLNH.flatten(2), self.output_weight)
        return drop(output_BLD, self._rate, dropout, Site.ATTENTION_OUTPUT, self._layer)

    def _chosen(self, query_BLNH: Tensor) -> Callable[..., Tensor]:
        """The fastest way for these tensors, unless plain operations were asked for."""
        if self._kernel == "plain":
            return self._plain
        device = query_BLNH.device
        if device.type == "cpu" and not interprets_kernels():
            return self._tiled
        reason = unsupported_reason(device, query_BLNH.dtype, query_BLNH.shape[-1])
        if reason is None:
            return self._fused
        _say_once(f"attention runs in plain operations: {reason}")
        return self._plain

    def _fused(
        self,
        query_BLNH: Tensor,
        parts: Sequence[Tensor],
        position_CNH: Tensor,
        content_bias_NH: Tensor,
        position_bias_NH: Tensor,
        visibility: Visibility,
        dropout: DropoutStream | None,
    ) -> Tensor:
        from pretrain.kernels.triton_attention import fused_relative_attention

        key_BCNH, value_BCNH = torch.cat(list(parts), dim=1).unbind(2)
        rate, lane_keys_B = 0.0, None
        if dropout is not None and self._attention_rate:
            rate = self._attention_rate
            lane_keys_B = dropout.lane_keys(Site.ATTENTION, self._layer, query_BLNH.device)
        return fused_relative_attention(
            query_BLNH,
            key_BCNH,
            value_BCNH,
            position_CNH,
            content_bias_NH,
            position_bias_NH,
            max_distance=visibility.window or None,
            documents_BK=visibility.documents_BC,
            dropout=rate,
            dropout_keys_B=lane_keys_B,
        )

    def _tiled(
        self,
        query_BLNH: Tensor,
        parts: Sequence[Tensor],
        position_CNH: Tensor,
        content_bias_NH: Tensor,
        position_bias_NH: Tensor,
        visibility: Visibility,
        dropout: DropoutStream | None,
    ) -> Tensor:
        keep_NBLC, rate = None, self._attention_rate
        if dropout is not None and rate:
            B, L, N, _ = query_BLNH.shape
            shape = (N, B, L, len(position_CNH))
            keep_NBLC = dropout.keep(shape, rate, Site.ATTENTION, self._layer, lane_axis=1, device=query_BLNH.device)
        return relative_attention(
            query_BLNH,
            parts,
            position_CNH,
            content_bias_NH,
            position_bias_NH,
            max_distance=visibility.window or None,
            documents_BK=visibility.documents_BC,
            keep_HBLK=keep_NBLC,
            keep_probability=1.0 if keep_NBLC is None else 1.0 - realised_rate(rate),
        )

    def _plain(
        self,
        query_BLNH: Tensor,
        parts: Sequence[Tensor],
        position_CNH: Tensor,
        content_bias_NH: Tensor,
        position_bias_NH: Tensor,
        visibility: Visibility,
        dropout: DropoutStream | None,
    ) -> Tensor:
        query_NBLH = query_BLNH.permute(2, 0, 1, 3).contiguous()
        key_NBCH, value_NBCH = torch.cat([part.permute(2, 3, 0, 1, 4) for part in parts], dim=3).unbind(0)
        scores_NBLC = relative_scores(
            self._biased(query_NBLH, content_bias_NH),
            self._biased(query_NBLH, position_bias_NH),
            key_NBCH,
            position_CNH.transpose(0, 1),
        )
        weights_NBLC = torch.softmax(scores_NBLC.add_(visibility.mask), dim=-1)
        weights_NBLC = drop(weights_NBLC, self._attention_rate, dropout, Site.ATTENTION, self._layer, lane_axis=1)
        return torch.matmul(weights_NBLC, value_NBCH).permute(1, 2, 0, 3)

    def _split_heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (self._num_heads, -1))

    def _biased(self, query_NBLH: Tensor, bias_NH: Tensor) -> Tensor:
        # (query + bias) * scale in one pass; scaling the sum of the scores would take another over [N, B, L, C].
        return torch.add(bias_NH[:, None, None] * self._scale, query_NBLH, alpha=self._scale)
