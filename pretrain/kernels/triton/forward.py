"""The fused forward pass: one program per head, lane and tile of queries.

Each program visits the tiles of keys that its queries see, with an online softmax (Milakov and
Gimelshein 2018; Dao et al. 2022), so scores never leave the chip. Queries, outputs and position
rows are dense [B, L, N, H] and [C, N, H]; keys and values [B, C, G, H] have their own strides.
Scores stay unscaled, so that one fused multiply-add per element applies the scale and subtracts the
maximum. Letters of shapes as in `pretrain.model`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pretrain.kernels.triton.tiles import (
    kept_pairs,
    load_positions,
    load_rows,
    store_rows,
    visible_keys,
    window_of_columns,
)


@triton.jit
def biased_scores(
    scores, distance_biases, queries, keys, num_queries, num_keys, VARIANT: tl.constexpr
):
    """Add the biases of distances; queries and keys broadcast to the tile's shape."""
    if VARIANT.has_distance_bias:
        columns = keys + (num_queries - 1 - queries)
        scores += tl.load(
            distance_biases + columns, mask=(columns >= 0) & (columns < num_keys), other=0.0
        )
    return scores


@triton.jit
def position_tiles(position_query, positions, first, num_keys, VARIANT: tl.constexpr):
    """Return the product tiles before the one of position rows from `first` on.

    The first is the left half of its window, the second becomes part of the next one. If a tile has
    twice as many queries as keys, its lower half lags by one tile of position rows.
    """
    COLUMNS: tl.constexpr = VARIANT.columns
    tile = load_positions(positions, first - COLUMNS, num_keys, VARIANT)
    before = tl.dot(position_query, tl.trans(tile), input_precision=VARIANT.precision)
    if VARIANT.rows == VARIANT.columns:
        return before, before
    tile = load_positions(positions, first - 2 * COLUMNS, num_keys, VARIANT)
    long_before = tl.dot(position_query, tl.trans(tile), input_precision=VARIANT.precision)
    return lower_half_of(long_before, before, VARIANT), before


@triton.jit
def lower_half_of(lower, upper, VARIANT: tl.constexpr):
    """Return the upper half of one tile over the lower half of another, `upper` if square."""
    if VARIANT.rows == VARIANT.columns:
        return upper
    is_upper = tl.arange(0, VARIANT.rows) < VARIANT.columns
    return tl.where(is_upper[:, None], upper, lower)


@triton.jit
def tile_scores(
    content_query, position_query, key_tile, positions, first, left, before, num_keys,
    VARIANT: tl.constexpr,
):  # fmt: skip
    """Return a tile's scores by key, and the product tiles that the next tile of keys reuses.

    `first` is the position row of the tile's "near" product, `left` the left half of its window
    (see `tiles`). Neighboring tiles of keys share a product, so each is computed once.
    """
    ROWS: tl.constexpr = VARIANT.rows
    COLUMNS: tl.constexpr = VARIANT.columns
    PRECISION: tl.constexpr = VARIANT.precision
    if VARIANT.has_position:
        tile = load_positions(positions, first, num_keys, VARIANT)
        near = tl.dot(position_query, tl.trans(tile), input_precision=PRECISION)
        right = lower_half_of(before, near, VARIANT)
        shifts = COLUMNS - 1 - tl.arange(0, ROWS) % COLUMNS
        scores = window_of_columns(left, right, shifts, ROWS, COLUMNS)
        scores = tl.dot(content_query, tl.trans(key_tile), scores, input_precision=PRECISION)
        left = right
        before = near
    else:
        scores = tl.dot(content_query, tl.trans(key_tile), input_precision=PRECISION)
    return scores, left, before


@triton.jit
def _visit_keys(
    first, last, state, content_query, position_query, queries, i0, lowest, highest, dropout_key,
    head, keys, values, positions, distance_biases, L, M,
    IS_MASKED: tl.constexpr, VARIANT: tl.constexpr,
):  # fmt: skip
    """Continue the online softmax over the tiles of keys in [first, last)."""
    ROWS: tl.constexpr = VARIANT.rows
    COLUMNS: tl.constexpr = VARIANT.columns
    PRECISION: tl.constexpr = VARIANT.precision
    output, total, maximum, left, before = state
    num_keys = M + L
    for j0 in range(first, last, COLUMNS):
        columns = j0 + tl.arange(0, COLUMNS)
        key_tile = load_rows(keys, j0, num_keys, VARIANT.key_row, COLUMNS, VARIANT)
        scores, left, before = tile_scores(
            content_query, position_query, key_tile, positions, j0 - i0 + L, left, before, num_keys,
            VARIANT,
        )  # fmt: skip
        scores = biased_scores(
            scores, distance_biases, queries[:, None], columns[None, :], L, num_keys,
            VARIANT,
        )  # fmt: skip
        if IS_MASKED:
            visible = (columns[None, :] >= lowest[:, None]) & (columns[None, :] <= highest[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * VARIANT.scale_log2)
        reference = new_maximum
        if IS_MASKED:
            # A row that has seen no key yet would subtract infinity from infinity.
            reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores * VARIANT.scale_log2 - reference[:, None])
        decay = tl.exp2(maximum - reference)
        maximum = new_maximum
        total = total * decay + tl.sum(weights, 1)
        if VARIANT.drop_threshold:
            a = tl.arange(0, ROWS)[:, None]
            kept = kept_pairs(dropout_key, head, i0, a, j0, tl.arange(0, COLUMNS)[None, :], VARIANT)
            weights = tl.where(kept, weights * VARIANT.keep_scale, 0.0)
        value_tile = load_rows(values, j0, num_keys, VARIANT.value_row, COLUMNS, VARIANT)
        output = output * decay[:, None]
        weights = weights.to(value_tile.dtype)
        output = tl.dot(weights, value_tile, output, input_precision=PRECISION)
    return output, total, maximum, left, before


