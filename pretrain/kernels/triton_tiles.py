"""Pieces the fused kernels share: rows to and from memory, the in-tile skew, the visible keys, dropout.

The relative term of query i and key j lies in column p = j + L - 1 - i of the product of queries and position rows. A
tile of queries i0 + a and keys j0 + b, both of size N, therefore needs columns of two neighbouring product tiles: "near",
of the N position rows from j0 - i0 + L on, and "far", of the N before. Side by side they are a window from which row a
reads N columns, each row starting one to the left of the row above:

    scores[a, b] = [far | near][a, b + N - 1 - a]

The near tile is the far tile of the next keys, so each product is computed once. The gradient of the scores goes the
same way back. Reading the window is one gather in shared memory. It works on a flattened view: a gather of rank 2 becomes
warp shuffles and two layout conversions. The order of flattening puts the five bits that vary over the lanes of a warp in
the layout of a tensor core's accumulator (3 of the row, 2 of the column) into the low address bits, which keeps stores
and loads free of bank conflicts, and every address is a lane's base plus a constant.
"""

from __future__ import annotations

import triton
import triton.language as tl

PHILOX_ROUNDS = tl.constexpr(7)  # passes BigCrush (Salmon et al. 2011); triton's default is 10


@triton.jit
def load_rows(pointer, rows, row_stride, valid, VARIANT: tl.constexpr):
    """Rows of one head as a tile; zero where not valid and in the padding of its width."""
    PADDED: tl.constexpr = VARIANT.padded_width
    columns = tl.arange(0, PADDED)
    mask = valid[:, None]
    if VARIANT.head_width != VARIANT.padded_width:
        mask = mask & (columns[None, :] < VARIANT.head_width)
    return tl.load(pointer + rows[:, None] * row_stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(pointer, rows, row_stride, valid, tile, VARIANT: tl.constexpr):
    """The valid rows of a tile without their padding, rounded to the destination's type."""
    PADDED: tl.constexpr = VARIANT.padded_width
    columns = tl.arange(0, PADDED)
    mask = valid[:, None]
    if VARIANT.head_width != VARIANT.padded_width:
        mask = mask & (columns[None, :] < VARIANT.head_width)
    addresses = pointer + rows[:, None] * row_stride + columns[None, :]
    tl.store(addresses, tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_positions(positions, rows, num_keys, VARIANT: tl.constexpr):
    """Position rows of one head; rows outside [0, num_keys) count as zero."""
    row_stride: tl.constexpr = VARIANT.num_heads * VARIANT.head_width
    return load_rows(positions, rows, row_stride, (rows >= 0) & (rows < num_keys), VARIANT)


@triton.jit
def _flat(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    split = tl.reshape(tile, [ROWS // 8, 8, COLUMNS // 8, 4, 2])
    return tl.reshape(tl.permute(split, (0, 2, 4, 1, 3)), [ROWS * COLUMNS])


@triton.jit
def _unflat(flat, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    split = tl.reshape(flat, [ROWS // 8, COLUMNS // 8, 2, 8, 4])
    return tl.reshape(tl.permute(split, (0, 3, 1, 4, 2)), [ROWS, COLUMNS])


@triton.jit
def window_of_columns(left, right, shifts, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out[a, c] = [left | right][a, c + shifts[a]]."""
    a = tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    split = tl.reshape(tl.join(left, right), [ROWS // 8, 8, COLUMNS // 8, 4, 2, 2])
    window = tl.reshape(tl.permute(split, (0, 5, 2, 4, 1, 3)), [2 * ROWS * COLUMNS])
    # Eights apart from the rest: the same for all lanes of a warp, they become the constants of the addresses.
    low = (c & 7)[None, :] + shifts[:, None]
    base = ((a >> 3) * (16 * COLUMNS) + (a & 7) * 4)[:, None] + (low >> 3) * 64 + (low & 1) * 32 + ((low >> 1) & 3)
    addresses = base + ((c >> 3) * 64)[None, :]
    return _unflat(tl.gather(window, _flat(addresses, ROWS, COLUMNS), 0), ROWS, COLUMNS)


@triton.jit
def window_of_rows(upper, lower, shifts, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out[r, c] = [upper over lower][r + shifts[c], c]."""
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    split = tl.reshape(tl.join(upper, lower), [ROWS // 8, 8, COLUMNS // 8, 4, 2, 2])
    window = tl.reshape(tl.permute(split, (5, 0, 2, 4, 1, 3)), [2 * ROWS * COLUMNS])
    low = (r & 7)[:, None] + shifts[None, :]
    base = ((c >> 3) * 64 + (c & 1) * 32 + ((c >> 1) & 3))[None, :] + (low >> 3) * (8 * COLUMNS) + (low & 7) * 4
    addresses = base + ((r >> 3) * (8 * COLUMNS))[:, None]
    return _unflat(tl.gather(window, _flat(addresses, ROWS, COLUMNS), 0), ROWS, COLUMNS)


@triton.jit
def visible_keys(queries, first_keys, num_queries, num_memory, window):
    """The first and the last key each query sees: none after it, none `window` or more before it, none before
    `first_keys`. Queries that do not exist see none."""
    last = tl.where(queries < num_queries, queries + num_memory, -1)
    return tl.maximum(tl.maximum(queries + num_memory - window + 1, 0), first_keys), last


@triton.jit
def kept_pairs(key, head, queries, keys, VARIANT: tl.constexpr):
    """Where dropout keeps a weight: a function of (key of the lane, head, query, key) alone, whatever the tile."""
    pairs = queries * 0 + keys
    bits, _, _, _ = tl.philox(key, pairs, queries + keys * 0, pairs * 0 + head, pairs * 0, n_rounds=PHILOX_ROUNDS)
    return (bits >> 16).to(tl.int32) >= VARIANT.drop_threshold
