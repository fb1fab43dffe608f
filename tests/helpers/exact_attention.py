"""Relative attention pair by pair in float64, from the formula: what the fused kernel is compared with.

B lanes, L queries, M memory rows, K = M + L keys, H heads, G groups of heads that share a key and value, D head width.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

WORD = np.uint64(0xFFFFFFFF)


def exact_attention(
    query_BLHD: Tensor,
    key_BKGD: Tensor,
    value_BKGD: Tensor,
    position_KHD: Tensor | None,
    u_HD: Tensor | None,
    v_HD: Tensor | None,
    *,
    key_bias_BHK: Tensor | None = None,
    distance_bias_KH: Tensor | None = None,
    max_distance: int | None = None,
    documents_BK: Tensor | None = None,
    keep_BHLK: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """[B, L, H, D]; each distance is looked up by itself, without a relative shift."""
    _, L, H, D = query_BLHD.shape
    K, G = key_BKGD.shape[1:3]
    key_BKHD = key_BKGD.repeat_interleave(H // G, dim=2)
    value_BKHD = value_BKGD.repeat_interleave(H // G, dim=2)
    distance_LK = torch.arange(K - L, K)[:, None] - torch.arange(K)
    row_LK = (K - 1 - distance_LK).clamp(max=K - 1)
    content_BLHD = query_BLHD if u_HD is None else query_BLHD + u_HD
    scores_BHLK = torch.einsum("blhd,bkhd->bhlk", content_BLHD, key_BKHD)
    if position_KHD is not None:
        assert v_HD is not None
        products_BHLK = torch.einsum("blhd,phd->bhlp", query_BLHD + v_HD, position_KHD)
        scores_BHLK = scores_BHLK + products_BHLK.gather(3, row_LK.expand_as(products_BHLK))
    scores_BHLK = scores_BHLK / math.sqrt(D)
    if key_bias_BHK is not None:
        scores_BHLK = scores_BHLK + key_bias_BHK[:, :, None]
    if distance_bias_KH is not None:
        scores_BHLK = scores_BHLK + distance_bias_KH[row_LK].permute(2, 0, 1)
    hidden_BHLK = (distance_LK < 0).expand_as(scores_BHLK)
    if max_distance is not None:
        hidden_BHLK = hidden_BHLK | (distance_LK >= max_distance)
    if documents_BK is not None:
        hidden_BHLK = hidden_BHLK | (documents_BK[:, -L:, None] != documents_BK[:, None])[:, None]
    weights_BHLK = scores_BHLK.masked_fill(hidden_BHLK, -math.inf).softmax(-1)
    if keep_BHLK is not None:
        weights_BHLK = weights_BHLK * keep_BHLK / (1.0 - dropout)
    return torch.einsum("bhlk,bkhd->blhd", weights_BHLK, value_BKHD)


def kept_weights(
    keys: list[int], num_heads: int, num_queries: int, num_keys: int, threshold: int
) -> Tensor:
    """[B, H, L, K], 1 where dropout keeps a weight: where its 16 bits reach the threshold.

    Query bit 3 and key bits 3 and 4 say which of the eight halves of Philox' four words; without them query and key are
    the counter.
    """
    key, head, query, column = np.meshgrid(
        np.array(keys, dtype=np.uint64),
        *(np.arange(size, dtype=np.uint64) for size in (num_heads, num_queries, num_keys)),
        indexing="ij",
    )
    counter = (column - column // 8 % 4 * 8, query - query // 8 % 2 * 8, head, np.zeros_like(head))
    words = np.stack(philox_4x32(counter, (key & WORD, key >> np.uint64(32)), rounds=7))
    word = np.take_along_axis(words, (column // 8 % 4)[None].astype(np.int64), axis=0)[0]
    bits = np.where(query // 8 % 2 == 1, word >> np.uint64(16), word & np.uint64(0xFFFF))
    return torch.from_numpy((bits >= threshold).astype(np.float64))


def philox_4x32(counter: tuple, key: tuple, rounds: int) -> tuple:
    """Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3": four words from four and a key of two."""
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = (np.asarray(word, dtype=np.uint64) for word in key)
    half = np.uint64(32)
    for _ in range(rounds):
        low, high = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (high >> half) ^ c1 ^ k0, high & WORD, (low >> half) ^ c3 ^ k1, low & WORD
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & WORD, (k1 + np.uint64(0xBB67AE85)) & WORD
    return c0, c1, c2, c3
