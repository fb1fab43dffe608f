"""The fused kernels of attention, forward and backward.

Forward: one program per head, lane and tile of queries. Each visits the tiles of keys that its
queries see, with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022), so scores never
leave the chip. Queries, outputs and position rows are dense [B, L, N, H] and [C, N, H]; keys and
values [B, C, G, H] have their own strides. Scores stay unscaled, so that one fused multiply-add per
element applies the scale and subtracts the maximum. Letters of shapes as in `pretrain.model`.

Backward, keys and values: one program per key head, lane and tile of keys. It visits the tiles of
queries that see its keys, so sums stay in registers and no atomic additions are needed. Programs of
keys that the most queries see start first, over all heads, so that no long program runs last. If
there are too few programs for the device, each head of a group gets its own (`heads_per_program`),
and the group's gradients are summed afterwards. Tiles are transposed, [keys, queries], so that
weights and their gradients enter the products from registers. Weights are computed again from the
scores and the forward pass's `log_sums`; to keep them would take [L, C] memory in every layer. The
gradients of the scores go into a workspace, for some heads at a time. The kernels of queries and
position rows read them there.

Backward, position rows: one program per head and tile of position rows. It sums the workspace's
score gradients over lanes and queries, in a fixed order, so it needs only one product per tile. It
also sums the gradients of learned biases per distance.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pretrain.kernels.triton.tiles import (
    kept_pairs,
    load_positions,
    load_rows,
    load_shifted,
    score_matrix,
    store_rows,
    visible_keys,
    window_of_columns,
    window_of_rows,
)
from pretrain.kernels.triton.tiling import CHUNK


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
    """Return the two product tiles before the one of position rows from `first` on.

    The first result is the left half of the first window, the second goes into the next window. If
    a tile has two queries per key, its lower half is one tile of position rows behind.
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

    `first` is the first position row of the tile's "near" product, `left` the left half of its
    window (see `tiles`). Neighboring tiles of keys share a product, which is computed once.
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
            # For a row that has seen no key yet, -inf - (-inf) would give NaN.
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
    # Programs start in order. The last queries see the most keys, so they come first, and no long
    # program runs alone at the end.
    i0 = (num_tiles - 1 - tl.program_id(0) % num_tiles) * ROWS
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

    # Skip tiles of keys outside [first, last), which no query sees. All queries see the tiles in
    # [whole, ragged) completely: only the tiles before and after those need a mask.
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
        # The state after one key with the sink's score and a value of zeros.
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


