"""Where the keys of a segment are and which of them its queries see, in every layer.

Letters of shapes as in `pretrain.model`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pretrain.config.model import ModelConfig
from pretrain.model.attention_paths import Visibility


class SegmentKeys:
    """Positions and visibility of a segment's keys, which layers with as many keys share."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        positions: Sequence[Tensor],
        documents_BC: Tensor,
        num_queries: int,
    ) -> None:
        """`positions` [C, X] are those of each layer, farthest first; `dtype` is that of scores.

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
        return self._visibility[key]


def _last(tensor: Tensor, count: int, dim: int) -> Tensor:
    surplus = tensor.shape[dim] - count
    return tensor.narrow(dim, surplus, count).contiguous() if surplus else tensor
