"""Functions that the fused kernels share: loads and stores, the skew, visible keys, dropout.

The position term of query i and key j is in column p = j + L - 1 - i of the product of queries and
position rows. A tile of queries i0 + a and keys j0 + b, both of size T, needs columns of two
neighboring product tiles: "near", of the T position rows from j0 - i0 + L on, and "far", of the T
rows before. Side by side they form a window from which row a reads T columns, each row starting one
to the left of the row above:

    scores[a, b] = [far | near][a, b + T - 1 - a]

The near tile is the far tile of the next keys, so each product is computed once. The gradient of
the scores goes back the same way. Reading the window is one gather in shared memory from a
flattened view; a gather of rank 2 would become warp shuffles and two layout conversions. Flattening
moves the five bits that vary over the lanes of a warp in the layout of a tensor core's accumulator
(3 of the row, 2 of the column) to the low address bits. So stores and loads have no bank conflicts,
and every address is a lane's base plus a constant.
"""

from __future__ import annotations

import triton
import triton.language as tl

PHILOX_ROUNDS = tl.constexpr(7)  # passes BigCrush (Salmon et al. 2011); triton's default is 10


@triton.jit
def load_rows(pointer, first, num_rows, row_stride, SIZE: tl.constexpr, VARIANT: tl.constexpr):
    """Load rows first, ..., first + SIZE - 1 of one head; rows from `num_rows` on are zero."""
    return _load(pointer, first, tl.arange(0, SIZE) < num_rows - first, row_stride, SIZE, VARIANT)


@triton.jit
def load_rows_around(
    pointer, first, num_rows, row_stride, SIZE: tl.constexpr, VARIANT: tl.constexpr
):
    """Like `load_rows`, but `first` may be negative; rows before 0 are zero as well."""
    r = tl.arange(0, SIZE)
    return _load(pointer, first, (r < num_rows - first) & (r >= -first), row_stride, SIZE, VARIANT)


@triton.jit
def _load(pointer, first, valid, row_stride, SIZE: tl.constexpr, VARIANT: tl.constexpr):
    # The tile's offset is one scalar, so every address is that scalar plus a constant of the
    # thread. It has 64 bits, because keys and values of a lane may have 2^31 elements.
    PADDED: tl.constexpr = VARIANT.padded_width
    columns = tl.arange(0, PADDED)
    mask = valid[:, None]
    if VARIANT.head_width != VARIANT.padded_width:
        mask = mask & (columns[None, :] < VARIANT.head_width)
    addresses = (
        pointer
        + tl.cast(first, tl.int64) * row_stride
        + (tl.arange(0, SIZE)[:, None] * row_stride + columns[None, :])
    )
    return tl.load(addresses, mask=mask, other=0.0)


@triton.jit
def load_positions(positions, first, num_keys, VARIANT: tl.constexpr):
    """Load as many position rows of a head as a tile has columns; zero outside [0, num_keys)."""
    row_stride: tl.constexpr = VARIANT.num_heads * VARIANT.head_width
    return load_rows_around(positions, first, num_keys, row_stride, VARIANT.columns, VARIANT)


@triton.jit
def store_rows(
    pointer, first, num_rows, row_stride, tile, SIZE: tl.constexpr, VARIANT: tl.constexpr
):
    """Store a tile, without padding, in rows first, ..., in the type of the destination."""
    PADDED: tl.constexpr = VARIANT.padded_width
    columns = tl.arange(0, PADDED)
    mask = (tl.arange(0, SIZE) < num_rows - first)[:, None]
    if VARIANT.head_width != VARIANT.padded_width:
        mask = mask & (columns[None, :] < VARIANT.head_width)
    addresses = (
        pointer
        + tl.cast(first, tl.int64) * row_stride
        + (tl.arange(0, SIZE)[:, None] * row_stride + columns[None, :])
    )
    tl.store(addresses, tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def score_matrix(score_gradients, chunk_head, L, score_row):
    """Return the [L, score_row] matrix of one head in the workspace of score gradients."""
    return score_gradients + chunk_head.to(tl.int64) * L * score_row


@triton.jit
def load_shifted(matrix, i0, first, lowest, highest, num_queries, score_row, VARIANT: tl.constexpr):
    """Load the score gradients of queries i0 + a and position rows first + r, zero if hidden.

    That is column first + r - (L - 1) + i0 + a of row i0 + a, in a matrix with a row per query.
    """
    a = tl.arange(0, VARIANT.rows)[:, None]
    r = tl.arange(0, VARIANT.columns)[None, :]
    j0 = first - (num_queries - 1) + i0
    columns = j0 + a + r
    visible = (columns >= lowest[:, None]) & (columns <= highest[:, None])
    corner = matrix + tl.cast(i0, tl.int64) * score_row + j0
    return tl.load(corner + (a * (score_row + 1) + r), mask=visible, other=0.0)


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
    # Multiples of 8 are separate: equal for all lanes of a warp, they become address constants.
    low = (c & 7)[None, :] + shifts[:, None]
    base = (
        ((a >> 3) * (16 * COLUMNS) + (a & 7) * 4)[:, None]
        + (low >> 3) * 64
        + (low & 1) * 32
        + ((low >> 1) & 3)
    )
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
    base = (
        ((c >> 3) * 64 + (c & 1) * 32 + ((c >> 1) & 3))[None, :]
        + (low >> 3) * (8 * COLUMNS)
        + (low & 7) * 4
    )
    addresses = base + ((r >> 3) * (8 * COLUMNS))[:, None]
    return _unflat(tl.gather(window, _flat(addresses, ROWS, COLUMNS), 0), ROWS, COLUMNS)


@triton.jit
def visible_keys(queries, first_keys, num_queries, num_memory, window):
    """Return the first and the last key that each query sees; those past the segment see none.

    Hidden are keys after the query, keys at a distance of `window` or more, keys before
    `first_keys`.
    """
    last = tl.where(queries < num_queries, queries + num_memory, -1)
    return tl.maximum(tl.maximum(queries + num_memory - window + 1, 0), first_keys), last


@triton.jit
def kept_pairs(key, head, i0, rows, j0, columns, VARIANT: tl.constexpr):
    """Whether dropout keeps the weight of query i0 + row and key j0 + column.

    The result depends only on (key of the lane, head, query, key), not on the tile, so the backward
    kernels find the same mask with other tiles. i0 and j0 are multiples of the tile's size. One
    draw of Philox serves the pairs that differ in bit 3 of the query or bits 3 and 4 of the key. A
    thread has several of these in a tensor core's accumulator; since the bits are taken from rows
    and columns, the compiler recognizes this and draws once.
    """
    query = (i0 & ~8) + (rows & ~8) + columns * 0
    column = (j0 & ~24) + (columns & ~24) + rows * 0
    word0, word1, word2, word3 = tl.philox(
        key, column, query, query * 0 + head, query * 0, n_rounds=PHILOX_ROUNDS
    )
    is_odd = ((j0 | columns) & 8) != 0
    word = tl.where(
        ((j0 | columns) & 16) != 0, tl.where(is_odd, word3, word2), tl.where(is_odd, word1, word0)
    )
    bits = tl.where(((i0 | rows) & 8) != 0, word >> 16, word & 0xFFFF)
    return bits.to(tl.int32) >= VARIANT.drop_threshold
