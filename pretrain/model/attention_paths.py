"""The same attention computed three ways: plain operations, cache-sized tiles on the CPU, fused kernels on a GPU.

B lanes, L queries, C keys, the last L of them the queries' own, N heads, G heads of keys and values, H head width.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from pretrain.config.run import AttentionKernel
from pretrain.kernels.cpu.attention import relative_attention
from pretrain.kernels.triton.support import interprets_kernels, unsupported_reason
from pretrain.model.dropout import DropoutStream, Site, drop, realised_rate
from pretrain.model.masks import Visibility


@dataclass(frozen=True, kw_only=True)
class DistanceTerms:
    """What distances add to the scores: the paper's encodings with u and v, a bias per distance, or nothing."""

    position_CNH: Tensor | None = None  # W_R R
    content_bias_NH: Tensor | None = None  # u
    position_bias_NH: Tensor | None = None  # v
    distance_bias_CN: Tensor | None = None


@dataclass(frozen=True)
class WeightDropout:
    """Dropout of attention's weights in one layer; nothing is dropped without a stream."""

    rate: float
    layer: int
    stream: DropoutStream | None


# Queries [B, L, N, H] and projected keys and values [B, rows, 2, G, H], memory's rows first, to [B, L, N, H]
AttentionPath = Callable[
    [Tensor, Sequence[Tensor], DistanceTerms, Visibility, WeightDropout], Tensor
]


def path_for(
    kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, head_width: int
) -> AttentionPath:
    """The fastest way for such tensors, unless plain operations were asked for."""
    if kernel == "plain":
        return plain_attention
    if device.type == "cpu" and not interprets_kernels():
        return tiled_attention
    reason = unsupported_reason(device, dtype, head_width)
    if reason is None:
        return fused_attention
    _say_once(f"attention runs in plain operations: {reason}")
    return plain_attention


def fused_attention(
    query_BLNH: Tensor,
    parts: Sequence[Tensor],
    terms: DistanceTerms,
    visibility: Visibility,
    dropout: WeightDropout,
) -> Tensor:
    """By the Triton kernels; dropout draws masks of its own."""
    from pretrain.kernels.triton.attention import fused_relative_attention

    key_BCGH, value_BCGH = torch.cat(list(parts), dim=1).unbind(2)
    rate, lane_keys_B = 0.0, None
    if dropout.stream is not None and dropout.rate:
        rate = dropout.rate
        lane_keys_B = dropout.stream.lane_keys(Site.ATTENTION, dropout.layer, query_BLNH.device)
    return fused_relative_attention(
        query_BLNH,
        key_BCGH,
        value_BCGH,
        terms.position_CNH,
        terms.content_bias_NH,
        terms.position_bias_NH,
        distance_bias_CN=terms.distance_bias_CN,
        max_distance=visibility.window or None,
        documents_BC=visibility.documents_BC,
        dropout=rate,
        dropout_keys_B=lane_keys_B,
    )


def tiled_attention(
    query_BLNH: Tensor,
    parts: Sequence[Tensor],
    terms: DistanceTerms,
    visibility: Visibility,
    dropout: WeightDropout,
) -> Tensor:
    """By the CPU's tiles; dropout's masks are those of `plain_attention`."""
    keep_NBLC, rate = None, dropout.rate
    if dropout.stream is not None and rate:
        B, L, N, _ = query_BLNH.shape
        shape, device = (N, B, L, visibility.num_keys), query_BLNH.device
        keep_NBLC = dropout.stream.keep(
            shape, rate, Site.ATTENTION, dropout.layer, lane_axis=1, device=device
        )
    return relative_attention(
        query_BLNH,
        parts,
        terms.position_CNH,
        terms.content_bias_NH,
        terms.position_bias_NH,
        distance_bias_CN=terms.distance_bias_CN,
        max_distance=visibility.window or None,
        documents_BC=visibility.documents_BC,
        keep_NBLC=keep_NBLC,
        keep_probability=1.0 if keep_NBLC is None else 1.0 - realised_rate(rate),
    )


