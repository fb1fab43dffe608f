"""One layer of the model: attention or a deltanet, and feed-forward, with norms and residuals.

Attention reads the memory and the segment itself (section 3.3 of the paper). Memory rows may be
compressed rows followed by recent ones: only their order matters.

Letters of shapes as in `pretrain.model`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, relu, silu
from torch.utils.checkpoint import checkpoint

from foundation.errors import ConfigError
from foundation.settings import assert_never
from pretrain.config.model import (
    FEED_FORWARDS,
    POSITIONS,
    AttentionKernel,
    FeedForwardKind,
    ModelConfig,
)
from pretrain.model.attention_paths import (
    ScoreTerms,
    Visibility,
    WeightDropout,
    path_for,
    rotated_BXNH,
)
from pretrain.model.dropout import DropoutStream, Site, drop
from pretrain.model.gated_deltanet import GatedDeltaNet
from pretrain.model.parameters import Norm, RMSNorm, constant, norm_of, normal, zeros

# The inverse of the mean of log n for n up to 1024: queries that see about 400 keys keep their
# size.
INITIAL_LENGTH_SCALE = 0.168
MOST_COMPILED = 64  # shapes of a layer, each of which takes about a minute


class RelativeAttention(nn.Module):
    """Queries from the segment, keys and values from memory and segment; no norm, no residual.

    The paper's score of query i and key j is [(q_i + u) . k_j + (q_i + v) . (W_R R_dist)] /
    sqrt(H). With `untie_biases`, u and v are parameters of this layer, else arguments. Other
    positions use q_i . k_j / sqrt(H), with both rotated (rope) or plus a bias of the distance
    (alibi, t5). With `attention_sinks` the softmax has one more score, a parameter of each head,
    whose value is zero.
    """

    def __init__(self, config: ModelConfig, layer: int, kernel: AttentionKernel = "auto") -> None:
        super().__init__()
        width = config.num_heads * config.head_width
        std = config.matrix_init_std
        self._layer = layer
        self._kernel: AttentionKernel = kernel
        # Selective checkpointing: the backward pass computes the scores again.
        self.recomputes_scores = False
        self._positions = POSITIONS[config.positions]
        self._head_width = config.head_width
        self._config = config
        self._num_key_heads = config.key_heads
        self._rate = config.dropout
        self._attention_rate = config.attention_dropout
        self.query_weight = normal(width, config.d_model, std=std)
        key_width = config.key_heads * config.head_width
        self.key_value_weight = normal(2 * key_width, config.d_model, std=std)
        if self._positions.projects_encodings:
            self.position_weight = normal(width, config.d_model, std=std)
        self.output_weight = normal(config.d_model, width, std=std)
        if config.untie_biases:
            shape = (config.num_heads, config.head_width)
            self.content_bias = normal(*shape, std=config.init_std)
            self.position_bias = normal(*shape, std=config.init_std)
        self.query_norm = RMSNorm(config.head_width) if config.query_key_norm else None
        self.key_norm = RMSNorm(config.head_width) if config.query_key_norm else None
        self.length_scale = None
        if config.softmax_scaling == "log_length":
            self.length_scale = constant(config.num_heads, value=INITIAL_LENGTH_SCALE)
        self.sinks = zeros(config.num_heads) if config.attention_sinks else None

    def forward(
        self,
        segment_BLD: Tensor,
        memory_BMD: Tensor,
        positions_CX: Tensor,
        content_bias_NH: Tensor | None,
        position_bias_NH: Tensor | None,
        memory_gain_D: Tensor | None = None,
        memory_bias_D: Tensor | None = None,
        *,
        visibility: Visibility,
        dropout: DropoutStream | None,
        compiles: bool = False,
    ) -> Tensor:
        """Return the attended values [B, L, D].

        `positions_CX` are encodings of width D (relative) or H (rope), or biases per head (alibi,
        t5). `memory_gain_D` and `memory_bias_D` are of a norm whose rest the memory has passed;
        positional, so that ZeRO-3 keeps the weights until they have their gradients.
        """
        given = (segment_BLD, memory_BMD, positions_CX, content_bias_NH, position_bias_NH)
        given += (memory_gain_D, memory_bias_D)
        query_BLNH, parts, terms = compiled_if(compiles, RelativeAttention.inputs)(
            self, *given, visibility=visibility
        )
        return self.read(query_BLNH, parts, terms, visibility=visibility, dropout=dropout)

    def inputs(
        self,
        segment_BLD: Tensor,
        memory_BMD: Tensor,
        positions_CX: Tensor,
        content_bias_NH: Tensor | None,
        position_bias_NH: Tensor | None,
        memory_gain_D: Tensor | None = None,
        memory_bias_D: Tensor | None = None,
        *,
        visibility: Visibility,
    ) -> tuple[Tensor, list[Tensor], ScoreTerms]:
        """Return queries, keys and values of memory and segment, and terms, as `read` takes them.

        The arguments are those of `forward`.
        """
        # Memory and segment are projected separately: memory needs no query and mostly no gradient.
        parts = [self._key_values(segment_BLD, self.key_value_weight)]
        if memory_BMD.shape[1]:
            # Gain and bias act on the weights: so their gradients need no product that yields one
            # for memory's rows.
            weight = self.key_value_weight
            bias = None if memory_bias_D is None else torch.mv(weight, memory_bias_D)
            weight = weight if memory_gain_D is None else weight * memory_gain_D
            parts.insert(0, self._key_values(memory_BMD, weight, bias))
        if self.key_norm is not None or self._positions.rotates:  # all rows in one pass
            joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            parts = [self._with_keys(joined, self.key_norm, positions_CX)]
        query_BLNH = self.projected_queries(segment_BLD)
        query_BLNH = self.queries(query_BLNH, positions_CX, visibility)
        return query_BLNH, parts, self.terms(positions_CX, content_bias_NH, position_bias_NH)

    def projected_queries(self, segment_BLD: Tensor) -> Tensor:
        """Return the queries regardless of their positions, [B, L, N, H]."""
        query_BLNH = self._split_heads(linear(segment_BLD, self.query_weight))
        return query_BLNH if self.query_norm is None else self.query_norm(query_BLNH)

    def queries(self, query_BLNH: Tensor, positions_CX: Tensor, visibility: Visibility) -> Tensor:
        """Return `projected_queries` as `read` takes them, rotated and scaled."""
        if self._positions.rotates:
            query_BLNH = rotated_BXNH(query_BLNH, positions_CX[-query_BLNH.shape[1] :])
        return self._scaled_by_length(query_BLNH, visibility)

    def keys_and_values(self, source_BXD: Tensor) -> Tensor:
        """Return keys and values of X rows, [B, X, 2, G, H], regardless of their positions."""
        return self._with_keys(self._key_values(source_BXD, self.key_value_weight), self.key_norm)

    def placed(self, key_values: Tensor, positions_XX: Tensor) -> Tensor:
        """Rotate the keys to their distances if positions are rotations (rope)."""
        return self._with_keys(key_values, None, positions_XX)

    def _key_values(self, rows_BXD: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(rows_BXD, weight, bias).unflatten(-1, (2, self._num_key_heads, -1))

    def _with_keys(
        self, key_values: Tensor, norm: RMSNorm | None, positions_XX: Tensor | None = None
    ) -> Tensor:
        """Return keys normalized, if there is a norm, and rotated, if they are; values as given."""
        positions_XX = positions_XX if self._positions.rotates else None
        if norm is None and positions_XX is None:
            return key_values
        key_BXGH, value_BXGH = key_values.unbind(2)
        key_BXGH = key_BXGH if norm is None else norm(key_BXGH)
        if positions_XX is not None:
            key_BXGH = rotated_BXNH(key_BXGH, positions_XX)
        return torch.stack((key_BXGH, value_BXGH), dim=2)

    def terms(
        self, positions_CX: Tensor, content_bias_NH: Tensor | None, position_bias_NH: Tensor | None
    ) -> ScoreTerms:
        """Return what distances add to the scores, and the sinks."""
        if self._positions.adds_bias:
            return ScoreTerms(distance_bias_CN=positions_CX, sinks_N=self.sinks)
        if not self._positions.projects_encodings:
            return ScoreTerms(sinks_N=self.sinks)
        if content_bias_NH is None or position_bias_NH is None:
            content_bias_NH, position_bias_NH = self.content_bias, self.position_bias
        return ScoreTerms(
            position_CNH=self._split_heads(linear(positions_CX, self.position_weight)),
            content_bias_NH=content_bias_NH,
            position_bias_NH=position_bias_NH,
            sinks_N=self.sinks,
        )

    def read(
        self,
        query_BLNH: Tensor,
        parts: Sequence[Tensor],
        terms: ScoreTerms,
        *,
        visibility: Visibility,
        dropout: DropoutStream | None,
    ) -> Tensor:
        """Return what the queries read from the C keys and values in `parts`, [B, L, D]."""
        attend = path_for(self._kernel, self._config, query_BLNH.device, query_BLNH.dtype)
        weight_dropout = WeightDropout(self._attention_rate, self._layer, dropout)
        inputs = (query_BLNH, parts, terms, visibility, weight_dropout)
        if self.recomputes_scores and torch.is_grad_enabled():
            # Scores take the most memory and the least time to repeat (Korthikanti et al. 2022).
            attended_BLNH = checkpoint(
                attend, *inputs, use_reentrant=False, preserve_rng_state=False
            )
        else:
            attended_BLNH = attend(*inputs)
        output_BLD = linear(attended_BLNH.flatten(2), self.output_weight)
        return drop(output_BLD, self._rate, dropout, Site.ATTENTION_OUTPUT, self._layer)

    def _scaled_by_length(self, query_BLNH: Tensor, visibility: Visibility) -> Tensor:
        """Multiply queries that see n keys by s log n (Nakanishi 2025), with s of their head."""
        if self.length_scale is None:
            return query_BLNH
        precise = torch.promote_types(query_BLNH.dtype, torch.float32)
        logs_BL1 = visibility.num_visible_BL.to(precise).log()[:, :, None]
        factors_BLN = logs_BL1 * self.length_scale.to(precise)
        return query_BLNH * factors_BLN.to(query_BLNH.dtype)[..., None]

    def _split_heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self._head_width))


def compiled_if(compiles: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, compiled in training: evaluation has batches of any length.

    Attention is between compiled functions, so that no graph breaks at a kernel of ours.
    """
    if not (compiles and torch.is_grad_enabled()):
        return function
    return functools.partial(_run_compiled, function)


