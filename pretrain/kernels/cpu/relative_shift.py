"""The relative shift (appendix B of the paper) without copies: scores by distance to scores by key.

The product of queries and projected positions has a column per distance from the tile's last row,
farthest first. Key j of row i needs column j + R - 1 - i, so each row has to move left by one
column less than the row above it. The functions here view the same memory with other strides
instead:

    R = 3 rows, S = 5 columns: the product     the same elements, by key
    . . a b c                                  a b c ' '    row 0 moved left by 2
    . d e f g                                  d e f g '    row 1 moved left by 1
    h i j k l                                  h i j k l    row 2, the last: unchanged

Row i of the result starts at element R - 1 + i (S - 1) of the flat product: an offset of R - 1 and
a row stride of S - 1 instead of S. Products marked "." belong to no key of the tile. Entries marked
"'" come after the row's own key and hold elements of the next row; the causal mask hides them.
"""

from __future__ import annotations

from torch import Tensor


def relative_shift(padded: Tensor) -> Tensor:
    """Return a view of [X, L, 1 + C] in which row i is moved left by L - 1 - i: [X, L, C].

    The first column is padding: with it a plain `view` does the shift, also in the backward pass.
    """
    batch, num_queries, width = padded.shape
    return padded.view(batch, width, num_queries)[:, 1:].view(batch, num_queries, width - 1)


def shifted(tile_PRS: Tensor) -> Tensor:
    """Return a view of a contiguous tile in which row i is moved left by R - 1 - i, unpadded."""
    P, R, S = tile_PRS.shape
    return tile_PRS.as_strided((P, R, S), (R * S, S - 1, 1), tile_PRS.storage_offset() + R - 1)


def unshift_(tile_PRS: Tensor, shifted_PRS: Tensor) -> None:
    """Fill `tile_PRS` so that `shifted` turns it into `shifted_PRS`, the gradient of the scores.

    Entries of `shifted_PRS` after the query must be zero.
    """
    P, R, S = shifted_PRS.shape
    flat = tile_PRS.view(P, R * S)
    flat[:, : R - 1] = 0
    # Rows of S elements in steps of S - 1 would overlap, and threads would race for the shared one.
    # So the last column, which holds the last row's own key and zeros, is copied separately.
    flat[:, R - 1 : -1].view(P, R, S - 1).copy_(shifted_PRS[:, :, :-1])
    flat[:, -1] = shifted_PRS[:, -1, -1]