@triton.jit(do_not_specialize=CHUNK)
def key_gradient_kernel(
    content_queries, position_queries, keys, values, positions, distance_biases,
    first_keys, dropout_keys, query_ends, output_gradients, log_sums, deltas, key_gradients,
    value_gradients, score_sums, score_gradients, key_lane, value_lane, key_head, value_head,
    L, M, window, score_row, first_lane, first_group, chunk_groups,
    VARIANT: tl.constexpr,
):  # fmt: skip
    """Write the gradients of keys and values [B, C, G, H], and score_sums [B, N, C].

    score_sums are each key's score gradients, summed over the queries. A program has all heads of a
    group or one; with one, the gradients have a row for each head, [B, C, N, H].
    """
    ROWS: tl.constexpr = VARIANT.rows
    COLUMNS: tl.constexpr = VARIANT.columns
    PADDED: tl.constexpr = VARIANT.padded_width
    PRECISION: tl.constexpr = VARIANT.precision
    ROW: tl.constexpr = VARIANT.num_heads * VARIANT.head_width
    num_keys = M + L
    num_tiles = tl.cdiv(num_keys, COLUMNS)
    HEADS: tl.constexpr = VARIANT.heads_per_program
    PARTS: tl.constexpr = VARIANT.heads_per_group // HEADS
    num_parts = tl.num_programs(0) // num_tiles
    j0 = tl.program_id(0) // num_parts * COLUMNS
    chunk_part = tl.program_id(0) % num_parts
    lane = (first_lane + chunk_part // (chunk_groups * PARTS)).to(tl.int64)
    part = first_group * PARTS + chunk_part % (chunk_groups * PARTS)
    group = (part // PARTS).to(tl.int64)
    columns = j0 + tl.arange(0, COLUMNS)
    exists = columns < num_keys
    of_head = keys + lane * key_lane + group * key_head
    key_tile = load_rows(of_head, j0, num_keys, VARIANT.key_row, COLUMNS, VARIANT)
    of_head = values + lane * value_lane + group * value_head
    value_tile = load_rows(of_head, j0, num_keys, VARIANT.value_row, COLUMNS, VARIANT)
    dropout_key = tl.zeros([], dtype=tl.int64)
    if VARIANT.drop_threshold:
        dropout_key = tl.load(dropout_keys + lane)
    # Queries before `first` see no key of the tile: all come later. Queries from `last` on are
    # beyond the window or in another document.
    first = tl.maximum(j0 - M, 0) // ROWS * ROWS
    last = tl.minimum(L, j0 + COLUMNS - 1 + window - M)
    if VARIANT.has_starts:
        last_key = tl.minimum(j0 + COLUMNS, num_keys) - 1
        last = tl.minimum(last, tl.load(query_ends + lane * num_keys + last_key))
    key_gradient = tl.zeros([COLUMNS, PADDED], dtype=tl.float32)
    value_gradient = tl.zeros([COLUMNS, PADDED], dtype=tl.float32)
    for member in range(HEADS):
        head = part * HEADS + member
        lane_head = lane * VARIANT.num_heads + head
        offset = lane * L * ROW + head * VARIANT.head_width
        score_sum = tl.zeros([COLUMNS], dtype=tl.float32)
        matrix = score_matrix(score_gradients, chunk_part * HEADS + member, L, score_row)
        for i0 in range(first, last, ROWS):
            queries = i0 + tl.arange(0, ROWS)
            in_segment = queries < L
            content_query = load_rows(content_queries + offset, i0, L, ROW, ROWS, VARIANT)
            if VARIANT.has_position:
                position_query = load_rows(position_queries + offset, i0, L, ROW, ROWS, VARIANT)
                position_query = tl.trans(position_query)
                of_head = positions + head * VARIANT.head_width
                row0 = j0 - i0 + L
                tile = load_positions(of_head, row0 - COLUMNS, num_keys, VARIANT)
                far = tl.dot(tile, position_query, input_precision=PRECISION)
                tile = load_positions(of_head, row0, num_keys, VARIANT)
                near = tl.dot(tile, position_query, input_precision=PRECISION)
                shifts = COLUMNS - 1 - tl.arange(0, ROWS)
                scores = window_of_rows(far, near, shifts, COLUMNS, ROWS)
                content_query_t = tl.trans(content_query)
                scores = tl.dot(key_tile, content_query_t, scores, input_precision=PRECISION)
            else:
                scores = tl.dot(key_tile, tl.trans(content_query), input_precision=PRECISION)
            scores = biased_scores(
                scores, distance_biases + head * num_keys, queries[None, :], columns[:, None],
                L, num_keys, VARIANT,
            )  # fmt: skip
            log_sum = tl.load(log_sums + lane_head * L + queries, mask=in_segment, other=0.0)
            first_key = tl.zeros([ROWS], dtype=tl.int32)
            if VARIANT.has_starts:
                first_key = tl.load(first_keys + lane * L + queries, mask=in_segment, other=0)
            lowest, highest = visible_keys(queries, first_key, L, M, window)
            visible = (columns[:, None] >= lowest[None, :]) & (columns[:, None] <= highest[None, :])
            weights = tl.exp2(scores * VARIANT.scale_log2 - log_sum[None, :])
            weights = tl.where(visible, weights, 0.0)
            output_gradient = load_rows(output_gradients + offset, i0, L, ROW, ROWS, VARIANT)
            output_gradient_t = tl.trans(output_gradient)
            weight_gradient = tl.dot(value_tile, output_gradient_t, input_precision=PRECISION)
            kept_weights = weights
            if VARIANT.drop_threshold:
                a = tl.arange(0, ROWS)[None, :]
                b = tl.arange(0, COLUMNS)[:, None]
                kept = kept_pairs(dropout_key, head, i0, a, j0, b, VARIANT)
                kept_weights = tl.where(kept, weights * VARIANT.keep_scale, 0.0)
                weight_gradient = tl.where(kept, weight_gradient * VARIANT.keep_scale, 0.0)
            value_gradient = tl.dot(
                kept_weights.to(output_gradient.dtype), output_gradient, value_gradient,
                input_precision=PRECISION,
            )  # fmt: skip
            delta = tl.load(deltas + lane_head * L + queries, mask=in_segment, other=0.0)
            score_gradient = weights * (weight_gradient - delta[None, :])
            score_sum += tl.sum(score_gradient, 1)
            score_gradient = score_gradient.to(content_query.dtype)
            key_gradient = tl.dot(
                score_gradient, content_query, key_gradient, input_precision=PRECISION
            )
            tl.store(
                matrix + tl.cast(i0, tl.int64) * score_row + j0
                + (tl.arange(0, ROWS)[:, None] * score_row + tl.arange(0, COLUMNS)[None, :]),
                tl.trans(score_gradient), mask=in_segment[:, None],
            )  # fmt: skip
        if VARIANT.has_position:
            tl.store(score_sums + lane_head * num_keys + columns, score_sum, mask=exists)
    KEY_ROW: tl.constexpr = VARIANT.num_groups * PARTS * VARIANT.head_width
    offset = lane * num_keys * KEY_ROW + part * VARIANT.head_width
    key_gradient *= VARIANT.scale
    store_rows(key_gradients + offset, j0, num_keys, KEY_ROW, key_gradient, COLUMNS, VARIANT)
    store_rows(value_gradients + offset, j0, num_keys, KEY_ROW, value_gradient, COLUMNS, VARIANT)


@triton.jit
def content_bias_kernel(
    keys, score_sums, content_sums, key_lane, key_head, num_keys, VARIANT: tl.constexpr
):
    """Write content_sums [B, N, tiles, padded H], each tile's part of the gradient of u.

    That is the sum of the tile's keys, weighted with score_sums. It costs another read of the keys;
    in `key_gradient_kernel` the sum would occupy registers during the whole loop.
    """
    COLUMNS: tl.constexpr = VARIANT.columns
    PADDED: tl.constexpr = VARIANT.padded_width
    num_tiles = tl.cdiv(num_keys, COLUMNS)
    tile_index = tl.program_id(0) % num_tiles
    lane_head = (tl.program_id(0) // num_tiles).to(tl.int64)
    group = lane_head % VARIANT.num_heads // VARIANT.heads_per_group
    j0 = tile_index * COLUMNS
    columns = j0 + tl.arange(0, COLUMNS)
    keys += lane_head // VARIANT.num_heads * key_lane + group * key_head
    tile = load_rows(keys, j0, num_keys, VARIANT.key_row, COLUMNS, VARIANT)
    score_sums += lane_head * num_keys
    score_sum = tl.load(score_sums + columns, mask=columns < num_keys, other=0.0)
    total = tl.sum(score_sum[:, None] * tile.to(tl.float32), 0) * VARIANT.scale
    content_sums += (lane_head * num_tiles + tile_index) * PADDED
    tl.store(content_sums + tl.arange(0, PADDED), total)


@triton.jit(do_not_specialize=CHUNK)
def position_gradient_kernel(
    content_queries, position_queries, keys, values, positions, distance_biases,
    first_keys, dropout_keys, score_gradients, position_gradients, distance_bias_gradients,
    key_lane, value_lane, key_head, value_head, L, M, window, score_row, first_lane, first_group,
    chunk_groups, chunk_lanes,
    VARIANT: tl.constexpr,
):  # fmt: skip
    """Add to position_gradients [C, N, H] and distance_bias_gradients [N, C], both float32."""
    ROWS: tl.constexpr = VARIANT.rows
    COLUMNS: tl.constexpr = VARIANT.columns
    PADDED: tl.constexpr = VARIANT.padded_width
    ROW: tl.constexpr = VARIANT.num_heads * VARIANT.head_width
    num_keys = M + L
    num_tiles = tl.cdiv(num_keys, COLUMNS)
    p0 = tl.program_id(0) % num_tiles * COLUMNS
    chunk_heads = chunk_groups * VARIANT.heads_per_group
    chunk_head = tl.program_id(0) // num_tiles
    head = first_group * VARIANT.heads_per_group + chunk_head
    rows = p0 + tl.arange(0, COLUMNS)
    exists = rows < num_keys
    position_gradient = tl.zeros([COLUMNS, PADDED], dtype=tl.float32)
    bias_gradient = tl.zeros([COLUMNS], dtype=tl.float32)
    # If the window hides all rows of this tile, there is nothing to sum.
    num_lanes = tl.where(p0 + COLUMNS <= num_keys - window, 0, chunk_lanes)
    # Query i uses this tile's last row for key 0 if i = L - 1 - (p0 + COLUMNS - 1). Earlier queries
    # use no row of the tile.
    first = tl.maximum(L - p0 - COLUMNS, 0) // ROWS * ROWS
    steps_per_lane = tl.cdiv(L - first, ROWS)
    for step in range(num_lanes * steps_per_lane):
        chunk_lane = step // steps_per_lane
        lane = (first_lane + chunk_lane).to(tl.int64)
        i0 = first + step % steps_per_lane * ROWS
        queries = i0 + tl.arange(0, ROWS)
        first_key = tl.zeros([ROWS], dtype=tl.int32)
        is_seen = True
        if VARIANT.has_starts:
            in_segment = queries < L
            first_key = tl.load(first_keys + lane * L + queries, mask=in_segment, other=0)
            farthest = tl.max(tl.where(in_segment, queries + M - first_key, -1), 0)
            is_seen = farthest >= num_keys - p0 - COLUMNS  # the distance of the tile's last row
        if is_seen:
            lowest, highest = visible_keys(queries, first_key, L, M, window)
            matrix = score_matrix(
                score_gradients, chunk_lane * chunk_heads + chunk_head, L, score_row
            )
            score_gradient = load_shifted(matrix, i0, p0, lowest, highest, L, score_row, VARIANT)
            if VARIANT.has_distance_bias:
                bias_gradient += tl.sum(score_gradient.to(tl.float32), 0)
            if VARIANT.has_position:
                offset = lane * L * ROW + head * VARIANT.head_width
                position_query = load_rows(position_queries + offset, i0, L, ROW, ROWS, VARIANT)
                position_gradient = tl.dot(
                    tl.trans(score_gradient), position_query, position_gradient,
                    input_precision=VARIANT.precision,
                )  # fmt: skip
    if VARIANT.has_position:
        d = tl.arange(0, PADDED)[None, :]
        mask = exists[:, None] & (d < VARIANT.head_width)
        out = (
            position_gradients + head * VARIANT.head_width + (rows[:, None].to(tl.int64) * ROW + d)
        )
        before = tl.load(out, mask=mask, other=0.0)
        tl.store(out, before + position_gradient * VARIANT.scale, mask=mask)
    if VARIANT.has_distance_bias:
        out = distance_bias_gradients + head * num_keys + rows
        before = tl.load(out, mask=exists, other=0.0)
        tl.store(out, before + bias_gradient, mask=exists)


@triton.jit
def delta_kernel(outputs, output_gradients, deltas, L, VARIANT: tl.constexpr):
    """Write deltas [B, N, L]: each query's sum over H of output times gradient of the output.

    It equals the sum of weights times their gradients that the softmax's gradient needs, and so
    spares a pass over the keys.
    """
    ROWS: tl.constexpr = VARIANT.rows
    ROW: tl.constexpr = VARIANT.num_heads * VARIANT.head_width
    num_tiles = tl.cdiv(L, ROWS)
    lane_head = (tl.program_id(0) // num_tiles).to(tl.int64)
    i0 = tl.program_id(0) % num_tiles * ROWS
    lane = lane_head // VARIANT.num_heads
    offset = lane * L * ROW + lane_head % VARIANT.num_heads * VARIANT.head_width
    output = load_rows(outputs + offset, i0, L, ROW, ROWS, VARIANT).to(tl.float32)
    gradient = load_rows(output_gradients + offset, i0, L, ROW, ROWS, VARIANT).to(tl.float32)
    queries = i0 + tl.arange(0, ROWS)
    tl.store(deltas + lane_head * L + queries, tl.sum(output * gradient, 1), mask=queries < L)


@triton.jit
def _add_position_part(
    query_gradient, matrix, i0, first, lowest, highest, position_queries, positions,
    position_gradients, L, num_keys, score_row,
    VARIANT: tl.constexpr,
):  # fmt: skip
    """Add the part of a tile of position rows, from `first` on, to the query gradient.

    With adds_positions also add to the gradient of the position rows. Programs of all lanes and
    tiles of queries add to the same rows and cannot wait for each other, so additions are atomic
    and in no fixed order. `position_gradient_kernel` is the deterministic alternative.
    """
    ROW: tl.constexpr = VARIANT.num_heads * VARIANT.head_width
    score_gradient = load_shifted(matrix, i0, first, lowest, highest, L, score_row, VARIANT)
    tile = load_positions(positions, first, num_keys, VARIANT)
    query_gradient = tl.dot(score_gradient, tile, query_gradient, input_precision=VARIANT.precision)
    if VARIANT.adds_positions:
        position_query = load_rows(position_queries, i0, L, ROW, VARIANT.rows, VARIANT)
        added = tl.dot(tl.trans(position_query), score_gradient, input_precision=VARIANT.precision)
        r = tl.arange(0, VARIANT.columns)[None, :]
        d = tl.arange(0, VARIANT.padded_width)[:, None]
        mask = (r < num_keys - first) & (r >= -first) & (d < VARIANT.head_width)
        addresses = position_gradients + tl.cast(first, tl.int64) * ROW + (r * ROW + d)
        tl.atomic_add(addresses, added * VARIANT.scale, mask=mask, sem="relaxed")
    return query_gradient


@triton.jit(do_not_specialize=CHUNK)
def query_gradient_kernel(
    content_queries, position_queries, keys, values, positions, distance_biases,
    first_keys, dropout_keys, score_gradients, query_gradients, query_sums, position_gradients,
    key_lane, value_lane, key_head, value_head, L, M, window, score_row, first_lane, first_group,
    chunk_groups,
    VARIANT: tl.constexpr,
):  # fmt: skip
    """Write query_gradients [B, L, N, H] and query_sums [B, N, tiles, padded H].

    query_sums are the sums of query_gradients over the rows of each tile. With adds_positions the
    gradient of the position rows is added to position_gradients [C, N, H], float32.
    """
    ROWS: tl.constexpr = VARIANT.rows
    COLUMNS: tl.constexpr = VARIANT.columns
    PADDED: tl.constexpr = VARIANT.padded_width
    ROW: tl.constexpr = VARIANT.num_heads * VARIANT.head_width
    num_tiles = tl.cdiv(L, ROWS)
    chunk_heads = chunk_groups * VARIANT.heads_per_group
    chunk_head = tl.program_id(0) // num_tiles
    tile_index = num_tiles - 1 - tl.program_id(0) % num_tiles  # the longest programs first
    i0 = tile_index * ROWS
    lane = (first_lane + chunk_head // chunk_heads).to(tl.int64)
    head = first_group * VARIANT.heads_per_group + chunk_head % chunk_heads
    group = (head // VARIANT.heads_per_group).to(tl.int64)
    lane_head = lane * VARIANT.num_heads + head
    num_keys = M + L
    offset = lane * L * ROW + head * VARIANT.head_width
    keys += lane * key_lane + group * key_head
    positions += head * VARIANT.head_width
    position_gradients += head * VARIANT.head_width
    position_queries += offset
    matrix = score_matrix(score_gradients, chunk_head, L, score_row)

    queries = i0 + tl.arange(0, ROWS)
    exists = queries < L
    first_key = tl.zeros([ROWS], dtype=tl.int32)
    lowest_first = 0
    if VARIANT.has_starts:
        first_key = tl.load(first_keys + lane * L + queries, mask=exists, other=0)
        lowest_first = tl.load(first_keys + lane * L + i0)
    lowest, highest = visible_keys(queries, first_key, L, M, window)
    first = tl.maximum(tl.maximum(i0 + M - window + 1, lowest_first), 0) // COLUMNS * COLUMNS
    last = tl.cdiv(tl.minimum(num_keys, i0 + ROWS + M), COLUMNS) * COLUMNS

    query_gradient = tl.zeros([ROWS, PADDED], dtype=tl.float32)
    # The score gradients are read twice, by key and by position row. Both reads of a tile follow
    # each other, so the second one hits a cache.
    to_rows = L - i0 - ROWS  # from a tile's first key to the first position row that queries use
    for j0 in range(first, last, COLUMNS):
        columns = j0 + tl.arange(0, COLUMNS)
        key_tile = load_rows(keys, j0, num_keys, VARIANT.key_row, COLUMNS, VARIANT)
        score_gradient = tl.load(
            matrix + tl.cast(i0, tl.int64) * score_row + j0
            + (tl.arange(0, ROWS)[:, None] * score_row + tl.arange(0, COLUMNS)[None, :]),
            mask=exists[:, None], other=0.0,
        )  # fmt: skip
        # Loads without this mask are wider. What no program has written is replaced after them.
        visible = (columns[None, :] >= lowest[:, None]) & (columns[None, :] <= highest[:, None])
        score_gradient = tl.where(visible, score_gradient, 0.0)
        query_gradient = tl.dot(
            score_gradient, key_tile, query_gradient, input_precision=VARIANT.precision
        )
        if VARIANT.has_position:
            query_gradient = _add_position_part(
                query_gradient, matrix, i0, j0 + to_rows, lowest, highest, position_queries,
                positions, position_gradients, L, num_keys, score_row, VARIANT,
            )  # fmt: skip
    if VARIANT.has_position:
        # For the last keys, the tile's first queries use later position rows: ROWS more.
        for j0 in range(tl.maximum(last, first), tl.maximum(last, first) + ROWS, COLUMNS):
            query_gradient = _add_position_part(
                query_gradient, matrix, i0, j0 + to_rows, lowest, highest, position_queries,
                positions, position_gradients, L, num_keys, score_row, VARIANT,
            )  # fmt: skip
    query_gradient *= VARIANT.scale
    store_rows(query_gradients + offset, i0, L, ROW, query_gradient, ROWS, VARIANT)
    sums = query_sums + (lane_head * num_tiles + tile_index) * PADDED + tl.arange(0, PADDED)
    tl.store(sums, tl.sum(query_gradient, 0))
