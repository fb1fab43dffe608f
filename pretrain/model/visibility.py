"""Which keys the queries of a segment see. The queries are the last L of the C keys.

Letters of shapes as in `pretrain.model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pretrain.config.model import ModelConfig


class SegmentKeys:
    """Positions and visibility of a segment's keys, shared by layers with equally many keys."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        positions: Sequence[Tensor],
        documents_BC: Tensor,
        num_queries: int,
    ) -> None:
        """`positions` [C, X] are by layer, farthest first; `dtype` is the type of scores.

        C is the number of keys of the layers that remember the most.
        """
        self._config = config
        self._num_queries, self._dtype = num_queries, dtype
        self._positions = positions
        self._documents_BC = documents_BC
        self._visibility: dict[tuple[int, int], Visibility] = {}

    @property
    def isolated_documents_BL(self) -> Tensor | None:
        """The documents of the segment's tokens if documents are isolated."""
        isolates = self._config.isolate_documents
        return self._documents_BC[:, -self._num_queries :] if isolates else None

    def positions_CX(self, layer: int, num_keys: int) -> Tensor:
        """Return encodings or biases of the nearest keys."""
        return _last(self._positions[layer], num_keys, dim=0)

    def visibility(self, num_keys: int, memory_length: int) -> Visibility:
        """Return which of the nearest keys the queries see in a layer with this memory length."""
        key = (num_keys, memory_length if self._config.same_length else 0)
        if key not in self._visibility:
            documents_BC = _last(self._documents_BC, num_keys, dim=1)
            self._visibility[key] = Visibility(
                num_queries=self._num_queries,
                num_keys=num_keys,
                window=key[1],
                documents_BC=documents_BC if self._config.isolate_documents else None,
                dtype=self._dtype,
                device=documents_BC.device,
            )
            if self._config.softmax_scaling == "log_length":
                # Compute it now, because each compiled layer would compute it again.
                _ = self._visibility[key].num_visible_BL
        return self._visibility[key]


def _last(tensor: Tensor, count: int, dim: int) -> Tensor:
    surplus = tensor.shape[dim] - count
    return tensor.narrow(dim, surplus, count).contiguous() if surplus else tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Visibility:
    """Which keys a segment's queries see, in all layers: bounds for kernels and a mask."""

    num_queries: int
    num_keys: int
    window: int = 0  # hides keys at this distance or farther; 0: none
    documents_BC: Tensor | None = None  # set if documents are isolated
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def mask(self) -> Tensor:
        """What to add to scores: minus infinity for hidden keys, else 0; [L, C] or [B, L, C]."""
        forbidden = forbidden_LC(self.num_queries, self.num_keys, self.window, self.device)
        if self.documents_BC is not None:
            query_documents_BL = self.documents_BC[:, -self.num_queries :]
            forbidden = forbidden | (query_documents_BL[:, :, None] != self.documents_BC[:, None])
        zeros = torch.zeros(forbidden.shape, dtype=self.dtype, device=self.device)
        return zeros.masked_fill_(forbidden, float("-inf"))

    @cached_property
    def num_visible_BL(self) -> Tensor:
        """How many keys each query sees; [1, L] or [B, L]."""
        ends = torch.arange(self.num_keys - self.num_queries, self.num_keys, device=self.device) + 1
        counts_BL = (ends.clamp(max=self.window) if self.window else ends)[None]
        if self.documents_BC is None:
            return counts_BL
        # Document ids ascend, so a document's first key is where its id would be inserted.
        documents_BC = self.documents_BC.contiguous()
        of_queries_BL = documents_BC[:, -self.num_queries :].contiguous()
        return torch.minimum(counts_BL, ends - torch.searchsorted(documents_BC, of_queries_BL))


def forbidden_LC(
    num_queries: int, num_keys: int, window: int = 0, device: torch.device | None = None
) -> Tensor:
    """Return where query i may not see key j, which comes later or, with a window, is too far.

    A window hides keys at a distance of `window` or more (`same_length`).
    """
    queries = torch.arange(num_keys - num_queries, num_keys, device=device)
    distances_LC = queries[:, None] - torch.arange(num_keys, device=device)
    forbidden = distances_LC < 0
    return forbidden | (distances_LC >= window) if window else forbidden
