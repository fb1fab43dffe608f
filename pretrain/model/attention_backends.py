"""One attention, computed by plain operations, CPU tiles, torch's kernels or our fused kernels.

Letters of shapes as in `pretrain.model`; the queries are the last L of the C keys.
"""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from foundation.settings import assert_never
from pretrain.config.engine import Attention, chosen_attention, described
from pretrain.config.model import AttentionKernel, ModelConfig
from pretrain.kernels.cpu.attention import relative_attention, relative_shift
from pretrain.kernels.triton.settings import DTYPES, interprets_kernels, unsupported_reason
from pretrain.model.dropout import DropoutStream, Site, drop, realized_rate
from pretrain.model.visibility import Visibility


@dataclass(frozen=True, kw_only=True)
class ScoreTerms:
    """What softmax gets besides products of queries and keys: terms of the distance, and sinks.

    For the distance it gets the paper's encodings, or a bias, or nothing.
    """

    position_CNH: Tensor | None = None  # W_R R
    content_bias_NH: Tensor | None = None  # u
    position_bias_NH: Tensor | None = None  # v
    distance_bias_CN: Tensor | None = None
    sinks_N: Tensor | None = None  # a score of each head that joins the softmax and has no value


@dataclass(frozen=True)
class WeightDropout:
    """Dropout of the attention weights of one layer; without a stream nothing is dropped."""

    rate: float
    layer: int
    stream: DropoutStream | None


# From queries [B, L, N, H] and projected keys and values [B, rows, 2, G, H], memory's rows first,
# to what the queries read, [B, L, N, H].
AttentionBackend = Callable[
    [Tensor, Sequence[Tensor], ScoreTerms, Visibility, WeightDropout], Tensor
]


def backend_for(
    kernel: AttentionKernel, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    """Return how a model attends on the device; on a GPU, log the choice once."""
    on_gpu = device.type != "cpu"
    kind, reason = chosen_attention(kernel, model, on_gpu=on_gpu, is_half=dtype in DTYPES)
    if kind is Attention.TILES and interprets_kernels():
        kind = Attention.FUSED
    if kind is Attention.FUSED and (unsupported := unsupported_reason(device)):
        kind, reason = Attention.PLAIN, f"{reason}; not the fused kernel: {unsupported}"
    if on_gpu:
        level = logging.WARNING if kind is Attention.PLAIN else logging.INFO
        log_once(described(kind, reason), level)
    match kind:
        case Attention.TILES:
            return tiled_attention
        case Attention.SDPA:
            return functools.partial(sdpa_attention, is_bitwise=kernel != "atomic")
        case Attention.FUSED:
            return functools.partial(fused_attention, is_bitwise=kernel != "atomic")
        case Attention.PLAIN:
            return plain_attention
        case _:
            assert_never(kind)


def sdpa_attention(
    query_BLNH: Tensor,
    parts: Sequence[Tensor],
    terms: ScoreTerms,
    visibility: Visibility,
    dropout: WeightDropout,
    is_bitwise: bool = True,
) -> Tensor:
    """Attend with torch's kernels: on a GPU FlashAttention, which accepts no tensor as a mask.

    Not `is_bitwise`, torch may take cuDNN's, which are faster on some GPUs.
    """
    from torch.nn.attention.bias import causal_lower_right  # loads Triton's language

    assert all(tensor is None for tensor in vars(terms).values())
    assert not visibility.window
    assert visibility.documents_BC is None
    assert dropout.stream is None or not dropout.rate
    key_BCGH, value_BCGH = _joined(parts).unbind(2)
    N, H = query_BLNH.shape[2:]
    inputs = [tensor.transpose(1, 2) for tensor in (query_BLNH, key_BCGH, value_BCGH)]
    # FlashAttention needs a multiple of 8. If torch padded, the hooks below would be on its slice.
    if H % 8:
        inputs = [pad(tensor, (0, -H % 8)) for tensor in inputs]
    query, key, value = inputs
    grouped, memory = key_BCGH.shape[2] < N, visibility.num_keys - visibility.num_queries
    if not is_bitwise and memory <= visibility.num_queries:
        # cuDNN knows no segment after a memory: memory gets queries, whose results are dropped.
        query = pad(query, (0, 0, memory, 0))
        read_BNCH = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=H**-0.5, enable_gqa=grouped
        )
        return read_BNCH[:, :, memory:, :H].transpose(1, 2)
    mask = causal_lower_right(visibility.num_queries, visibility.num_keys)
    # Memory-efficient attention cannot group queries with this mask; cuDNN sums in varying order.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        read_BNLH = scaled_dot_product_attention(
            query, key, value, mask, scale=H**-0.5, enable_gqa=grouped
        )
    if torch.is_deterministic_algorithms_warn_only_enabled() and read_BNLH.grad_fn is not None:
        # FlashAttention's backward pass sums in a fixed order only without warn_only.
        read_BNLH.grad_fn.register_prehook(lambda _: torch.use_deterministic_algorithms(True))
        read_BNLH.grad_fn.register_hook(
            lambda *_: torch.use_deterministic_algorithms(True, warn_only=True)
        )
    return read_BNLH[..., :H].transpose(1, 2)


def fused_attention(
    query_BLNH: Tensor,
    parts: Sequence[Tensor],
    terms: ScoreTerms,
    visibility: Visibility,
    dropout: WeightDropout,
    is_bitwise: bool = True,
) -> Tensor:
    """Attend with the Triton kernels, which draw their own dropout masks."""
    from pretrain.kernels.triton.attention import fused_relative_attention

    key_BCGH, value_BCGH = _joined(parts).unbind(2)
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
        sinks_N=terms.sinks_N,
        deterministic=is_bitwise,
    )


