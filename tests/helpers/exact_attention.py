"""Relative attention pair by pair in float64, from the formula: the reference of the kernels.

B lanes, L queries, M memory rows, C = M + L keys, N heads, G groups of heads that share a key and
value, H head width.
"""

import math

import numpy as np
import torch
from torch import Tensor

WORD = np.uint64(0xFFFFFFFF)


def exact_attention(
    query_BLNH: Tensor,
    key_BCGH: Tensor,
    value_BCGH: Tensor,
    position_CNH: Tensor | None,
    u_NH: Tensor | None,
    v_NH: Tensor | None,
    *,
    distance_bias_CN: Tensor | None = None,
    sinks_N: Tensor | None = None,
    max_distance: int | None = None,
    documents_BC: Tensor | None = None,
    keep_BNLC: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """[B, L, N, H]; each distance is looked up by itself, without a relative shift."""
    _, L, N, H = query_BLNH.shape
    C, G = key_BCGH.shape[1:3]
    key_BCNH = key_BCGH.repeat_interleave(N // G, dim=2)
    value_BCNH = value_BCGH.repeat_interleave(N // G, dim=2)
    distance_LC = torch.arange(C - L, C)[:, None] - torch.arange(C)
    row_LC = (C - 1 - distance_LC).clamp(max=C - 1)
    content_BLNH = query_BLNH if u_NH is None else query_BLNH + u_NH
    scores_BNLC = torch.einsum("blnh,bcnh->bnlc", content_BLNH, key_BCNH)
    if position_CNH is not None:
        assert v_NH is not None
        products_BNLC = torch.einsum("blnh,pnh->bnlp", query_BLNH + v_NH, position_CNH)
        scores_BNLC = scores_BNLC + products_BNLC.gather(3, row_LC.expand_as(products_BNLC))
    scores_BNLC = scores_BNLC / math.sqrt(H)
    if distance_bias_CN is not None:
        scores_BNLC = scores_BNLC + distance_bias_CN[row_LC].permute(2, 0, 1)
    hidden_BNLC = (distance_LC < 0).expand_as(scores_BNLC)
    if max_distance is not None:
        hidden_BNLC = hidden_BNLC | (distance_LC >= max_distance)
    if documents_BC is not None:
        hidden_BNLC = hidden_BNLC | (documents_BC[:, -L:, None] != documents_BC[:, None])[:, None]
    scores_BNLC = scores_BNLC.masked_fill(hidden_BNLC, -math.inf)
    weights_BNLC = scores_BNLC.softmax(-1)
    if sinks_N is not None:  # what is left of the rows' sums when the sink has its part
        sums_BNL1 = scores_BNLC.logsumexp(-1, keepdim=True)
        weights_BNLC = weights_BNLC * torch.sigmoid(sums_BNL1 - sinks_N[:, None, None])
    if keep_BNLC is not None:
        weights_BNLC = weights_BNLC * keep_BNLC / (1.0 - dropout)
    return torch.einsum("bnlc,bcnh->blnh", weights_BNLC, value_BCNH)


def kept_weights(
    keys: list[int], num_heads: int, num_queries: int, num_keys: int, threshold: int
) -> Tensor:
    """[B, N, L, C], 1 where dropout keeps a weight: where its 16 bits reach the threshold.

    `keys` are the lanes' signed integers of 64 bits, as the kernels get them.
    Query bit 3 and key bits 3 and 4 say which of the eight halves of Philox' four words; without
    them query and key are the counter.
    """
    key, head, query, column = np.meshgrid(
        np.array([key % (1 << 64) for key in keys], dtype=np.uint64),
        *(np.arange(size, dtype=np.uint64) for size in (num_heads, num_queries, num_keys)),
        indexing="ij",
    )
    counter = (column - column // 8 % 4 * 8, query - query // 8 % 2 * 8, head, np.zeros_like(head))
    words = np.stack(philox_4x32(counter, (key & WORD, key >> np.uint64(32)), rounds=7))
    word = np.take_along_axis(words, (column // 8 % 4)[None].astype(np.int64), axis=0)[0]
    bits = np.where(query // 8 % 2 == 1, word >> np.uint64(16), word & np.uint64(0xFFFF))
    return torch.from_numpy((bits >= threshold).astype(np.float64))


def philox_4x32(counter: tuple, key: tuple, rounds: int) -> tuple:
    """Philox of Salmon et al. 2011: four words from a counter of four and a key of two."""
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = (np.asarray(word, dtype=np.uint64) for word in key)
    half = np.uint64(32)
    for _ in range(rounds):
        low, high = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (high >> half) ^ c1 ^ k0, high & WORD, (low >> half) ^ c3 ^ k1, low & WORD
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & WORD, (k1 + np.uint64(0xBB67AE85)) & WORD
    return c0, c1, c2, c3
