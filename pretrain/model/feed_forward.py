"""The position-wise feed-forward layer. B lanes, L tokens, D d_model, F inner width."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import gelu, linear, relu, silu

from pretrain.config.run import ModelConfig
from pretrain.model.dropout import DropoutStream, Site, drop
from pretrain.model.parameters import normal, zeros


class FeedForward(nn.Module):
    """dropout(W2 dropout(f(W1 x + b1)) + b2) with f relu or gelu; norm and residual are the layer's.

    SwiGLU (Shazeer 2020): dropout(W2 dropout(silu(W x) * (W1 x))), without biases.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self._layer = layer
        self._rate = config.dropout
        self._kind = config.feed_forward
        gated = self._kind == "swiglu"
        self.inner_weight = normal(config.inner_width, config.d_model, std=config.init_std)
        self.inner_bias = None if gated else zeros(config.inner_width)
        self.output_weight = normal(config.d_model, config.inner_width, std=config.init_std)
        self.output_bias = None if gated else zeros(config.d_model)
        if gated:
            self.gate_weight = normal(config.inner_width, config.d_model, std=config.init_std)

    def forward(self, hidden_BLD: Tensor, *, dropout: DropoutStream | None) -> Tensor:
        inner_BLF = linear(hidden_BLD, self.inner_weight, self.inner_bias)
        if self._kind == "swiglu":
            inner_BLF = silu(linear(hidden_BLD, self.gate_weight)) * inner_BLF
        else:
            inner_BLF = relu(inner_BLF) if self._kind == "relu" else gelu(inner_BLF)
        inner_BLF = drop(inner_BLF, self._rate, dropout, Site.FEED_FORWARD_INNER, self._layer)
        output_BLD = linear(inner_BLF, self.output_weight, self.output_bias)
        return drop(output_BLD, self._rate, dropout, Site.FEED_FORWARD_OUTPUT, self._layer)