def _run_compiled(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    from torch._dynamo.exc import FailOnRecompileLimitHit  # loads torch's compiler

    # Anew for each length of a memory that fills, once for all layers.
    torch._dynamo.config.recompile_limit = MOST_COMPILED
    try:
        return _compiled(function)(*inputs, **options)
    except FailOnRecompileLimitHit:
        raise ConfigError(
            f"engine.compile=true: found more than {MOST_COMPILED} shapes of a layer's rows, "
            "expected few lengths while memory fills; use longer segments, or do not compile"
        ) from None


_compiled = functools.cache(functools.partial(torch.compile, fullgraph=True, dynamic=False))


class FeedForward(nn.Module):
    """dropout(W2 dropout(f(W1 x + b1)) + b2); the layer adds norm and residual.

    f is relu, its square (So et al. 2021) or gelu. SwiGLU (Shazeer 2020) is
    dropout(W2 dropout(silu(W x) * (W1 x))), without biases.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self._layer = layer
        self._rate = config.dropout
        self._kind: FeedForwardKind = config.feed_forward
        self._traits = FEED_FORWARDS[self._kind]
        gated = self._traits.is_gated
        std = config.matrix_init_std
        self.inner_weight = normal(config.inner_width, config.d_model, std=std)
        self.inner_bias = None if gated else zeros(config.inner_width)
        self.output_weight = normal(config.d_model, config.inner_width, std=std)
        self.output_bias = None if gated else zeros(config.d_model)
        if gated:
            self.gate_weight = normal(config.inner_width, config.d_model, std=std)

    def forward(self, hidden_BLD: Tensor, *, dropout: DropoutStream | None) -> Tensor:
        inner_BLF = linear(hidden_BLD, self.inner_weight, self.inner_bias)
        options = (self._rate, dropout, Site.FEED_FORWARD_INNER, self._layer)
        if self._traits.drops_first:
            inner_BLF = self._activated(drop(inner_BLF, *options), hidden_BLD)
        else:
            inner_BLF = drop(self._activated(inner_BLF, hidden_BLD), *options)
        output_BLD = linear(inner_BLF, self.output_weight, self.output_bias)
        return drop(output_BLD, self._rate, dropout, Site.FEED_FORWARD_OUTPUT, self._layer)

    def _activated(self, inner_BLF: Tensor, hidden_BLD: Tensor) -> Tensor:
        match self._kind:
            case "relu":
                return relu(inner_BLF)
            case "relu2":
                return relu(inner_BLF).square()
            case "gelu":
                return gelu(inner_BLF)
            case "swiglu":
                return silu(linear(hidden_BLD, self.gate_weight)) * inner_BLF
            case _:
                assert_never(self._kind)


class ResidualLayer(nn.Module):
    """What layers of all kinds have: norms after (post) or before (pre) each part, feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._norms_inputs = config.norm_position == "pre"
        # Compile what lies between two attentions, in training.
        self.compiles = False

    def _add_feed_forward(self, config: ModelConfig, layer: int) -> None:
        """Draw the norms and the feed-forward layer; what tokens are mixed by is drawn first."""
        self.attention_norm = norm_of(config)
        self.feed_forward = FeedForward(config, layer)
        self.feed_forward_norm = norm_of(config)

    def _completed(
        self, hidden_BLD: Tensor, attended_BLD: Tensor, dropout: DropoutStream | None
    ) -> Tensor:
        """Add residuals, norms and the feed-forward layer to what attention read."""
        hidden_BLD = hidden_BLD + attended_BLD
        if self._norms_inputs:
            normed_BLD = self.feed_forward_norm(hidden_BLD)
            return hidden_BLD + self.feed_forward(normed_BLD, dropout=dropout)
        hidden_BLD = self.attention_norm(hidden_BLD)
        return self.feed_forward_norm(hidden_BLD + self.feed_forward(hidden_BLD, dropout=dropout))

    @property
    def input_norm(self) -> Norm | None:
        """The norm that segment and memory pass before attention, if any."""
        return self.attention_norm if self._norms_inputs else None


class DeltaNetLayer(ResidualLayer):
    """A Gated DeltaNet in attention's place: it reads and updates a state of fixed size."""

    def __init__(self, config: ModelConfig, layer: int, kernel: AttentionKernel) -> None:
        super().__init__(config)
        self.deltanet = GatedDeltaNet(config, layer, kernel)
        self._add_feed_forward(config, layer)

    def forward(
        self,
        hidden_BLD: Tensor,
        state_BNHX: Tensor,
        tail_BXY: Tensor,
        documents_BL: Tensor | None,
        *,
        dropout: DropoutStream | None,
        carries_gradient: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the layer's output, and the state and the tail after it (see `GatedDeltaNet`)."""
        segment_BLD = self.attention_norm(hidden_BLD) if self._norms_inputs else hidden_BLD
        inputs = (segment_BLD, state_BNHX, tail_BXY, documents_BL)
        read_BLD, state_BNHX, tail_BXY = self.deltanet(
            *inputs, dropout=dropout, carries_gradient=carries_gradient
        )
        completed = compiled_if(self.compiles, ResidualLayer._completed)
        output_BLD = completed(self, hidden_BLD, read_BLD, dropout)
        return output_BLD, state_BNHX, tail_BXY

    @property
    def mixer(self) -> GatedDeltaNet:
        """The part in which tokens read each other."""
        return self.deltanet


class TransformerLayer(ResidualLayer):
    """Attention and feed-forward with residuals; a norm after (post) or before (pre) each."""

    def __init__(self, config: ModelConfig, layer: int, attention_kernel: AttentionKernel) -> None:
        super().__init__(config)
        self.attention = RelativeAttention(config, layer, attention_kernel)
        self._add_feed_forward(config, layer)

    def forward(
        self,
        hidden_BLD: Tensor,
        memory_BMD: Tensor,
        positions_CX: Tensor,
        content_bias_NH: Tensor | None,
        position_bias_NH: Tensor | None,
        *,
        visibility: Visibility,
        dropout: DropoutStream | None,
    ) -> Tensor:
        segment_BLD, apart = hidden_BLD, []
        if self._norms_inputs:
            # Memory holds the residual stream, so it passes the norm with its current parameters.
            segment_BLD = self.attention_norm(hidden_BLD)
            if memory_BMD.shape[1]:
                memory_BMD, *apart = self.attention_norm(memory_BMD, apart=True)
        attended_BLD = self.attention(
            *(segment_BLD, memory_BMD, positions_CX, content_bias_NH, position_bias_NH, *apart),
            visibility=visibility,
            dropout=dropout,
            compiles=self.compiles,
        )
        completed = compiled_if(self.compiles, ResidualLayer._completed)
        return completed(self, hidden_BLD, attended_BLD, dropout)

    def read_cached(
        self,
        hidden_BLD: Tensor,
        remember: Callable[[Tensor], Tensor],
        positions_CX: Tensor,
        terms: ScoreTerms,
        *,
        visibility: Visibility,
    ) -> Tensor:
        """Apply the layer without dropout, with a cache of keys and values as the memory.

        `remember` takes the keys and values of the segment, [B, L, 2, G, H], and returns those of
        memory and segment.
        """
        segment_BLD = self.attention_norm(hidden_BLD) if self._norms_inputs else hidden_BLD
        key_values = remember(self.attention.keys_and_values(segment_BLD))
        attended_BLD = self.attention.read(
            self.attention.queries(
                self.attention.projected_queries(segment_BLD), positions_CX, visibility
            ),
            [self.attention.placed(key_values, positions_CX)],
            terms,
            visibility=visibility,
            dropout=None,
        )
        return self._completed(hidden_BLD, attended_BLD, None)

    @property
    def mixer(self) -> RelativeAttention:
        """The part in which tokens read each other."""
        return self.attention


def layer_of(
    config: ModelConfig, layer: int, kernel: AttentionKernel
) -> TransformerLayer | DeltaNetLayer:
    """Return a new layer, counted from 0, of the configured kind."""
    kind = config.layer_kind(layer)
    match kind:
        case "attention":
            return TransformerLayer(config, layer, kernel)
        case "deltanet":
            return DeltaNetLayer(config, layer, kernel)
        case _:
            assert_never(kind)
