"""Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): a state space model with a decay by token.

Letters of shapes as in `pretrain.model`; H is the width of a state, X of a head's values, Y the
channels of all values, keys and queries; in `state_space` Z is the number of chunks and Y the
tokens of one (Y x Y: queries, keys).
"""

import functools

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from pretrain.config.mixer import chunks_of
from pretrain.config.model import AttentionKernel, ModelConfig
from pretrain.mixers.deltanet.facts import CHUNK, TAPS
from pretrain.mixers.mamba2.facts import EXPANSION, widths_of_states
from pretrain.model.compiled import compiled_if, recomputed_if
from pretrain.model.parameters import RMSNorm, normal
from pretrain.model.recurrent_parts import (
    chunk_decays,
    chunked,
    convolved,
    decay_parameters,
    softplus,
    tail_of,
)


class Mamba2(nn.Module):
    """Reads and updates a state S [H, X] per head; no residual, no pre-norm.

    Values x, keys B and queries C pass a causal convolution of each channel over four tokens, and
    SiLU; heads of a group share B and C. With a token's step of each head

        Delta = softplus(W_d u + b)     S <- exp(-exp(A) Delta) S + B (Delta x)^T
        y = S^T C + D x

    the layer's output is W_o RMSNorm(y * SiLU(W_z u)).
    """

    def __init__(self, config: ModelConfig, layer: int, kernel: AttentionKernel = "auto") -> None:
        super().__init__()
        self._widths = widths = widths_of_states(config)
        # Selective checkpointing: the backward pass computes products between tokens again.
        self.recomputes_scores = False
        self.compiles = False
        width, std = config.d_model, config.matrix_init_std
        heads, values, keys = EXPANSION * config.num_heads, widths.values, widths.keys
        self.value_weight = normal(values, width, std=std)
        self.key_weight = normal(keys, width, std=std)  # makes B
        self.query_weight = normal(keys, width, std=std)  # makes C
        self.step_weight = normal(heads, width, std=std)  # W_d
        self.gate_weight = normal(values, width, std=std)  # W_z
        self.output_weight = normal(width, values, std=std)
        self.convolution_weight = normal(TAPS, 1, values + 2 * keys, std=TAPS**-0.5)
        self.convolution_bias = nn.Parameter(torch.zeros(values + 2 * keys))
        self.decay_rate, self.step_bias = decay_parameters(heads, heads)  # A, b
        self.skip = nn.Parameter(torch.ones(heads, 1))  # D
        self.output_norm = RMSNorm(values)

    def forward(
        self,
        segment_BLD: Tensor,
        state_BNHX: Tensor,
        tail_BXY: Tensor,
        documents_BL: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output [B, L, D], and state and tail after the segment.

        The tail is what the convolution still reads of the last three tokens. With
        `documents_BL` (0: of the token before the segment) no token reads an earlier document.
        """
        compiled = functools.partial(compiled_if, self.compiles)
        rows_BXY, gate_BLY, value_BLNX, *inputs = compiled(Mamba2._projected)(
            self, segment_BLD, tail_BXY, documents_BL
        )
        space = recomputed_if(self.recomputes_scores, compiled(state_space))
        read_BLNX, state_BNHX = space(*inputs, documents_BL, state_BNHX.to(value_BLNX.dtype))
        output_BLD = compiled(Mamba2._output)(self, read_BLNX, value_BLNX, gate_BLY)
        return output_BLD, state_BNHX, tail_of(rows_BXY, TAPS - 1, documents_BL)

    def _projected(
        self, segment_BLD: Tensor, tail_BXY: Tensor, documents_BL: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return the rows that the convolution reads, the gate, values, and `state_space`'s inputs.

        The last are queries, keys, values times steps, and the logarithms of decays.
        """
        # One product for all: in one of few columns, as for steps, rounding depends on the lanes.
        weights = (self.value_weight, self.key_weight, self.query_weight, self.step_weight)
        projected_BLX, widths = linear(segment_BLD, torch.cat(weights)), self._widths
        new_BLY, step_BLN = projected_BLX.split(
            [len(self.convolution_bias), len(self.step_bias)], dim=-1
        )
        rows_BXY = torch.cat([tail_BXY, new_BLY], dim=1)
        mixed_BLY = convolved(rows_BXY, self.convolution_weight, documents_BL)
        # In float32 or wider from here on.
        exact = torch.promote_types(segment_BLD.dtype, torch.float32)
        mixed_BLY = silu(mixed_BLY + self.convolution_bias).to(exact)
        value_BLY, *pair = mixed_BLY.split([widths.values, widths.keys, widths.keys], dim=-1)
        value_BLNX = value_BLY.unflatten(-1, (-1, widths.value))
        key_BLGH, query_BLGH = (part.unflatten(-1, (-1, widths.key)) for part in pair)
        step_BLN = softplus(step_BLN.to(exact) + self.step_bias.to(exact))
        log_decay_BLN = -self.decay_rate.to(exact).exp() * step_BLN
        inputs = (query_BLGH, key_BLGH, value_BLNX * step_BLN[..., None], log_decay_BLN)
        return rows_BXY, linear(segment_BLD, self.gate_weight), value_BLNX, *inputs

    def _output(self, read_BLNX: Tensor, value_BLNX: Tensor, gate_BLY: Tensor) -> Tensor:
        read_BLNX = read_BLNX + self.skip.to(read_BLNX.dtype) * value_BLNX
        normed_BLY = self.output_norm(read_BLNX.to(gate_BLY.dtype).flatten(2) * silu(gate_BLY))
        return linear(normed_BLY, self.output_weight)


def state_space(
    query_BLGH: Tensor,
    key_BLGH: Tensor,
    value_BLNX: Tensor,
    log_decay_BLN: Tensor,
    documents_BL: Tensor | None,
    state_BNHX: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return what the tokens read of the states, [B, L, N, X], and the state after the last one.

    With L the decay between two tokens of a chunk and l the one since its start (section 6):

        Y = (L * C B^T) X + l * C S        S <- l_last S + (L_last * B)^T X

    What tokens of one chunk read from each other, and what each chunk adds to the state, are
    products for all chunks together; only the states before chunks are computed one by one.
    """
    num_tokens = value_BLNX.shape[1]
    num_chunks, _ = chunks_of(num_tokens, CHUNK)
    query, key, value, log_decay = (
        chunked(values, num_chunks)
        for values in (query_BLGH, key_BLGH, value_BLNX, log_decay_BLN[..., None])
    )  # [Z, B, N, Y, width]
    between_ZBNYY, since_ZBNY1 = chunk_decays(log_decay, documents_BL)
    groups = query.shape[2]
    between_ZBGNYY = between_ZBNYY.unflatten(2, (groups, -1))
    weights_ZBGNYY = (query @ key.mT)[:, :, :, None] * between_ZBGNYY
    inside_ZBNYX = weights_ZBGNYY.flatten(2, 3) @ value
    since_ZBGNY1 = since_ZBNY1.unflatten(2, (groups, -1))
    reading_ZBNYH = (query[:, :, :, None] * since_ZBGNY1).flatten(2, 3)
    left_ZBNYH = (key[:, :, :, None] * between_ZBGNYY[..., -1, :, None]).flatten(2, 3)
    added_ZBNHX, kept_ZBN11, read = left_ZBNYH.mT @ value, since_ZBNY1[..., -1:, :], []
    of_chunks = (inside_ZBNYX, reading_ZBNYH, kept_ZBN11, added_ZBNHX)
    for inside_BNYX, reading_BNYH, kept_BN11, added_BNHX in zip(
        *map(torch.unbind, of_chunks), strict=True
    ):
        read.append(inside_BNYX + reading_BNYH @ state_BNHX)
        state_BNHX = state_BNHX * kept_BN11 + added_BNHX
    return torch.cat(read, dim=2).transpose(1, 2)[:, :num_tokens], state_BNHX
