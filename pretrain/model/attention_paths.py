"""The same attention computed in plain operations, tiles on the CPU, torch's or our fused kernels.

And how it sees distances: the paper's sinusoid encodings, rotations, and biases per distance. The
last key is at distance 0 from the last query. Whatever is indexed by C runs from the farthest key
to the nearest. No position is absolute, so memory rows need none. Letters of shapes as in
`pretrain.model`; the queries are the last L of the C keys.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from foundation.settings import assert_never
from pretrain.config.engine import Attention, DeltaRule, attention_of, described
from pretrain.config.model import (
    POSITIONS,
    T5_BUCKETS,
    T5_MAX_DISTANCE,
    AttentionKernel,
    ModelConfig,
    RopeExtension,
)
from pretrain.kernels.cpu.attention import relative_attention, relative_shift
from pretrain.kernels.triton.settings import DTYPES, interprets_kernels, unsupported_reason
from pretrain.model.dropout import DropoutStream, Site, drop, realized_rate
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
    """Angles for s = `factor` times as many keys as the `trained` ones: NTK-aware scaling or YaRN.

    NTK-aware scaling leaves the fastest frequency and divides the slowest by s. YaRN (Peng et al.
    2023, arXiv 2309.00071) leaves what turns 32 times or more within the trained keys, divides by s
    what turns once or less, and in between goes linearly from one to the other.
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
        """What encodings are multiplied by: of queries and keys, so that scores have its square."""
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

    If n is not a power of two, the first slopes are those of the next lower power of two, the
    others every second one of the next higher.
    """
    whole = 1 << (num_heads.bit_length() - 1)
    steps = torch.arange(1, whole + 1, dtype=torch.float64, device=device)
    return 2.0 ** (-8.0 / whole * torch.cat([steps, steps - 0.5])[:num_heads])


def t5_buckets_of(distances: Tensor, num_buckets: int, max_distance: int) -> Tensor:
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
            buckets_C = t5_buckets_of(distances_C, T5_BUCKETS, T5_MAX_DISTANCE)
            return nn.functional.embedding(buckets_C, self.bucket_bias)
        return (-distances_C[:, None] * alibi_slopes_N(self._config.num_heads, device)).to(dtype)


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
            if self._config.softmax_scaling == "log_length":
                # Here, since compiled layers would each compute it again.
                _ = self._visibility[key].num_visible_BL
        return self._visibility[key]


def _last(tensor: Tensor, count: int, dim: int) -> Tensor:
    surplus = tensor.shape[dim] - count
    return tensor.narrow(dim, surplus, count).contiguous() if surplus else tensor


@dataclass(frozen=True, kw_only=True)
class ScoreTerms:
    """What softmax gets besides products of queries and keys: terms of the distance, and sinks.

    Of the distance there are the paper's encodings, a bias, or nothing.
    """

    position_CNH: Tensor | None = None  # W_R R
    content_bias_NH: Tensor | None = None  # u
    position_bias_NH: Tensor | None = None  # v
    distance_bias_CN: Tensor | None = None
    sinks_N: Tensor | None = None  # a score of each head that joins the softmax and has no value


@dataclass(frozen=True)
class WeightDropout:
    """Dropout of the attention weights of one layer; without a stream nothing is dropped."""

    rate: float
    layer: int
    stream: DropoutStream | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Visibility:
    """Which keys a segment's queries see, in all layers: bounds for kernels and a mask."""

    num_queries: int
    num_keys: int
    window: int = 0  # as in `forbidden_LC`
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
    """True where query i may not see key j: it comes later or, with a window, is too far away.

    A window hides keys at a distance of `window` or more (`same_length`).
    """
    queries = torch.arange(num_keys - num_queries, num_keys, device=device)
    distances_LC = queries[:, None] - torch.arange(num_keys, device=device)
    forbidden = distances_LC < 0
    return forbidden | (distances_LC >= window) if window else forbidden


# From queries [B, L, N, H] and projected keys and values [B, rows, 2, G, H], memory's rows first,
# to what the queries read, [B, L, N, H].
AttentionPath = Callable[[Tensor, Sequence[Tensor], ScoreTerms, Visibility, WeightDropout], Tensor]


