"""The fused backward pass for queries: one program per head, lane and tile of queries.

It runs first, because it also writes what the other kernels need: `deltas`, the sum over each row
of output times gradient of the output, with which the softmax's gradient needs no second pass.
Weights are computed again from the scores and the forward pass's `log_sums`, since keeping [L, C]
weights would cost more memory traffic than the products. Letters and units as in `forward`.

The gradient of the scores reaches a query through the keys and through the position rows. For the
second it goes back through the skew: the gradient of a tile of position rows is complete once the
tiles of keys on both sides of its window have been visited.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pretrain.kernels.triton.forward import (
    biased_scores,
    lower_half_of,
    position_tiles,
    tile_scores,
)
from pretrain.kernels.triton.tiles import (
    kept_pairs,
    load_positions,
    load_rows,
    store_rows,
    visible_keys,
    window_of_columns,
)


@triton.jit
def _add_position_part(
    query_gradient, left, right, position_query, positions, position_gradients, first, num_keys,
    VARIANT: tl.constexpr,
):  # fmt: skip
    """Add one tile of position rows to the query gradient and, with adds_positions, to their own.

    Every lane and every tile of queries contributes to the same position rows. Programs cannot wait
    for each other, so they add atomically, in float32 and in no fixed order. The alternative
    without atomics, `backward_positions`, computes all scores once more; it serves deterministic
    runs.
    """
    ROWS: tl.constexpr = VARIANT.rows
    COLUMNS: tl.constexpr = VARIANT.columns
    PRECISION: tl.constexpr = VARIANT.precision
    score_gradient = window_of_columns(left, right, tl.arange(0, ROWS) % COLUMNS + 1, ROWS, COLUMNS)
    score_gradient = score_gradient.to(position_query.dtype)
    tile = load_positions(positions, first, num_keys, VARIANT)
    query_gradient = tl.dot(score_gradient, tile, query_gradient, input_precision=PRECISION)
    if VARIANT.adds_positions:
        # Transposed, the product reads both factors from shared memory and needs fewer registers.
        added = tl.dot(tl.trans(position_query), score_gradient, input_precision=PRECISION)
        ROW: tl.constexpr = VARIANT.num_heads * VARIANT.head_width
        r = tl.arange(0, COLUMNS)[None, :]
        d = tl.arange(0, VARIANT.padded_width)[:, None]
        mask = (r < num_keys - first) & (r >= -first) & (d < VARIANT.head_width)
        addresses = position_gradients + first * ROW + (r * ROW + d)
        tl.atomic_add(addresses, added * VARIANT.scale, mask=mask, sem="relaxed")
    return query_gradient


@triton.jit
def query_gradient_kernel(
    content_queries, position_queries, keys, values, positions, key_biases, distance_biases,
    first_keys, dropout_keys, outputs, output_gradients, log_sums, deltas, query_gradients,
    query_sums, position_gradients, key_lane, value_lane, L, M, window,
    VARIANT: tl.constexpr,
):  # fmt: skip
    """Write query_gradients [B, L, N, H], query_sums [B, N, tiles, padded H] and deltas [B, N, L].

    query_sums are the sums of query_gradients over the rows of each tile. With adds_positions the
    gradient of the position rows is added to position_gradients [C, N, H], float32.
    """
    ROWS: tl.constexpr = VARIANT.rows
    COLUMNS: tl.constexpr = VARIANT.columns
    PADDED: tl.constexpr = VARIANT.padded_width
    PRECISION: tl.constexpr = VARIANT.precision
    ROW: tl.constexpr = VARIANT.num_heads * VARIANT.head_width
    num_tiles = tl.cdiv(L, ROWS)
    lane_head = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile_index = (
        num_tiles - 1 - tl.program_id(0) % num_tiles
    )  # the longest rows first: they take longest
    i0 = tile_index * ROWS
    lane = lane_head // VARIANT.num_heads
    head = (lane_head % VARIANT.num_heads).to(tl.int32)
    group = head // VARIANT.heads_per_group
    num_keys = M + L
    offset = lane * L * ROW + head * VARIANT.head_width
    keys += lane * key_lane + group * VARIANT.key_head
    values += lane * value_lane + group * VARIANT.value_head
    positions += head * VARIANT.head_width
    position_gradients += head * VARIANT.head_width
    key_biases += lane_head * num_keys
    distance_biases += head * num_keys

    queries = i0 + tl.arange(0, ROWS)
    exists = queries < L
    output_gradient = load_rows(output_gradients + offset, i0, L, ROW, ROWS, VARIANT)
    output = load_rows(outputs + offset, i0, L, ROW, ROWS, VARIANT)
    delta = tl.sum(output.to(tl.float32) * output_gradient.to(tl.float32), 1)
    tl.store(deltas + lane_head * L + queries, delta, mask=exists)
    log_sum = tl.load(log_sums + lane_head * L + queries, mask=exists, other=0.0)
    content_query = load_rows(content_queries + offset, i0, L, ROW, ROWS, VARIANT)
    first_key = tl.zeros([ROWS], dtype=tl.int32)
    lowest_first = 0
    if VARIANT.has_starts:
        first_key = tl.load(first_keys + lane * L + queries, mask=exists, other=0)
        lowest_first = tl.load(first_keys + lane * L + i0)
    lowest, highest = visible_keys(queries, first_key, L, M, window)
    dropout_key = tl.zeros([], dtype=tl.int64)
    if VARIANT.drop_threshold:
        dropout_key = tl.load(dropout_keys + lane)
    first = tl.maximum(tl.maximum(i0 + M - window + 1, lowest_first), 0) // COLUMNS * COLUMNS
    last = tl.cdiv(tl.minimum(num_keys, i0 + ROWS + M), COLUMNS) * COLUMNS

    query_gradient = tl.zeros([ROWS, PADDED], dtype=tl.float32)
    position_query = content_query
    left = delta
    before = delta
    if VARIANT.has_position:
        position_query = load_rows(position_queries + offset, i0, L, ROW, ROWS, VARIANT)
        left, before = position_tiles(position_query, positions, first - i0 + L, num_keys, VARIANT)
        gradient_left = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        gradient_before = gradient_left
    for j0 in range(first, last, COLUMNS):
        columns = j0 + tl.arange(0, COLUMNS)
        key_tile = load_rows(keys, j0, num_keys, VARIANT.key_row, COLUMNS, VARIANT)
        scores, left, before = tile_scores(
            content_query, position_query, key_tile, positions, j0 - i0 + L, left, before, num_keys,
            VARIANT,
        )  # fmt: skip
        scores = biased_scores(
            scores, key_biases, distance_biases, queries[:, None], columns[None, :], L, num_keys,
            VARIANT,
        )  # fmt: skip
        visible = (columns[None, :] >= lowest[:, None]) & (columns[None, :] <= highest[:, None])
        weights = tl.where(visible, tl.exp2(scores * VARIANT.scale_log2 - log_sum[:, None]), 0.0)
        value_tile = load_rows(values, j0, num_keys, VARIANT.value_row, COLUMNS, VARIANT)
        weight_gradient = tl.dot(output_gradient, tl.trans(value_tile), input_precision=PRECISION)
        if VARIANT.drop_threshold:
            a = tl.arange(0, ROWS)[:, None]
            kept = kept_pairs(dropout_key, head, i0, a, j0, tl.arange(0, COLUMNS)[None, :], VARIANT)
            weight_gradient = tl.where(kept, weight_gradient * VARIANT.keep_scale, 0.0)
        score_gradient = weights * (weight_gradient - delta[:, None])
        rounded = score_gradient.to(key_tile.dtype)
        query_gradient = tl.dot(rounded, key_tile, query_gradient, input_precision=PRECISION)
        if VARIANT.has_position:
            # With twice as many queries as keys the upper half is one tile ahead of the lower one.
            gradient_right = score_gradient
            if ROWS != COLUMNS:
                gradient_right = lower_half_of(score_gradient, gradient_before, VARIANT)
            query_gradient = _add_position_part(
                query_gradient, gradient_left, gradient_right, position_query, positions,
                position_gradients, j0 - i0 + L - ROWS, num_keys, VARIANT,
            )  # fmt: skip
            gradient_left = gradient_right
            gradient_before = score_gradient
    if VARIANT.has_position:
        nothing = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        row0 = tl.maximum(last, first) - i0 + L - ROWS
        if ROWS != COLUMNS:
            gradient_right = lower_half_of(nothing, gradient_before, VARIANT)
            query_gradient = _add_position_part(
                query_gradient, gradient_left, gradient_right, position_query, positions,
                position_gradients, row0, num_keys, VARIANT,
            )  # fmt: skip
            gradient_left = gradient_right
            row0 += COLUMNS
        query_gradient = _add_position_part(
            query_gradient, gradient_left, nothing, position_query, positions, position_gradients,
            row0, num_keys, VARIANT,
        )  # fmt: skip
    query_gradient *= VARIANT.scale
    store_rows(query_gradients + offset, i0, L, ROW, query_gradient, ROWS, VARIANT)
    sums = query_sums + (lane_head * num_tiles + tile_index) * PADDED + tl.arange(0, PADDED)
    tl.store(sums, tl.sum(query_gradient, 0))
