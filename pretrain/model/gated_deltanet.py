"""Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): linear attention with a state of fixed size.

Letters of shapes as in `pretrain.model`; X is the width of a head's values, Y the channels of all
queries, keys and values.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, relu, silu
from torch.utils.checkpoint import checkpoint

from pretrain.config.model import CONVOLUTION_WIDTH, AttentionKernel, ModelConfig
from pretrain.model.delta_rule import DeltaInputs, delta_rule, delta_rule_for
from pretrain.model.dropout import DropoutStream, Site, drop
from pretrain.model.parameters import RMSNorm, normal, uniform

SOFTPLUS_LINEAR = 40.0  # from here on log(1 + exp(x)) is x, also in float64
NORM_SQUARE_EPSILON = 1e-6  # added to the squared norm of a query or key


class GatedDeltaNet(nn.Module):
    """Reads and updates a state [H, X] per head by the gated delta rule; no norm, no residual.

    Queries, keys and values pass a causal convolution of each channel over four tokens, and SiLU.
    Queries and keys then have norm 1. With the rates alpha and beta of each token and head

        alpha = exp(-exp(A) softplus(W_a x + b))        beta = sigmoid(W_b x)

    the layer's output is W_o (RMSNorm(o) * SiLU(W_g x)), o what the head read.
    """

    def __init__(self, config: ModelConfig, layer: int, kernel: AttentionKernel = "auto") -> None:
        super().__init__()
        self._layer, self._config = layer, config
        self._kernel: AttentionKernel = kernel
        self._rate = config.dropout
        self._head_width, self._value_width = config.head_width, config.deltanet_value_width
        # Selective checkpointing: the backward pass computes products between tokens again.
        self.recomputes_scores = False
        heads, width, std = config.num_heads, config.d_model, config.matrix_init_std
        keys, values = heads * self._head_width, heads * self._value_width
        self.query_weight = normal(keys, width, std=std)
        self.key_weight = normal(keys, width, std=std)
        self.value_weight = normal(values, width, std=std)
        self.decay_weight = normal(heads, width, std=std)  # W_a
        self.write_weight = normal(heads, width, std=std)  # W_b
        self.gate_weight = normal(values, width, std=std)
        self.output_weight = normal(width, values, std=std)
        taps = CONVOLUTION_WIDTH
        self.convolution_weight = normal(taps, 1, 2 * keys + values, std=taps**-0.5)
        # As in Mamba-2: exp(A) is uniform, and softplus(b) is between 0.001 and 0.1, uniform in its
        # logarithm. The slowest heads forget a token's trace after a thousand tokens.
        self.decay_rate = nn.Parameter(uniform(heads, low=1.0, high=16.0).log())  # A
        self.decay_bias = nn.Parameter(  # b
            uniform(heads, low=-6.908, high=-2.303).exp().expm1().log()
        )
        self.output_norm = RMSNorm(self._value_width)

    def forward(
        self,
        segment_BLD: Tensor,
        state_BNHX: Tensor,
        tail_BXY: Tensor,
        documents_BL: Tensor | None,
        *,
        dropout: DropoutStream | None,
        carries_gradient: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output [B, L, D], and state and tail after the segment.

        These two have a gradient only if `carries_gradient`. The tail is what the convolution still
        reads of the last three tokens. With documents, counted from the token before the segment,
        nothing of an earlier one is read.
        """
        # The gates, too: a product with as few columns as heads is rounded by the number of lanes.
        weights = (self.query_weight, self.key_weight, self.value_weight)
        weights += (self.decay_weight, self.write_weight)
        projected_BLX = linear(segment_BLD, torch.cat(weights))
        channels, heads = self.convolution_weight.shape[-1], self.decay_weight.shape[0]
        new_BLY, decay_BLN, write_BLN = projected_BLX.split([channels, heads, heads], dim=-1)
        rows_BXY = torch.cat([tail_BXY, new_BLY], dim=1)
        mixed_BLY = silu(self._convolved(rows_BXY, documents_BL))
        inputs = self._delta_inputs(mixed_BLY, decay_BLN, write_BLN, documents_BL)
        rule = delta_rule_for(self._kernel, self._config, segment_BLD.device, segment_BLD.dtype)
        if rule is delta_rule:
            inputs = normalized(inputs)
        state_BNHX = state_BNHX.to(inputs.write_BLN.dtype)
        if self.recomputes_scores and torch.is_grad_enabled():
            read_BLNX, state_BNHX = checkpoint(
                rule, inputs, state_BNHX, use_reentrant=False, preserve_rng_state=False
            )
        else:
            read_BLNX, state_BNHX = rule(inputs, state_BNHX)
        normed_BLX = self.output_norm(read_BLNX.to(segment_BLD.dtype)).flatten(2)
        output_BLD = linear(
            normed_BLX * silu(linear(segment_BLD, self.gate_weight)), self.output_weight
        )
        output_BLD = drop(output_BLD, self._rate, dropout, Site.ATTENTION_OUTPUT, self._layer)
        if not carries_gradient:
            state_BNHX, rows_BXY = state_BNHX.detach(), rows_BXY.detach()
        return output_BLD, state_BNHX, _tail(rows_BXY, documents_BL)

    def _convolved(self, rows_BXY: Tensor, documents_BL: Tensor | None) -> Tensor:
        """Return each token's convolution over itself and the three before, in its document."""
        num_tokens, before = rows_BXY.shape[1] - CONVOLUTION_WIDTH + 1, CONVOLUTION_WIDTH - 1
        documents_BX = None if documents_BL is None else _with_tail(documents_BL)
        mixed_BLY = rows_BXY[:, before:] * self.convolution_weight[before]
        for tap in range(before):
            tap_BLY = rows_BXY[:, tap : tap + num_tokens]
            if documents_BX is not None:
                is_same_BL = documents_BX[:, tap : tap + num_tokens] == documents_BX[:, before:]
                tap_BLY = tap_BLY * is_same_BL[:, :, None]
            mixed_BLY = torch.addcmul(mixed_BLY, tap_BLY, self.convolution_weight[tap])
        return mixed_BLY

    def _delta_inputs(
        self, mixed_BLY: Tensor, decay_BLN: Tensor, write_BLN: Tensor, documents_BL: Tensor | None
    ) -> DeltaInputs:
        """Return what the delta rule computes with, the gates in float32 or wider."""
        exact = torch.promote_types(mixed_BLY.dtype, torch.float32)
        keys = self.query_weight.shape[0]
        query, key, value = mixed_BLY.split([keys, keys, self.value_weight.shape[0]], dim=-1)
        rate_N, bias_N = self.decay_rate.to(exact), self.decay_bias.to(exact)
        return DeltaInputs(
            query_BLNH=query.unflatten(-1, (-1, self._head_width)),
            key_BLNH=key.unflatten(-1, (-1, self._head_width)),
            value_BLNX=value.unflatten(-1, (-1, self._value_width)),
            log_decay_BLN=-rate_N.exp() * _softplus(decay_BLN.to(exact) + bias_N),
            write_BLN=(-_softplus(-write_BLN.to(exact))).exp(),  # sigmoid
            documents_BL=documents_BL,
        )