def path_for(
    kernel: AttentionKernel, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> AttentionPath:
    """Return how a model attends there; what a GPU gets is logged once."""
    on_gpu = device.type != "cpu"
    kind, reason = attention_of(kernel, model, on_gpu=on_gpu, is_half=dtype in DTYPES)
    if kind is Attention.TILES and interprets_kernels():
        kind = Attention.FUSED
    if kind is Attention.FUSED and (unsupported := unsupported_reason(device)):
        kind, reason = Attention.PLAIN, f"{reason}; not the fused kernel: {unsupported}"
    if on_gpu:
        log_once(kind, reason)
    match kind:
        case Attention.TILES:
            return tiled_attention
        case Attention.SDPA:
            return sdpa_attention
        case Attention.FUSED:
            return functools.partial(fused_attention, is_bitwise=kernel != "atomic")
        case Attention.PLAIN:
            return plain_attention
        case _:
            assert_never(kind)


def sdpa_attention(
    query_BLNH: Tensor,
    parts: Sequence[Tensor],
    terms: ScoreTerms,
    visibility: Visibility,
    dropout: WeightDropout,
) -> Tensor:
    """Attend with torch's kernels: FlashAttention on a GPU, which any tensor as mask rules out."""
    from torch.nn.attention.bias import causal_lower_right  # loads Triton's language

    assert all(each is None for each in vars(terms).values())
    assert not visibility.window
    assert visibility.documents_BC is None
    assert dropout.stream is None or not dropout.rate
    key_BCGH, value_BCGH = _joined(parts).unbind(2)
    N, H = query_BLNH.shape[2:]
    inputs = [each.transpose(1, 2) for each in (query_BLNH, key_BCGH, value_BCGH)]
    if H % 8:  # FlashAttention's widths are multiples of 8; torch would pad beyond the hooks below
        inputs = [pad(each, (0, -H % 8)) for each in inputs]
    query, key, value = inputs
    mask = causal_lower_right(visibility.num_queries, visibility.num_keys)
    grouped = key_BCGH.shape[2] < N
    # Memory-efficient attention groups no queries with this mask; cuDNN's has no fixed order.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        read_BNLH = scaled_dot_product_attention(
            query, key, value, mask, scale=H**-0.5, enable_gqa=grouped
        )
    if torch.is_deterministic_algorithms_warn_only_enabled() and read_BNLH.grad_fn is not None:
        # FlashAttention's backward pass sums in a fixed order only where others would be errors.
        read_BNLH.grad_fn.register_prehook(lambda _: torch.use_deterministic_algorithms(True))
        read_BNLH.grad_fn.register_hook(
            lambda *_: torch.use_deterministic_algorithms(True, warn_only=True)
        )
    return read_BNLH[..., :H].transpose(1, 2)


def fused_attention(
    query_BLNH: Tensor,
    parts: Sequence[Tensor],
    terms: ScoreTerms,
    visibility: Visibility,
    dropout: WeightDropout,
    is_bitwise: bool = True,
) -> Tensor:
    """Attend with the Triton kernels, which draw their own dropout masks."""
    from pretrain.kernels.triton.attention import fused_relative_attention

    key_BCGH, value_BCGH = _joined(parts).unbind(2)
    rate, lane_keys_B = 0.0, None
    if dropout.stream is not None and dropout.rate:
        rate = dropout.rate
        lane_keys_B = dropout.stream.lane_keys(Site.ATTENTION, dropout.layer, query_BLNH.device)
    return fused_relative_attention(
        query_BLNH,
        key_BCGH,
        value_BCGH,
        terms.position_CNH,
        terms.content_bias_NH,
        terms.position_bias_NH,
        distance_bias_CN=terms.distance_bias_CN,
        max_distance=visibility.window or None,
        documents_BC=visibility.documents_BC,
        dropout=rate,
        dropout_keys_B=lane_keys_B,
        sinks_N=terms.sinks_N,
        deterministic=is_bitwise,
    )


def tiled_attention(
    query_BLNH: Tensor,
    parts: Sequence[Tensor],
    terms: ScoreTerms,
    visibility: Visibility,
    dropout: WeightDropout,
) -> Tensor:
    """Attend with the CPU's tiles; the dropout masks are those of `plain_attention`."""
    keep_NBLC, rate = None, dropout.rate
    if dropout.stream is not None and rate:
        B, L, N, _ = query_BLNH.shape
        shape = (N, B, L, visibility.num_keys)
        keep_NBLC = dropout.stream.keep(shape, rate, Site.ATTENTION, dropout.layer, lane_axis=1)
    return relative_attention(
        query_BLNH,
        parts,
        terms.position_CNH,
        terms.content_bias_NH,
        terms.position_bias_NH,
        distance_bias_CN=terms.distance_bias_CN,
        sinks_N=terms.sinks_N,
        max_distance=visibility.window or None,
        documents_BC=visibility.documents_BC,
        keep_NBLC=keep_NBLC,
        keep_probability=1.0 if keep_NBLC is None else 1.0 - realized_rate(rate),
    )


