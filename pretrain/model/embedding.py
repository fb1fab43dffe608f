"""Token embedding, in bins of falling width when `cutoffs` are given, as the original's adaptive embedding.

B lanes, L tokens, D d_model, E the width of a bin, V its tokens.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from pretrain.config.run import ModelConfig
from pretrain.model.parameters import normal


def bin_ranges(config: ModelConfig) -> list[range]:
    """The tokens of each bin: the shortlist, then one bin per cutoff."""
    return [range(first, last) for first, last in pairwise((0, *config.cutoffs, config.vocab_size))]


def bin_width(config: ModelConfig, index: int) -> int:
    """E of bin `index`: d_embed divided by div_val once more for every bin."""
    return config.embedding_width // config.div_val**index


class EmbeddingBin(nn.Module):
    """The vectors of one bin's tokens, with a projection of their own to d_model if `div_val` makes widths differ."""

    projection: nn.Parameter | None

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        width = bin_width(config, index)
        self.weight = normal(len(bin_ranges(config)[index]), width, std=config.init_std)
        projected = config.div_val > 1
        self.projection = (
            normal(config.d_model, width, std=config.projection_init_std) if projected else None
        )

    def forward(self, tokens_BL: Tensor) -> Tensor:
        vectors_BLE = embedding(tokens_BL, self.weight)
        return vectors_BLE if self.projection is None else linear(vectors_BLE, self.projection)


class Embedding(nn.Module):
    """Vectors [B, L, D] times sqrt(D). One projection for all bins joins d_embed and d_model where they differ."""

    projection: nn.Parameter | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._ranges = bin_ranges(config)
        self._scale = math.sqrt(config.d_model)
        self.bins = nn.ModuleList(EmbeddingBin(config, index) for index in range(len(self._ranges)))
        shared = config.div_val == 1 and config.embedding_width != config.d_model
        self.projection = (
            normal(config.d_model, config.embedding_width, std=config.projection_init_std)
            if shared
            else None
        )

    def forward(self, tokens_BL: Tensor) -> Tensor:
        vectors = self.bins[0](tokens_BL) if len(self.bins) == 1 else self._binned(tokens_BL)
        if self.projection is not None:
            vectors = linear(vectors, self.projection)
        return vectors * self._scale

    def _binned(self, tokens_BL: Tensor) -> Tensor:
        # Every bin looks up every token, clamped into its range: no step waits for the accelerator to count tokens, and
        # every rank runs every bin (ZeRO-3 gathers parameters module by module, on all ranks alike).
        vectors = None
        for tokens, bin_module in zip(self._ranges, self.bins, strict=True):
            found_BL1 = ((tokens_BL >= tokens.start) & (tokens_BL < tokens.stop))[:, :, None]
            looked_up = bin_module((tokens_BL - tokens.start).clamp(0, len(tokens) - 1))
            vectors = looked_up if vectors is None else vectors
            vectors = torch.where(found_BL1, looked_up, vectors)
        assert vectors is not None
        return vectors
