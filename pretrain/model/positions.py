"""How attention encodes distances: the paper's sinusoids, rotations, or biases per distance.

The last key is at distance 0 from the last query. Whatever is indexed by C runs from the farthest
key to the nearest. No position is absolute, so memory rows need none. Letters of shapes as in
`pretrain.model`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foundation.settings import assert_never
from pretrain.config.model import POSITIONS, T5_BUCKETS, T5_MAX_DISTANCE, ModelConfig, RopeExtension
from pretrain.model.parameters import normal

SMALLEST_TABLE = 64
WAVELENGTH_BASE = 10_000.0
SLOW_TURNS, FAST_TURNS = 1.0, 32.0  # YaRN's beta_slow and beta_fast


def sinusoids_XD(distances_X: Tensor, d_model: int, stretch: Stretch | None = None) -> Tensor:
    """Return the encodings [sin | cos] of X distances, in two halves, not interleaved."""
    exponents = (
        torch.arange(0, d_model, 2, dtype=distances_X.dtype, device=distances_X.device) / d_model
    )
    stretch = stretch or Stretch("none", 1.0, 0)
    angles_XY = distances_X[:, None] * stretch.frequencies(exponents, d_model)
    return torch.cat([angles_XY.sin(), angles_XY.cos()], dim=1) * stretch.size


@dataclass(frozen=True)
class Stretch:
    """Angles for `factor` (s) times the `trained` number of keys: NTK-aware scaling or YaRN.

    NTK-aware scaling leaves the fastest frequency and divides the slowest by s. YaRN (Peng et al.
    2023, arXiv 2309.00071) leaves frequencies with 32 turns or more within the trained keys,
    divides frequencies with one turn or less by s, and interpolates linearly in between.
    """

    kind: RopeExtension
    factor: float
    trained: int

    def frequencies(self, exponents: Tensor, width: int) -> Tensor:
        """Return the frequencies base^-exponent, stretched."""
        plain = 1.0 / WAVELENGTH_BASE**exponents
        match self.kind:
            case "none":
                return plain
            case "ntk":
                growth = self.factor ** (width / (width - 2)) if width > 2 else 1.0
                return (WAVELENGTH_BASE * growth) ** -exponents
            case "yarn":
                turns = self.trained * plain / (2 * math.pi)
                kept = ((turns - SLOW_TURNS) / (FAST_TURNS - SLOW_TURNS)).clamp(0.0, 1.0)
                return plain * (kept + (1.0 - kept) / self.factor)
            case _:
                assert_never(self.kind)

    @property
    def size(self) -> float:
        """The factor of encodings; queries and keys both get it, so scores get its square."""
        match self.kind:
            case "none" | "ntk":
                return 1.0
            case "yarn":
                return 0.1 * math.log(self.factor) + 1.0
            case _:
                assert_never(self.kind)


class RelativePositions:
    """Encodings of the distances C-1, ..., 1, 0 of C keys from the last query, cached in a table.

    They are computed in float32 or wider: in bfloat16 only 449 of 768 distances would be distinct.
    The length of a table is a power of two, so that the value of a row does not depend on which
    lengths were requested before.
    """

    def __init__(self, d_model: int, clamp_length: int, stretch: Stretch | None = None) -> None:
        self._d_model = d_model
        self._clamp_length = clamp_length
        self.stretch = stretch
        self._tables: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def encodings_CD(self, num_keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the encodings for `num_keys` keys, farthest first, rounded to `dtype` last."""
        key = (dtype, device)
        table = self._tables.get(key)
        if table is None or len(table) < num_keys:
            # Not an inference tensor, because training may use the table later.
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
        return sinusoids_XD(distances, self._d_model, self.stretch).flip(0).to(dtype)


def rotated_BXNH(values_BXNH: Tensor, encodings_XH: Tensor) -> Tensor:
    """Apply rotary positions (Su et al. 2021) to X rows, given `sinusoids_XD` of width H.

    The pair (c, c + H/2) of a row is rotated by minus its distance times frequency c, so a product
    of two rotated rows depends only on the difference of their distances.
    """
    sin_X1H, cos_X1H = encodings_XH[:, None].chunk(2, dim=-1)
    first, second = values_BXNH.chunk(2, dim=-1)
    return torch.cat(
        [first * cos_X1H + second * sin_X1H, second * cos_X1H - first * sin_X1H], dim=-1
    )


def alibi_slopes_N(num_heads: int, device: torch.device) -> Tensor:
    """Return the slopes of linear biases (Press et al. 2022): 2^(-8/n), 2^(-16/n), ... for n heads.

    If n is not a power of two, the first slopes are those for the next lower power of two,
    the others every second one for the next higher.
    """
    whole = 1 << (num_heads.bit_length() - 1)
    steps = torch.arange(1, whole + 1, dtype=torch.float64, device=device)
    return 2.0 ** (-8.0 / whole * torch.cat([steps, steps - 0.5])[:num_heads])


def t5_buckets(distances: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each distance (Raffel et al. 2020, one direction).

    Half of the buckets hold one distance each, the others grow logarithmically. Distances of
    `max_distance` or more share the last one.
    """
    exact = num_buckets // 2
    growth = (distances.clamp(min=exact).double() / exact).log() / math.log(max_distance / exact)
    # The epsilon exceeds a logarithm's rounding: every platform finds the same first distance of a
    # bucket.
    coarse = exact + (growth * (num_buckets - exact) + 1e-9).long()
    return torch.where(distances < exact, distances, coarse.clamp(max=num_buckets - 1))


class DistanceBias(nn.Module):
    """The bias of each distance and head, [C, N]: alibi's fixed slopes or T5's learned table."""

    bucket_bias: nn.Parameter | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._config = config
        self.bucket_bias = None
        if POSITIONS[config.positions].learns_bias:
            self.bucket_bias = normal(T5_BUCKETS, config.num_heads, std=config.init_std)

    def forward(self, num_keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        distances_C = torch.arange(num_keys - 1, -1, -1, device=device)
        if self.bucket_bias is not None:
            buckets_C = t5_buckets(distances_C, T5_BUCKETS, T5_MAX_DISTANCE)
            return nn.functional.embedding(buckets_C, self.bucket_bias)
        return (-distances_C[:, None] * alibi_slopes_N(self._config.num_heads, device)).to(dtype)
