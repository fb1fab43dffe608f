"""Where the documents lie in a shard: what a format's reader finds out, whatever the format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


class ShardDamage(Exception):
    """A shard's headers contradict its size or each other; the message says how."""


@dataclass(frozen=True)
class ShardLayout:
    """Shapes: D documents in the order in which they are stored."""

    token_begins: np.ndarray  # int64 [D], bytes from the begin of the file
    lengths: np.ndarray  # int64 [D], tokens
    document_id: Callable[[int], str]
