"""What loaders of samples of fixed length would lose of a corpus; lanes lose nothing."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Loss:
    """What one way of making samples of T tokens does to a corpus."""

    loader: str
    documents_cut: int  # documents whose rest is read without their start, or not at all
    tokens_lost: int
    padding: int  # tokens that are computed for nothing


def packing_losses(lengths: Iterable[np.ndarray], length: int) -> tuple[Loss, ...]:
    """Return what samples of `length` tokens lose of documents with these lengths, in order.

    One loader concatenates documents and cuts, one crops each document to one sample, and one gives
    each document padded samples of its own.
    """
    tokens = crossed = longer = cropped = padding = 0
    for lengths_D in lengths:
        ends_D = tokens + np.cumsum(lengths_D, dtype=np.int64)
        crossed += int(((ends_D - lengths_D) // length != (ends_D - 1) // length).sum())
        longer += int((lengths_D > length).sum())
        cropped += int(np.maximum(lengths_D.astype(np.int64) - length, 0).sum())
        padding += int((-lengths_D.astype(np.int64) % length).sum())
        tokens += int(lengths_D.sum(dtype=np.int64))
    return (
        Loss("concatenated", crossed, tokens % length, 0),
        Loss("cropped", longer, cropped, 0),
        Loss("padded", longer, 0, padding),
        Loss("lanes", 0, 0, 0),
    )
