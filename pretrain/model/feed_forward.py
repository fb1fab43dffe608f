"""The feed-forward part of a layer.

Letters of shapes as in `pretrain.model`.
"""

from torch import Tensor, nn
from torch.nn.functional import gelu, linear, relu, silu

from foundation.settings import assert_never
from pretrain.config.model import FEED_FORWARDS, FeedForwardKind, ModelConfig
from pretrain.model.dropout import DropoutStream, Site, drop
from pretrain.model.parameters import normal, zeros


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
