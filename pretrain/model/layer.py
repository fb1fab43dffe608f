"""One layer of the model: attention or a deltanet, and feed-forward, with norms and residuals.

Letters of shapes as in `pretrain.model`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from foundation.settings import assert_never
from pretrain.config.model import AttentionKernel, ModelConfig
from pretrain.model.attention import RelativeAttention
from pretrain.model.attention_backends import ScoreTerms
from pretrain.model.compiled import compiled_if
from pretrain.model.dropout import DropoutStream
from pretrain.model.feed_forward import FeedForward
from pretrain.model.gated_deltanet import GatedDeltaNet
from pretrain.model.parameters import Norm, new_norm
from pretrain.model.visibility import Visibility


class ResidualLayer(nn.Module):
    """What layers of all kinds have: norms after (post) or before (pre) each part, feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._norms_inputs = config.norm_position == "pre"
        # Compile what lies between two attentions, in training.
        self.compiles = False

    def _add_feed_forward(self, config: ModelConfig, layer: int) -> None:
        """Draw the norms and the feed-forward layer; what tokens are mixed by is drawn first."""
        self.attention_norm = new_norm(config)
        self.feed_forward = FeedForward(config, layer)
        self.feed_forward_norm = new_norm(config)

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
        """The part where tokens read each other."""
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
        *positions: Tensor | None,
        visibility: Visibility,
        dropout: DropoutStream | None,
    ) -> Tensor:
        """Return the layer's output; `positions` as in `RelativeAttention.inputs`, u and v."""
        segment_BLD, gain_and_bias = hidden_BLD, []
        if self._norms_inputs:
            # Memory holds the residual stream, so it passes the norm with its current parameters.
            segment_BLD = self.attention_norm(hidden_BLD)
            if memory_BMD.shape[1]:
                memory_BMD, *gain_and_bias = self.attention_norm(memory_BMD, apart=True)
        attended_BLD = self.attention(
            segment_BLD,
            memory_BMD,
            *positions,
            *gain_and_bias,
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

        `remember` takes the keys and values of the segment, [B, L, 2, G, H], and returns them
        for memory and segment.
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
        """The part where tokens read each other."""
        return self.attention


def new_layer(
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
