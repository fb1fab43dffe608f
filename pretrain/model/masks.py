"""Which keys a query may see. B lanes, L queries, M memory rows, C = M + L keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Visibility:
    """Which keys a segment's queries see, in all layers: numbers for a kernel, a mask for plain operations."""

    num_queries: int
    num_keys: int
    window: int = 0  # see `forbidden_LC`
    documents_BC: Tensor | None = None  # only where documents are isolated
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def mask(self) -> Tensor:
        """Minus infinity where a key is out of sight and zero elsewhere, [L, C] or [B, L, C]."""
        forbidden = forbidden_LC(self.num_queries, self.num_keys, self.window, self.device)
        if self.documents_BC is not None:
            forbidden = isolated_BLC(forbidden, self.documents_BC)
        return additive(forbidden, self.dtype)


def forbidden_LC(
    num_queries: int, num_keys: int, window: int = 0, device: torch.device | None = None
) -> Tensor:
    """True where query i may not see key j: keys after it and, with a window, keys `window` or more away."""
    num_memory = num_keys - num_queries
    queries = torch.arange(num_memory, num_keys, device=device)
    distances_LC = queries[:, None] - torch.arange(num_keys, device=device)
    forbidden = distances_LC < 0
    return forbidden | (distances_LC >= window) if window else forbidden


def isolated_BLC(forbidden: Tensor, documents_BC: Tensor) -> Tensor:
    """`forbidden` and, on top, every key that belongs to another document than the query."""
    num_queries = forbidden.shape[0]
    query_documents_BL = documents_BC[:, -num_queries:]
    return forbidden | (query_documents_BL[:, :, None] != documents_BC[:, None, :])


def additive(forbidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Minus infinity where forbidden and zero elsewhere, to be added to scores."""
    return torch.zeros(forbidden.shape, dtype=dtype, device=forbidden.device).masked_fill_(
        forbidden, float("-inf")
    )