def plain_attention(
    query_BLNH: Tensor,
    parts: Sequence[Tensor],
    terms: ScoreTerms,
    visibility: Visibility,
    dropout: WeightDropout,
) -> Tensor:
    """Attend with matrix products over all queries and keys, heads first."""
    weights_NBLC, value_NBCH = weights_and_values(query_BLNH, parts, terms, visibility)
    weights_NBLC = drop(
        weights_NBLC, dropout.rate, dropout.stream, Site.ATTENTION, dropout.layer, lane_axis=1
    )
    return torch.matmul(weights_NBLC, value_NBCH).permute(1, 2, 0, 3)


def weights_and_values(
    query_BLNH: Tensor, parts: Sequence[Tensor], terms: ScoreTerms, visibility: Visibility
) -> tuple[Tensor, Tensor]:
    """Return the attention weights [N, B, L, C], without dropout, and what they are weights of.

    With sinks the weights of a query sum to less than 1.
    """
    query_NBLH = query_BLNH.permute(2, 0, 1, 3).contiguous()
    key_value = torch.cat([part.permute(2, 3, 0, 1, 4) for part in parts], dim=3)
    heads_per_key = len(query_NBLH) // key_value.shape[1]
    if heads_per_key > 1:
        key_value = key_value.repeat_interleave(heads_per_key, dim=1)
    key_NBCH, value_NBCH = key_value.unbind(0)
    scores_NBLC = _scores_NBLC(query_NBLH, key_NBCH, terms).add_(visibility.mask)
    if terms.sinks_N is None:
        return torch.softmax(scores_NBLC, dim=-1), value_NBCH
    sinks_NBL1 = terms.sinks_N[:, None, None, None].expand(*scores_NBLC.shape[:3], 1)
    weights_NBLX = torch.softmax(torch.cat([scores_NBLC, sinks_NBL1], dim=-1), dim=-1)
    return weights_NBLX[..., :-1], value_NBCH


def _scores_NBLC(query_NBLH: Tensor, key_NBCH: Tensor, terms: ScoreTerms) -> Tensor:
    """Return the scores of section 3.3; keys after the query hold leftovers of the shift."""
    scale = 1.0 / math.sqrt(query_NBLH.shape[3])
    key_NBHC = key_NBCH.transpose(2, 3)
    if terms.position_CNH is None:
        scores_NBLC = torch.matmul(query_NBLH * scale, key_NBHC)
        if terms.distance_bias_CN is not None:
            bias_NLC = bias_by_distance_NLC(terms.distance_bias_CN, query_NBLH.shape[2])
            scores_NBLC.add_(bias_NLC[:, None])
        return scores_NBLC
    # (query + bias) * scale in one pass; scaling the scores would take a pass over [N, B, L, C].
    content_NBLH, position_NBLH = (
        torch.add(bias_NH[:, None, None] * scale, query_NBLH, alpha=scale)
        for bias_NH in (terms.content_bias_NH, terms.position_bias_NH)
        if bias_NH is not None
    )
    N, B, L, H = query_NBLH.shape
    C = key_NBCH.shape[2]
    # A zero key in front gives the shift its padding column (X = 1 + C) without a copy; one product
    # per head serves all lanes, since the positions are the same for all.
    padded_NXH = pad(terms.position_CNH.transpose(0, 1), (0, 0, 1, 0))
    position_NYX = torch.bmm(position_NBLH.reshape(N, B * L, H), padded_NXH.transpose(1, 2))
    position_NBLC = relative_shift(position_NYX.view(N * B, L, C + 1)).view(N, B, L, C)
    return torch.matmul(content_NBLH, key_NBHC).add_(position_NBLC)


def bias_by_distance_NLC(distance_bias_CN: Tensor, num_queries: int) -> Tensor:
    """Return the bias of each query and key by distance; leftovers where the key is later."""
    padded_NX = pad(distance_bias_CN.t(), (1, 0))
    return relative_shift(padded_NX[:, None].expand(-1, num_queries, -1).contiguous())


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return keys and values [B, C, 2, G, H]; without memory there is one part, and no copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


@functools.cache
def log_once(kind: Attention | DeltaRule, reason: str) -> None:
    """Log how a model computes on a GPU, and why."""
    level = logging.WARNING if kind is Attention.PLAIN else logging.INFO
    logging.getLogger(__name__).log(level, "%s", described(kind, reason))