def _softplus(values: Tensor) -> Tensor:
    """Return log(1 + exp(x)).

    Torch's own, and its sigmoid, round the last few values of a tensor in another way than the
    others. These tensors are so small that a lane's gates would depend on the number of lanes.
    """
    return values.clamp(max=SOFTPLUS_LINEAR).exp().log1p() + relu(values - SOFTPLUS_LINEAR)


def normalized(inputs: DeltaInputs) -> DeltaInputs:
    """Return the inputs in the gates' type, queries and keys with norm 1, the scores' scale added.

    Tiny vectors become smaller, and zero stays zero.
    """
    query_BLNH, key_BLNH, value_BLNX = (
        vectors.to(inputs.write_BLN.dtype)
        for vectors in (inputs.query_BLNH, inputs.key_BLNH, inputs.value_BLNX)
    )
    query_BLNH, key_BLNH = (
        vectors * (vectors.square().sum(-1, keepdim=True) + NORM_SQUARE_EPSILON).rsqrt()
        for vectors in (query_BLNH, key_BLNH)
    )
    scaled_BLNH = query_BLNH * query_BLNH.shape[-1] ** -0.5
    return replace(inputs, query_BLNH=scaled_BLNH, key_BLNH=key_BLNH, value_BLNX=value_BLNX)


def _with_tail(documents_BL: Tensor) -> Tensor:
    """Return the documents of the tail's rows, 0, and of the segment's."""
    return torch.cat(
        [documents_BL.new_zeros(len(documents_BL), CONVOLUTION_WIDTH - 1), documents_BL], dim=1
    )


def _tail(rows_BXY: Tensor, documents_BL: Tensor | None) -> Tensor:
    """Return a copy of the last three rows: rows of another document than the last are zero.

    Zero is as good as not there, so a tail needs no documents of its own.
    """
    last_BXY = rows_BXY[:, 1 - CONVOLUTION_WIDTH :]
    if documents_BL is None:
        return last_BXY.clone()
    documents_BX = _with_tail(documents_BL)[:, 1 - CONVOLUTION_WIDTH :]
    return last_BXY * (documents_BX == documents_BL[:, -1:])[:, :, None]
