"""Attention of a layer over its memory and the segment itself (section 3.3 of the paper).

Memory rows may be compressed rows followed by recent ones: only their order matters. Letters of
shapes as in `pretrain.model`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from pretrain.config.model import POSITIONS, AttentionKernel, ModelConfig
from pretrain.model.attention_backends import ScoreTerms, WeightDropout, backend_for
from pretrain.model.compiled import compiled_if, recomputed_if
from pretrain.model.dropout import DropoutStream, Site, drop
from pretrain.model.parameters import Norm, RMSNorm, constant, normal, zeros
from pretrain.model.positions import rotated_BXNH
from pretrain.model.visibility import Visibility

# The inverse of the mean of log n for n up to 1024: queries that see about 400 keys keep their
# size.
INITIAL_LENGTH_SCALE = 0.168


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
        self.compiles = False
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
        *tensors: Tensor | None,
        norm: Norm | None = None,
        visibility: Visibility,
        dropout: DropoutStream | None,
    ) -> Tensor:
        """Return the attended values [B, L, D] for the arguments of `inputs`.

        Arguments are positional, so that ZeRO-3 keeps weights among them until they have gradients.
        """
        # The class' function, not the bound one: it is compiled once for all layers.
        query_BLNH, parts, terms = compiled_if(self.compiles, RelativeAttention.inputs)(
            self, *tensors, norm=norm, visibility=visibility
        )
        return self.read(query_BLNH, parts, terms, visibility=visibility, dropout=dropout)

    def inputs(
        self,
        segment_BLD: Tensor,
        memory_BMD: Tensor,
        positions_CX: Tensor,
        content_bias_NH: Tensor | None,
        position_bias_NH: Tensor | None,
        *,
        norm: Norm | None = None,
        visibility: Visibility,
    ) -> tuple[Tensor, list[Tensor], ScoreTerms]:
        """Return queries, keys and values of memory and segment, and terms, as `read` takes them.

        `positions_CX` are encodings of width D (relative) or H (rope), or biases per head (alibi,
        t5). Segment and memory, which holds the residual stream, pass `norm` first.
        """
        weight, bias = self.key_value_weight, None
        if norm is not None:
            segment_BLD = norm(segment_BLD)
            if memory_BMD.shape[1]:
                # Gain and bias act on the weights. If they acted on memory's rows, their gradients
                # would need the product that yields a gradient of the rows.
                memory_BMD, gain_D, bias_D = norm(memory_BMD, apart=True)
                bias = None if bias_D is None else torch.mv(weight, bias_D)
                weight = weight if gain_D is None else weight * gain_D
        # Memory and segment are projected separately: memory needs no query and mostly no gradient.
        parts = [self._key_values(segment_BLD, self.key_value_weight)]
        if memory_BMD.shape[1]:
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
        """Return keys, normalized given a norm and rotated for rope given positions, and values."""
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
        attend = backend_for(self._kernel, self._config, query_BLNH.device, query_BLNH.dtype)
        weight_dropout = WeightDropout(self._attention_rate, self._layer, dropout)
        inputs = (query_BLNH, parts, terms, visibility, weight_dropout)
        # Scores take the most memory and the least time to repeat (Korthikanti et al. 2022).
        attended_BLNH = recomputed_if(self.recomputes_scores, attend)(*inputs)
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
