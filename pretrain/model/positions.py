"""Relative distances and their sinusoid encodings (section 3.3 and appendix B of the paper)."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_TABLE = 64
WAVELENGTH_BASE = 10_000.0


def sinusoids_PD(distances_P: Tensor, d_model: int) -> Tensor:
    """Encodings [sin | cos] of the distances, in their dtype: two halves side by side, not interleaved."""
    exponents = torch.arange(0, d_model, 2, dtype=distances_P.dtype, device=distances_P.device) / d_model
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
