"""How attention knows distances: the paper's sinusoid encodings, rotations, and biases per distance.

C keys, the last of them at distance 0 from the last query; N heads, H head width. Whatever is indexed by C runs from
the farthest key to the nearest. No position is absolute, so a memory row needs none of its own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pretrain.config.run import ModelConfig
from pretrain.model.parameters import normal

SMALLEST_TABLE = 64
WAVELENGTH_BASE = 10_000.0


def sinusoids_PD(distances_P: Tensor, d_model: int) -> Tensor:
    """Encodings [sin | cos] of the distances, in their dtype: two halves side by side, not interleaved."""
    exponents = (
        torch.arange(0, d_model, 2, dtype=distances_P.dtype, device=distances_P.device) / d_model
    )
    angles_PX = distances_P[:, None] * (1.0 / WAVELENGTH_BASE**exponents)
    return torch.cat([angles_PX.sin(), angles_PX.cos()], dim=1)


class RelativePositions:
    """Encodings of the distances C-1, ..., 1, 0 of C keys from the last query, computed once and kept.

    Always in float32 or wider: in bfloat16 only 449 of 768 distances would stay distinct. A table's length is a power
    of two, so that a row's value does not depend on which lengths were asked for before.
    """

    def __init__(self, d_model: int, clamp_length: int) -> None:
        self._d_model = d_model
        self._clamp_length = clamp_length
        self._tables: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def encodings_CD(self, num_keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The encodings for `num_keys` keys, farthest first, rounded to `dtype` last."""
        key = (dtype, device)
        table = self._tables.get(key)
        if table is None or len(table) < num_keys:
            # A table made during inference must serve training later.
            with torch.inference_mode(False), torch.no_grad():
                table = self._computed(num_keys, dtype, device)
            self._tables[key] = table
        return table[len(table) - num_keys :]

    def _computed(self, num_keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        length = max(SMALLEST_TABLE, 1 << (num_keys - 1).bit_length())
        precise = torch.float64 if dtype == torch.float64 else torch.float32
        distances = torch.arange(length, dtype=precise, device=device)
        if self._clamp_length:
            distances.clamp_(max=self._clamp_length)
        return sinusoids_PD(distances, self._d_model).flip(0).to(dtype)


def rotated_BXNH(values_BXNH: Tensor, encodings_XH: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021): pairs (c, c + H/2) of row x turned by minus its distance times frequency c.

    Products of two rotated rows depend on the difference of their distances alone. `encodings_XH` are `sinusoids_PD` of
    width H: the frequencies are the paper's.
    """
    sin_X1H, cos_X1H = encodings_XH[:, None].chunk(2, dim=-1)
    first, second = values_BXNH.chunk(2, dim=-1)
    return torch.cat(
        [first * cos_X1H + second * sin_X1H, second * cos_X1H - first * sin_X1H], dim=-1
    )


def alibi_slopes_N(num_heads: int, device: torch.device) -> Tensor:
    """Slopes of linear biases (Press et al. 2022): 2^(-8/n), 2^(-16/n), ... for n heads, n a power of two.

    Other numbers of heads take those of the next lower power of two, then every second one of the next higher.
    """
    whole = 1 << (num_heads.bit_length() - 1)
    steps = torch.arange(1, whole + 1, dtype=torch.float64, device=device)
    return 2.0 ** (-8.0 / whole * torch.cat([steps, steps - 0.5])[:num_heads])


def t5_buckets_of(distances: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """The bucket of each distance (Raffel et al. 2020, one direction): half of them single, the rest logarithmic.

    Distances of `max_distance` or more share the last bucket.
    """
    exact = num_buckets // 2
    growth = (distances.clamp(min=exact).double() / exact).log() / math.log(max_distance / exact)
    # An epsilon above the rounding of a logarithm, so that every platform puts a bucket's first distance into it.
    coarse = exact + (growth * (num_buckets - exact) + 1e-9).long().clamp(
        max=num_buckets - exact - 1
    )
    return torch.where(distances < exact, distances, coarse)


class DistanceBias(nn.Module):
    """What is added to the scores of each distance and head, [C, N]: alibi's fixed lines or T5's learned table."""

    bucket_bias: nn.Parameter | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._config = config
        learned = config.positions == "t5"
        self.bucket_bias = (
            normal(config.t5_buckets, config.num_heads, std=config.init_std) if learned else None
        )

    def forward(self, num_keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        distances_C = torch.arange(num_keys - 1, -1, -1, device=device)
        if self.bucket_bias is not None:
            buckets_C = t5_buckets_of(
                distances_C, self._config.t5_buckets, self._config.t5_max_distance
            )
            return nn.functional.embedding(buckets_C, self.bucket_bias)
        return (-distances_C[:, None] * alibi_slopes_N(self._config.num_heads, device)).to(dtype)
