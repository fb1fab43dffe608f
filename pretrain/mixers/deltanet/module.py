"""Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): linear attention with a state of fixed size.

Letters of shapes as in `pretrain.model`; X is the width of a head's values, Y the channels of all
queries, keys and values.
"""

import functools

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from pretrain.config.model import AttentionKernel, ModelConfig
from pretrain.mixers.deltanet.delta_rule import DeltaInputs, delta_rule, delta_rule_for, normalized
from pretrain.mixers.deltanet.facts import TAPS, widths_of
from pretrain.model.compiled import compiled_if, recomputed_if
from pretrain.model.parameters import RMSNorm, normal
from pretrain.model.recurrent_parts import convolved, decay_parameters, sigmoid, softplus, tail_of


class GatedDeltaNet(nn.Module):
    """Reads and updates a state [H, X] per head by the gated delta rule; no residual, no pre-norm.

    Queries, keys and values pass a causal convolution of each channel over four tokens, and SiLU.
    Queries and keys then have norm 1. With the rates alpha and beta of each token and head

        alpha = exp(-exp(A) softplus(W_a x + b))        beta = sigmoid(W_b x)

    the layer's output is W_o (RMSNorm(o) * SiLU(W_g x)), o what the head read.
    """

    kind = "deltanet"
    by_channel = False  # whether each channel of a head decays at its own rate
    activate_gate = staticmethod(silu)

    def __init__(self, config: ModelConfig, layer: int, kernel: AttentionKernel = "auto") -> None:
        super().__init__()
        self._config = config
        self._kernel: AttentionKernel = kernel
        widths = widths_of(config, self.kind)
        self._head_width, self._value_width = widths.key, widths.value
        self._heads_per_key = config.num_heads // widths.heads
        self._largest_write = config.mixer_settings(self.kind).largest_write
        # Selective checkpointing: the backward pass computes products between tokens again.
        self.recomputes_scores = False
        self.compiles = False
        heads, width, std = config.num_heads, config.d_model, config.matrix_init_std
        keys, values = widths.keys, widths.values
        self.query_weight = normal(keys, width, std=std)
        self.key_weight = normal(keys, width, std=std)
        self.value_weight = normal(values, width, std=std)
        decays = heads * widths.key if self.by_channel else heads
        self.decay_weight = normal(decays, width, std=std)  # W_a
        self.write_weight = normal(heads, width, std=std)  # W_b
        self.gate_weight = normal(values, width, std=std)
        self.output_weight = normal(width, values, std=std)
        self.convolution_weight = normal(TAPS, 1, 2 * keys + values, std=TAPS**-0.5)
        self.decay_rate, self.decay_bias = decay_parameters(heads, decays)  # A, b
        self.output_norm = RMSNorm(self._value_width)

    def forward(
        self, segment_BLD: Tensor, state_BNHX: Tensor, tail_BXY: Tensor, documents_BL: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output [B, L, D], and state and tail after the segment.

        The tail is what the convolution still reads of the last three tokens. With
        `documents_BL` (0: of the token before the segment) no token reads an earlier document.
        """
        compiled = functools.partial(compiled_if, self.compiles)
        where = (segment_BLD.device, segment_BLD.dtype)
        rule = delta_rule_for(self._kernel, self._config, self.kind, *where)
        rows_BXY, gate_BLX, inputs = compiled(type(self)._projected)(
            self, segment_BLD, tail_BXY, documents_BL, is_normalized=rule is delta_rule
        )
        state_BNHX = state_BNHX.to(inputs.write_BLN.dtype)
        rule = compiled(rule) if rule is delta_rule else rule
        read_BLNX, state_BNHX = recomputed_if(self.recomputes_scores, rule)(inputs, state_BNHX)
        output_BLD = compiled(type(self)._output)(self, read_BLNX, gate_BLX)
        return output_BLD, state_BNHX, tail_of(rows_BXY, TAPS - 1, documents_BL)

    def _projected(
        self,
        segment_BLD: Tensor,
        tail_BXY: Tensor,
        documents_BL: Tensor | None,
        is_normalized: bool,
    ) -> tuple[Tensor, Tensor, DeltaInputs]:
        """Return the rows that the convolution reads, the output's gate, and the rule's inputs."""
        # One product for all: in one of few columns, as for gates, rounding depends on the lanes.
        weights = (self.query_weight, self.key_weight, self.value_weight)
        weights += (self.decay_weight, self.write_weight)
        projected_BLX = linear(segment_BLD, torch.cat(weights))
        widths = (self.convolution_weight.shape[-1], len(self.decay_weight), len(self.write_weight))
        new_BLY, decay_BLN, write_BLN = projected_BLX.split(widths, dim=-1)
        rows_BXY = torch.cat([tail_BXY, new_BLY], dim=1)
        mixed_BLY = silu(convolved(rows_BXY, self.convolution_weight, documents_BL))
        inputs = self._delta_inputs(mixed_BLY, decay_BLN, write_BLN, documents_BL)
        gate_BLX = linear(segment_BLD, self.gate_weight)
        return rows_BXY, gate_BLX, normalized(inputs) if is_normalized else inputs

    def _output(self, read_BLNX: Tensor, gate_BLX: Tensor) -> Tensor:
        normed_BLX = self.output_norm(read_BLNX.to(gate_BLX.dtype)).flatten(2)
        return linear(normed_BLX * self.activate_gate(gate_BLX), self.output_weight)

    def _delta_inputs(
        self, mixed_BLY: Tensor, decay_BLN: Tensor, write_BLN: Tensor, documents_BL: Tensor | None
    ) -> DeltaInputs:
        """Return what the delta rule computes with, decay and write in float32 or wider."""
        gate_dtype = torch.promote_types(mixed_BLY.dtype, torch.float32)
        keys = self.query_weight.shape[0]
        query, key, value = mixed_BLY.split([keys, keys, self.value_weight.shape[0]], dim=-1)
        rate_N, bias_N = self.decay_rate.to(gate_dtype), self.decay_bias.to(gate_dtype)
        query_BLNH, key_BLNH = (
            vectors.unflatten(-1, (-1, self._head_width)) for vectors in (query, key)
        )
        if self._heads_per_key > 1:
            query_BLNH, key_BLNH = (
                vectors.repeat_interleave(self._heads_per_key, dim=2)
                for vectors in (query_BLNH, key_BLNH)
            )
        strength, rate = softplus(decay_BLN.to(gate_dtype) + bias_N), rate_N.exp()
        if self.by_channel:
            strength, rate = strength.unflatten(-1, (-1, self._head_width)), rate[:, None]
        write_BLN = sigmoid(write_BLN.to(gate_dtype))
        if self._largest_write != 1.0:
            write_BLN = write_BLN * self._largest_write
        return DeltaInputs(
            query_BLNH=query_BLNH,
            key_BLNH=key_BLNH,
            value_BLNX=value.unflatten(-1, (-1, self._value_width)),
            log_decay_BLN=-rate * strength,
            write_BLN=write_BLN,
            documents_BL=documents_BL,
        )