@triton.jit
def forward_kernel(
    content_queries, position_queries, keys, values, positions, distance_biases,
    first_keys, dropout_keys, sinks, outputs, log_sums, key_lane, value_lane, key_head,
    value_head, L, M, window,
    VARIANT: tl.constexpr,
):  # fmt: skip
    """Write outputs [B, L, N, H] and log_sums [B, N, L], log2 of the softmax's denominators."""
    ROWS: tl.constexpr = VARIANT.rows
    COLUMNS: tl.constexpr = VARIANT.columns
    PADDED: tl.constexpr = VARIANT.padded_width
    ROW: tl.constexpr = VARIANT.num_heads * VARIANT.head_width
    num_tiles = tl.cdiv(L, ROWS)
    lane_head = (tl.program_id(0) // num_tiles).to(tl.int64)
    i0 = (
        num_tiles - 1 - tl.program_id(0) % num_tiles
    ) * ROWS  # the longest rows first: they take longest
    lane = lane_head // VARIANT.num_heads
    head = (lane_head % VARIANT.num_heads).to(tl.int32)
    group = (head // VARIANT.heads_per_group).to(tl.int64)
    num_keys = M + L
    offset = lane * L * ROW + head * VARIANT.head_width

    queries = i0 + tl.arange(0, ROWS)
    exists = queries < L
    content_query = load_rows(content_queries + offset, i0, L, ROW, ROWS, VARIANT)
    first_key = tl.zeros([ROWS], dtype=tl.int32)
    lowest_first = 0
    highest_first = 0
    if VARIANT.has_starts:
        starts = first_keys + lane * L
        first_key = tl.load(starts + queries, mask=exists, other=0)
        lowest_first = tl.load(starts + i0)
        highest_first = tl.load(starts + tl.minimum(i0 + ROWS, L) - 1)
    lowest, highest = visible_keys(queries, first_key, L, M, window)
    dropout_key = tl.zeros([], dtype=tl.int64)
    if VARIANT.drop_threshold:
        dropout_key = tl.load(dropout_keys + lane)

    # Tiles of keys outside [first, last) are hidden from all queries and skipped. Tiles in
    # [whole, ragged) are seen by all queries and need no mask; those before and after need it.
    first = tl.maximum(tl.maximum(i0 + M - window + 1, lowest_first), 0) // COLUMNS * COLUMNS
    last = tl.cdiv(tl.minimum(num_keys, i0 + ROWS + M), COLUMNS) * COLUMNS
    whole = tl.maximum(tl.maximum(i0 + ROWS + M - window, highest_first), 0)
    whole = tl.cdiv(whole, COLUMNS) * COLUMNS
    whole = tl.minimum(tl.maximum(whole, first), last)
    ragged = tl.maximum(tl.minimum(i0 + M + 1, num_keys) // COLUMNS * COLUMNS, whole)

    output = tl.zeros([ROWS, PADDED], dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    maximum = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    if VARIANT.has_sinks:
        # As after a key with the sink's score and a value of zeros.
        maximum = tl.zeros([ROWS], dtype=tl.float32) + tl.load(sinks + head)
        total += 1.0
    position_query = content_query
    left = total
    before = total
    positions += head * VARIANT.head_width
    if VARIANT.has_position:
        position_query = load_rows(position_queries + offset, i0, L, ROW, ROWS, VARIANT)
        left, before = position_tiles(position_query, positions, first - i0 + L, num_keys, VARIANT)
    state = (output, total, maximum, left, before)
    for part in tl.static_range(3):
        begin = first if part == 0 else (whole if part == 1 else ragged)
        end = whole if part == 0 else (ragged if part == 1 else last)
        state = _visit_keys(
            begin, end, state, content_query, position_query, queries, i0, lowest, highest,
            dropout_key, head, keys + lane * key_lane + group * key_head,
            values + lane * value_lane + group * value_head, positions,
            distance_biases + head * num_keys, L, M,
            part != 1, VARIANT,
        )  # fmt: skip
    output, total, maximum, left, before = state
    denominator = tl.where(total == 0.0, 1.0, total)
    store_rows(outputs + offset, i0, L, ROW, output / denominator[:, None], ROWS, VARIANT)
    tl.store(log_sums + lane_head * L + queries, maximum + tl.log2(denominator), mask=exists)
