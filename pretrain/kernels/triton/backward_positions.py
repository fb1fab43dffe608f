"""The fused backward pass for position rows: one program per head and tile of position rows.

It sums over the lanes and queries in a fixed order what the kernel of the keys has left, the
gradients of the scores, so it needs one product. Learned biases per distance get their gradient on
the way. Letters and units as in `forward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pretrain.kernels.triton.tiles import load_rows, load_shifted, score_matrix, visible_keys
from pretrain.kernels.triton.workspace import CHUNK


@triton.jit(do_not_specialize=CHUNK)
def position_gradient_kernel(
    content_queries, position_queries, keys, values, positions, key_biases, distance_biases,
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
    # If all rows of the tile are too far away, no query sees any.
    num_lanes = tl.where(p0 + COLUMNS <= num_keys - window, 0, chunk_lanes)
    # Query i meets this tile's last row at key 0 when i = L - 1 - (p0 + COLUMNS - 1); queries
    # before meet none.
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