def tiled_attention(
    query_BLNH: Tensor,
    parts: Sequence[Tensor],
    terms: ScoreTerms,
    visibility: Visibility,
    dropout: WeightDropout,
) -> Tensor:
    """Attend with the CPU's tiles; with the dropout masks of `plain_attention`."""
    keep_NBLC, rate = None, dropout.rate
    if dropout.stream is not None and rate:
        B, L, N, _ = query_BLNH.shape
        shape = (N, B, L, visibility.num_keys)
        keep_NBLC = dropout.stream.keep(shape, rate, Site.ATTENTION, dropout.layer, lane_axis=1)
    return relative_attention(
        query_BLNH,
        parts,
        terms.position_CNH,
        terms.content_bias_NH,
        terms.position_bias_NH,
        distance_bias_CN=terms.distance_bias_CN,
        sinks_N=terms.sinks_N,
        max_distance=visibility.window or None,
        documents_BC=visibility.documents_BC,
        keep_NBLC=keep_NBLC,
        keep_probability=1.0 if keep_NBLC is None else 1.0 - realized_rate(rate),
    )


def plain_attention(
    query_BLNH: Tensor,
    parts: Sequence[Tensor],
    terms: ScoreTerms,
    visibility: Visibility,
    dropout: WeightDropout,
) -> Tensor:
    """Attend with matrix products over all queries and keys, heads first."""
    weights_NBLC, value_NBCH = weights_and_values(query_BLNH, parts, terms, visibility)
    weights_NBLC = drop(
        weights_NBLC, dropout.rate, dropout.stream, Site.ATTENTION, dropout.layer, lane_axis=1
    )
    return torch.matmul(weights_NBLC, value_NBCH).permute(1, 2, 0, 3)


def weights_and_values(
    query_BLNH: Tensor, parts: Sequence[Tensor], terms: ScoreTerms, visibility: Visibility
) -> tuple[Tensor, Tensor]:
    """Return the attention weights [N, B, L, C], without dropout, and the values [N, B, C, H].

    With sinks the weights of a query sum to less than 1.
    """
    query_NBLH = query_BLNH.permute(2, 0, 1, 3).contiguous()
    key_value = torch.cat([part.permute(2, 3, 0, 1, 4) for part in parts], dim=3)
    heads_per_key = len(query_NBLH) // key_value.shape[1]
    if heads_per_key > 1:
        key_value = key_value.repeat_interleave(heads_per_key, dim=1)
    key_NBCH, value_NBCH = key_value.unbind(0)
    scores_NBLC = _scores_NBLC(query_NBLH, key_NBCH, terms).add_(visibility.mask)
    if terms.sinks_N is None:
        return torch.softmax(scores_NBLC, dim=-1), value_NBCH
    sinks_NBL1 = terms.sinks_N[:, None, None, None].expand(*scores_NBLC.shape[:3], 1)
    weights_NBLX = torch.softmax(torch.cat([scores_NBLC, sinks_NBL1], dim=-1), dim=-1)
    return weights_NBLX[..., :-1], value_NBCH


def _scores_NBLC(query_NBLH: Tensor, key_NBCH: Tensor, terms: ScoreTerms) -> Tensor:
    """Return the scores of section 3.3; keys after the query hold leftovers of the shift."""
    scale = 1.0 / math.sqrt(query_NBLH.shape[3])
    key_NBHC = key_NBCH.transpose(2, 3)
    if terms.position_CNH is None:
        scores_NBLC = torch.matmul(query_NBLH * scale, key_NBHC)
        if terms.distance_bias_CN is not None:
            bias_NLC = bias_by_distance_NLC(terms.distance_bias_CN, query_NBLH.shape[2])
            scores_NBLC.add_(bias_NLC[:, None])
        return scores_NBLC
    # (query + bias) * scale in one pass; scaling the scores would take a pass over [N, B, L, C].
    content_NBLH, position_NBLH = (
        torch.add(bias_NH[:, None, None] * scale, query_NBLH, alpha=scale)
        for bias_NH in (terms.content_bias_NH, terms.position_bias_NH)
        if bias_NH is not None
    )
    N, B, L, H = query_NBLH.shape
    C = key_NBCH.shape[2]
    # A zero key in front gives the shift its padding column (X = 1 + C) without a copy; one product
    # per head serves all lanes, since the positions are the same for all.
    padded_NXH = pad(terms.position_CNH.transpose(0, 1), (0, 0, 1, 0))
    position_NYX = torch.bmm(position_NBLH.reshape(N, B * L, H), padded_NXH.transpose(1, 2))
    position_NBLC = relative_shift(position_NYX.view(N * B, L, C + 1)).view(N, B, L, C)
    return torch.matmul(content_NBLH, key_NBHC).add_(position_NBLC)


def bias_by_distance_NLC(distance_bias_CN: Tensor, num_queries: int) -> Tensor:
    """Return the bias of each query and key by distance; leftovers where the key is later."""
    padded_NX = pad(distance_bias_CN.t(), (1, 0))
    return relative_shift(padded_NX[:, None].expand(-1, num_queries, -1).contiguous())


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return keys and values [B, C, 2, G, H]; without memory there is one part, and no copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


@functools.cache
def log_once(text: str, level: int = logging.INFO) -> None:
    """Log how a model computes on a GPU."""
    logging.getLogger(__name__).log(level, "%s", text)
