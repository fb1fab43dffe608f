"""One layer of the model: attention, feed-forward, norms, residuals.

B lanes, L tokens of the segment, M memory rows, C = M + L, D d_model, X what `RelativeAttention` says, N heads, H head
width.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from pretrain.config.run import AttentionKernel, ModelConfig
from pretrain.model.attention import RelativeAttention
from pretrain.model.attention_paths import DistanceTerms
from pretrain.model.dropout import DropoutStream
from pretrain.model.feed_forward import FeedForward
from pretrain.model.masks import Visibility
from pretrain.model.parameters import Norm, norm_of


class TransformerLayer(nn.Module):
    """Attention and feed-forward with residuals; the norm follows each (post, as in the paper) or precedes it (pre)."""

    def __init__(self, config: ModelConfig, layer: int, attention_kernel: AttentionKernel) -> None:
        super().__init__()
        self._pre_norm = config.norm_position == "pre"
        self.attention = RelativeAttention(config, layer, attention_kernel)
        self.attention_norm = norm_of(config)
        self.feed_forward = FeedForward(config, layer)
        self.feed_forward_norm = norm_of(config)

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
        segment_BLD = hidden_BLD
        if self._pre_norm:
            # What is remembered is the residual stream; it meets the norm's present parameters.
            segment_BLD, memory_BMD = (
                self.attention_norm(hidden_BLD),
                self.attention_norm(memory_BMD),
            )
        biases_NH = (content_bias_NH, position_bias_NH)
        attended_BLD = self.attention(
            segment_BLD,
            memory_BMD,
            positions_CX,
            *biases_NH,
            visibility=visibility,
            dropout=dropout,
        )
        return self._completed(hidden_BLD, attended_BLD, dropout)

    def read_cached(
        self,
        hidden_BLD: Tensor,
        remember: Callable[[Tensor], Tensor],
        positions_CX: Tensor,
        terms: DistanceTerms,
        *,
        visibility: Visibility,
    ) -> Tensor:
        """The layer without dropout where a cache is the memory.

        `remember` takes the segment's keys and values [B, L, 2, G, H] and returns those of memory and segment.
        """
        segment_BLD = self.attention_norm(hidden_BLD) if self._pre_norm else hidden_BLD
        key_values = self.attention.placed(
            remember(self.attention.keys_and_values(segment_BLD)), positions_CX
        )
        query_BLNH = self.attention.queries(segment_BLD, positions_CX)
        attended_BLD = self.attention.read(
            query_BLNH, [key_values], terms, visibility=visibility, dropout=None
        )
        return self._completed(hidden_BLD, attended_BLD, None)

    def _completed(
        self, hidden_BLD: Tensor, attended_BLD: Tensor, dropout: DropoutStream | None
    ) -> Tensor:
        """Residuals, norms and the feed-forward layer around what attention read."""
        attended_BLD = hidden_BLD + attended_BLD
        if self._pre_norm:
            return attended_BLD + self.feed_forward(
                self.feed_forward_norm(attended_BLD), dropout=dropout
            )
        attended_BLD = self.attention_norm(attended_BLD)
        return self.feed_forward_norm(
            attended_BLD + self.feed_forward(attended_BLD, dropout=dropout)
        )

    @property
    def input_norm(self) -> Norm | None:
        """What segment and memory pass through before attention."""
        return self.attention_norm if self._pre_norm else None
