"""Which keys a query may see. B lanes, L queries, M memory rows, C = M + L keys."""

from __future__ import annotations

import torch
from torch import Tensor


def forbidden_LC(num_queries: int, num_keys: int, window: int = 0, device: torch.device | None = None) -> Tensor:
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
    return torch.zeros(forbidden.shape, dtype=dtype, device=forbidden.device).masked_fill_(forbidden, float("-inf"))
