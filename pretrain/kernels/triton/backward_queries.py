"""The fused backward pass for queries: one program per head, lane and tile of queries.

The kernel of the keys has left the gradients of the scores, so nothing is computed again: they are
multiplied with the keys, and shifted with the position rows. The shift costs nothing but unaligned
loads: query i meets position row p at key p - (L - 1) + i, so a tile of position rows is a view of
the same matrix whose rows are one element longer. Letters and units as in `forward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pretrain.kernels.triton.tiles import (
    load_positions,
    load_rows,
    load_shifted,
    score_matrix,
    store_rows,
    visible_keys,
)
from pretrain.kernels.triton.workspace import CHUNK


@triton.jit
def delta_kernel(outputs, output_gradients, deltas, L, VARIANT: tl.constexpr):
    """Write deltas [B, N, L]: the sums over each row of output times gradient of the output.

    With them the softmax's gradient needs no second pass over the keys.
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
    """Add the part of position rows `first`, ... to the query gradient.

    With adds_positions also add to the gradient of the position rows. Every lane and every tile of
    queries contributes to the same rows, and programs cannot wait for each other, so this is atomic
    and in no fixed order. `backward_positions` is the alternative.
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
    content_queries, position_queries, keys, values, positions, key_biases, distance_biases,
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
    tile_index = (
        num_tiles - 1 - tl.program_id(0) % num_tiles
    )  # the longest rows first: they take longest
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
    # The shifted part of a tile of keys is read soon after the tile itself, so it is in a cache.
    to_rows = L - i0 - ROWS  # from the first key of a tile to the first row that any query meets
    for j0 in range(first, last, COLUMNS):
        columns = j0 + tl.arange(0, COLUMNS)
        key_tile = load_rows(keys, j0, num_keys, VARIANT.key_row, COLUMNS, VARIANT)
        score_gradient = tl.load(
            matrix + tl.cast(i0, tl.int64) * score_row + j0
            + (tl.arange(0, ROWS)[:, None] * score_row + tl.arange(0, COLUMNS)[None, :]),
            mask=exists[:, None], other=0.0,
        )  # fmt: skip
        # Whole rows are loaded, for wide loads; what no program has written is replaced.
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
        # The first queries of the tile meet the last keys at later rows.
        for j0 in range(tl.maximum(last, first), tl.maximum(last, first) + ROWS, COLUMNS):
            query_gradient = _add_position_part(
                query_gradient, matrix, i0, j0 + to_rows, lowest, highest, position_queries,
                positions, position_gradients, L, num_keys, score_row, VARIANT,
            )  # fmt: skip
    query_gradient *= VARIANT.scale
    store_rows(query_gradients + offset, i0, L, ROW, query_gradient, ROWS, VARIANT)
    sums = query_sums + (lane_head * num_tiles + tile_index) * PADDED + tl.arange(0, PADDED)
    tl.store(sums, tl.sum(query_gradient, 0))
