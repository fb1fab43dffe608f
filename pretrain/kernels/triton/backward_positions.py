"""The fused backward pass for position rows: a program per head, tile and share of the lanes.

Without atomic additions, it serves deterministic runs and learned biases per distance. Here the
tile of position rows is fixed and the queries vary, so the keys need the skew: query i meets
position row p at key p - (L - 1) + i. A tile of T position rows p0 + c and queries i0 + a needs two
neighboring tiles of keys, 2T keys from p0 - (L - 1) + i0 on, of which row c and query a need number
c + a. Everything is transposed, [position rows, queries]. Letters and units as in `forward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pretrain.kernels.triton.forward import biased_scores
from pretrain.kernels.triton.tiles import (
    kept_pairs,
    load_positions,
    load_rows,
    load_rows_around,
    store_rows,
    visible_keys,
    window_of_rows,
)


@triton.jit
def _skewed_product(pointer, first, row_stride, num_rows, query, VARIANT: tl.constexpr):
    """Return keys (or values) times queries, [position rows, queries]."""
    ROWS: tl.constexpr = VARIANT.rows
    COLUMNS: tl.constexpr = VARIANT.columns
    tile = load_rows_around(pointer, first, num_rows, row_stride, COLUMNS, VARIANT)
    upper = tl.dot(tile, query, input_precision=VARIANT.precision)
    tile = load_rows_around(pointer, first + COLUMNS, num_rows, row_stride, COLUMNS, VARIANT)
    lower = tl.dot(tile, query, input_precision=VARIANT.precision)
    return window_of_rows(upper, lower, tl.arange(0, ROWS), COLUMNS, ROWS)


@triton.jit
def _score_gradient(
    p0, i0, lane_head, head, position_tile, position_query, content_query, output_gradient,
    first_key, keys, values, key_biases, distance_biases, dropout_key, log_sums, deltas, L, M,
    window,
    VARIANT: tl.constexpr,
):  # fmt: skip
    """Return the gradient of the scores of position rows p0 + c and queries i0 + a."""
    num_keys = M + L
    queries = i0 + tl.arange(0, VARIANT.rows)
    exists = queries < L
    j0 = p0 - (L - 1) + i0
    scores = _skewed_product(keys, j0, VARIANT.key_row, num_keys, tl.trans(content_query), VARIANT)
    if VARIANT.has_position:
        scores = tl.dot(
            position_tile, tl.trans(position_query), scores, input_precision=VARIANT.precision
        )
    columns = j0 + tl.arange(0, VARIANT.columns)[:, None] + tl.arange(0, VARIANT.rows)[None, :]
    scores = biased_scores(
        scores, key_biases + lane_head * num_keys, distance_biases + head * num_keys,
        queries[None, :], columns, L, num_keys, VARIANT,
    )  # fmt: skip
    log_sum = tl.load(log_sums + lane_head * L + queries, mask=exists, other=0.0)
    lowest, highest = visible_keys(queries, first_key, L, M, window)
    visible = (columns >= lowest[None, :]) & (columns <= highest[None, :])
    weights = tl.where(visible, tl.exp2(scores * VARIANT.scale_log2 - log_sum[None, :]), 0.0)
    weight_gradient = _skewed_product(
        values, j0, VARIANT.value_row, num_keys, tl.trans(output_gradient), VARIANT
    )
    if VARIANT.drop_threshold:
        rows = tl.arange(0, VARIANT.rows)[None, :]
        kept = kept_pairs(dropout_key, head, i0, rows, 0, columns, VARIANT)
        weight_gradient = tl.where(kept, weight_gradient * VARIANT.keep_scale, 0.0)
    delta = tl.load(deltas + lane_head * L + queries, mask=exists, other=0.0)
    return weights * (weight_gradient - delta[None, :])


@triton.jit
def position_gradient_kernel(
    content_queries, position_queries, keys, values, positions, key_biases, distance_biases,
    first_keys, dropout_keys, output_gradients, log_sums, deltas, position_gradients,
    distance_bias_gradients, key_lane, value_lane, B, L, M, window, num_shares,
    VARIANT: tl.constexpr,
):  # fmt: skip
    """Write position_gradients [X, C, N, H] and distance_bias_gradients [X, N, C] of X shares.

    Both are float32. Each share of the lanes has its own part; the caller adds them in order.
    """
    ROWS: tl.constexpr = VARIANT.rows
    COLUMNS: tl.constexpr = VARIANT.columns
    PADDED: tl.constexpr = VARIANT.padded_width
    ROW: tl.constexpr = VARIANT.num_heads * VARIANT.head_width
    num_keys = M + L
    num_tiles = tl.cdiv(num_keys, COLUMNS)
    p0 = tl.program_id(0) % num_tiles * COLUMNS
    head = tl.program_id(0) // num_tiles % VARIANT.num_heads
    share = tl.program_id(0) // (num_tiles * VARIANT.num_heads)
    group = head // VARIANT.heads_per_group
    rows = p0 + tl.arange(0, COLUMNS)
    position_tile = load_positions(positions + head * VARIANT.head_width, p0, num_keys, VARIANT)
    position_gradient = tl.zeros([COLUMNS, PADDED], dtype=tl.float32)
    bias_gradient = tl.zeros([COLUMNS], dtype=tl.float32)
    first_lane = share * B // num_shares
    num_lanes = (share + 1) * B // num_shares - first_lane
    if p0 + COLUMNS <= num_keys - window:
        num_lanes = 0  # no query sees any row of the tile: all are too far away
    # Query i meets this tile's last row at key 0 when i = L - 1 - (p0 + COLUMNS - 1); queries
    # before meet none.
    first = tl.maximum(L - p0 - COLUMNS, 0) // ROWS * ROWS
    steps_per_lane = tl.cdiv(L - first, ROWS)
    for step in range(num_lanes * steps_per_lane):
        lane = (first_lane + step // steps_per_lane).to(tl.int64)
        lane_head = lane * VARIANT.num_heads + head
        i0 = first + step % steps_per_lane * ROWS
        queries = i0 + tl.arange(0, ROWS)
        exists = queries < L
        first_key = tl.zeros([ROWS], dtype=tl.int32)
        is_seen = True
        if VARIANT.has_starts:
            first_key = tl.load(first_keys + lane * L + queries, mask=exists, other=0)
            farthest = tl.max(tl.where(exists, queries + M - first_key, -1), 0)
            is_seen = farthest >= num_keys - p0 - COLUMNS  # the distance of the tile's last row
        if is_seen:
            offset = lane * L * ROW + head * VARIANT.head_width
            content_query = load_rows(content_queries + offset, i0, L, ROW, ROWS, VARIANT)
            position_query = content_query
            if VARIANT.has_position:
                position_query = load_rows(position_queries + offset, i0, L, ROW, ROWS, VARIANT)
            output_gradient = load_rows(output_gradients + offset, i0, L, ROW, ROWS, VARIANT)
            dropout_key = tl.zeros([], dtype=tl.int64)
            if VARIANT.drop_threshold:
                dropout_key = tl.load(dropout_keys + lane)
            score_gradient = _score_gradient(
                p0, i0, lane_head, head, position_tile, position_query, content_query,
                output_gradient, first_key, keys + lane * key_lane + group * VARIANT.key_head,
                values + lane * value_lane + group * VARIANT.value_head, key_biases,
                distance_biases, dropout_key, log_sums, deltas, L, M, window, VARIANT,
            )  # fmt: skip
            if VARIANT.has_distance_bias:
                bias_gradient += tl.sum(score_gradient, 1)
            if VARIANT.has_position:
                position_gradient = tl.dot(
                    score_gradient.to(position_query.dtype), position_query, position_gradient,
                    input_precision=VARIANT.precision,
                )  # fmt: skip
    if VARIANT.has_position:
        out = position_gradients + share.to(tl.int64) * num_keys * ROW + head * VARIANT.head_width
        store_rows(out, p0, num_keys, ROW, position_gradient * VARIANT.scale, COLUMNS, VARIANT)
    if VARIANT.has_distance_bias:
        out = distance_bias_gradients + (share * VARIANT.num_heads + head) * num_keys
        tl.store(out + rows, bias_gradient, mask=rows < num_keys)