def plain_attention(
    query_BLNH: Tensor,
    parts: Sequence[Tensor],
    terms: DistanceTerms,
    visibility: Visibility,
    dropout: WeightDropout,
) -> Tensor:
    """By matrix products over all queries and keys, heads first."""
    query_NBLH = query_BLNH.permute(2, 0, 1, 3).contiguous()
    key_NBCH, value_NBCH = torch.cat([part.permute(2, 3, 0, 1, 4) for part in parts], dim=3).unbind(
        0
    )
    heads_per_key = len(query_NBLH) // len(key_NBCH)
    if heads_per_key > 1:
        key_NBCH, value_NBCH = (
            each.repeat_interleave(heads_per_key, dim=0) for each in (key_NBCH, value_NBCH)
        )
    weights_NBLC = torch.softmax(
        _scores_NBLC(query_NBLH, key_NBCH, terms).add_(visibility.mask), dim=-1
    )
    weights_NBLC = drop(
        weights_NBLC, dropout.rate, dropout.stream, Site.ATTENTION, dropout.layer, lane_axis=1
    )
    return torch.matmul(weights_NBLC, value_NBCH).permute(1, 2, 0, 3)


def relative_shift(padded: Tensor) -> Tensor:
    """A view in which row i of [X, L, 1 + C] is moved left by L - 1 - i, so that column j holds distance i + M - j.

    The first column is the padding the shift needs. Entries of keys after the query are leftovers: mask them.
    """
    batch, num_queries, width = padded.shape
    return padded.view(batch, width, num_queries)[:, 1:].view(batch, num_queries, width - 1)


def relative_scores(
    content_query_NBLH: Tensor,
    position_query_NBLH: Tensor,
    key_NBCH: Tensor,
    position_key_NCH: Tensor,
) -> Tensor:
    """Content plus position scores [N, B, L, C]: the queries carry the bias u or v and the scale."""
    N, B, L, H = position_query_NBLH.shape
    C = key_NBCH.shape[2]
    # A zero key in front yields the shift's padding column for free; one product per head serves all lanes.
    padded_key_NPH = pad(position_key_NCH, (0, 0, 1, 0))
    position_NXP = torch.bmm(
        position_query_NBLH.reshape(N, B * L, H), padded_key_NPH.transpose(1, 2)
    )
    position_NBLC = relative_shift(position_NXP.view(N * B, L, C + 1)).view(N, B, L, C)
    return torch.matmul(content_query_NBLH, key_NBCH.transpose(2, 3)).add_(position_NBLC)


def bias_by_distance_NLC(distance_bias_CN: Tensor, num_queries: int) -> Tensor:
    """The bias of query i and key j, that of their distance; leftovers where the key is after the query."""
    padded_NP = pad(distance_bias_CN.t(), (1, 0))
    return relative_shift(padded_NP[:, None].expand(-1, num_queries, -1).contiguous())


def _scores_NBLC(query_NBLH: Tensor, key_NBCH: Tensor, terms: DistanceTerms) -> Tensor:
    scale = 1.0 / math.sqrt(query_NBLH.shape[3])
    if terms.position_CNH is not None:
        # (query + bias) * scale in one pass; scaling the sum of the scores would take another over [N, B, L, C].
        content_NBLH, position_NBLH = (
            torch.add(bias_NH[:, None, None] * scale, query_NBLH, alpha=scale)
            for bias_NH in (terms.content_bias_NH, terms.position_bias_NH)
            if bias_NH is not None
        )
        return relative_scores(
            content_NBLH, position_NBLH, key_NBCH, terms.position_CNH.transpose(0, 1)
        )
    scores_NBLC = torch.matmul(query_NBLH * scale, key_NBCH.transpose(2, 3))
    if terms.distance_bias_CN is not None:
        scores_NBLC.add_(bias_by_distance_NLC(terms.distance_bias_CN, query_NBLH.shape[2])[:, None])
    return scores_NBLC


@functools.cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
