"""Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): linear attention with a state of fixed size.

Letters of shapes as in `pretrain.model`; X is the width of a head's values, Y the channels of all
queries, keys and values.

The gated delta rule (Yang et al. 2024, arXiv 2412.06464), in chunks and step by step.

A head's state S [H, X] maps keys of width H to values of width X. Token t first lets S decay by
alpha_t, then replaces the part beta_t of what S has stored under its key, and reads:

    S <- alpha_t S        S <- S + k_t (beta_t (v_t - S^T k_t))^T        o_t = S^T q_t

Keys have norm 1, alpha and beta are between 0 and 1. Both forms compute the same. In chunks, what
tokens of one chunk tell each other is matrix products and one triangular solve for all chunks
together; only S goes from chunk to chunk. Document starts reset S to zero, inside a chunk as well.

Letters of shapes as in `pretrain.model`; X is the width of a head's values, Z the number of chunks
and Y the tokens of one (Y x Y: queries, keys).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, relu, silu
from torch.utils.checkpoint import checkpoint

from pretrain.config.engine import DeltaRule
from pretrain.config.model import CONVOLUTION_WIDTH, DELTANET_CHUNK, AttentionKernel, ModelConfig
from pretrain.kernels.delta_rule import chunk_gated_delta_rule, delta_rule_here
from pretrain.kernels.triton.settings import DTYPES
from pretrain.model.attention_backends import log_once
from pretrain.model.dropout import DropoutStream, Site, drop
from pretrain.model.parameters import RMSNorm, normal, uniform

FORGOTTEN = -128.0  # a logarithm of decay of which exp is 0 in float32, also beside others in a sum
SOFTPLUS_LINEAR = 40.0  # from here on log(1 + exp(x)) is x, also in float64
NORM_SQUARE_EPSILON = 1e-6  # added to the squared norm of a query or key


@dataclass(frozen=True)
class DeltaInputs:
    """What one head's tokens do to its state, for all lanes and heads.

    `delta_rule` takes all in one floating-point type, queries and keys `normalized`. `documents_BL`
    are the tokens' documents, 0 that of the token before the segment; None: one.
    """

    query_BLNH: Tensor
    key_BLNH: Tensor
    value_BLNX: Tensor
    log_decay_BLN: Tensor  # log(alpha), at most 0
    write_BLN: Tensor  # beta
    documents_BL: Tensor | None = None


# From what tokens do and a state [B, N, H, X] to what they read, [B, L, N, X], and the state after.
DeltaRulePath = Callable[[DeltaInputs, Tensor], tuple[Tensor, Tensor]]


def delta_rule_for(
    kernel: AttentionKernel, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> DeltaRulePath:
    """Return how deltanets compute there; what a GPU gets is logged once."""
    on_gpu = device.type != "cpu"
    kind, reason = delta_rule_here(kernel, model, on_gpu=on_gpu, is_half=dtype in DTYPES)
    if on_gpu:
        log_once(kind, reason)
    return fla_delta_rule if kind is DeltaRule.FLA else delta_rule


def fla_delta_rule(inputs: DeltaInputs, state_BNHX: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `delta_rule` returns for the inputs `normalized`, by kernels in half precision.

    A document's sums of decays are rounded by those of documents before it, no more.
    """
    log_decay_BLN = inputs.log_decay_BLN
    if inputs.documents_BL is not None:
        log_decay_BLN = log_decay_BLN.masked_fill(_is_new(inputs.documents_BL), FORGOTTEN)
    return chunk_gated_delta_rule()(
        inputs.query_BLNH,
        inputs.key_BLNH,
        inputs.value_BLNX,
        log_decay_BLN,
        inputs.write_BLN,
        scale=inputs.query_BLNH.shape[-1] ** -0.5,
        initial_state=state_BNHX,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )


def delta_rule(inputs: DeltaInputs, state_BNHX: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the tokens read, [B, L, N, X], and the state after the last one."""
    if inputs.query_BLNH.shape[1] == 1:
        return delta_rule_by_step(inputs, state_BNHX)
    return delta_rule_in_chunks(inputs, state_BNHX)


def delta_rule_by_step(inputs: DeltaInputs, state_BNHX: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `delta_rule` returns, token by token: the definition, and fastest for one."""
    decay_BLN = inputs.log_decay_BLN.exp()
    if inputs.documents_BL is not None:
        decay_BLN = decay_BLN.masked_fill(_is_new(inputs.documents_BL), 0.0)
    read = []
    for t in range(decay_BLN.shape[1]):
        key_BNH1 = inputs.key_BLNH[:, t, :, :, None]
        state_BNHX = state_BNHX * decay_BLN[:, t, :, None, None]
        error_BN1X = inputs.value_BLNX[:, t, :, None] - key_BNH1.mT @ state_BNHX
        state_BNHX = state_BNHX + key_BNH1 @ (inputs.write_BLN[:, t, :, None, None] * error_BN1X)
        read.append(inputs.query_BLNH[:, t, :, None] @ state_BNHX)
    return torch.cat(read, dim=2).transpose(1, 2), state_BNHX


def _is_new(documents_BL: Tensor) -> Tensor:
    """Return which tokens are in another document than the one before, [B, L, 1]."""
    before_B1 = torch.zeros_like(documents_BL[:, :1])
    return (documents_BL.diff(dim=1, prepend=before_B1) != 0)[:, :, None]


def delta_rule_in_chunks(
    inputs: DeltaInputs, state_BNHX: Tensor, chunk_tokens: int = DELTANET_CHUNK
) -> tuple[Tensor, Tensor]:
    """Return what `delta_rule` returns, in chunks of at most `chunk_tokens` tokens.

    The names are the paper's: with Gamma the decay between two tokens of a chunk and gamma the one
    since its start, (I + A)^-1 is the inverse in the WY form of the chunk's updates (section 3.3),

        A = strictly_lower(diag(beta) K K^T * Gamma)
        U, W = (I + A)^-1 diag(beta) [V, diag(gamma) K]        V' = U - W S
        O = diag(gamma) Q S + lower(Q K^T * Gamma) V'
        S <- gamma_last S + (diag(Gamma_last) K)^T V'
    """
    num_tokens = inputs.query_BLNH.shape[1]
    num_chunks = -(-num_tokens // chunk_tokens)
    gates = (inputs.log_decay_BLN[..., None], inputs.write_BLN[..., None])
    query, key, value, log_decay, write = (
        _chunked(values, num_chunks)
        for values in (inputs.query_BLNH, inputs.key_BLNH, inputs.value_BLNX, *gates)
    )  # [Z, B, N, Y, width]
    between_ZBNYY, since_ZBNY1 = _decays(log_decay, inputs.documents_BL)
    written_ZBNYH = key * write
    mixing_ZBNYY = (written_ZBNYH @ key.mT) * between_ZBNYY  # A; the solve reads no diagonal
    updates_ZBNYX, keys_ZBNYH = torch.linalg.solve_triangular(
        mixing_ZBNYY,
        torch.cat([value * write, written_ZBNYH * since_ZBNY1], dim=-1),
        upper=False,
        unitriangular=True,
    ).split([value.shape[-1], key.shape[-1]], dim=-1)  # U, W
    weights_ZBNYY = (query @ key.mT) * between_ZBNYY
    # What a chunk leaves in the state: Gamma_last is the last row.
    left_ZBNHY = (key * between_ZBNYY[..., -1, :, None]).mT
    reading_ZBNYH = query * since_ZBNY1
    read, of_chunks = [], (updates_ZBNYX, keys_ZBNYH, weights_ZBNYY, left_ZBNHY, reading_ZBNYH)
    # Unbound: the gradient of an index would be a tensor of all chunks, for each of them.
    for update_BNYX, key_BNYH, weight_BNYY, left_BNHY, reading_BNYH, since_BNY1 in zip(
        *(values.unbind() for values in (*of_chunks, since_ZBNY1)), strict=True
    ):
        new_BNYX = update_BNYX - key_BNYH @ state_BNHX
        read.append(reading_BNYH @ state_BNHX + weight_BNYY @ new_BNYX)
        state_BNHX = state_BNHX * since_BNY1[:, :, -1:] + left_BNHY @ new_BNYX
    read_BLNX = torch.cat(read, dim=2).transpose(1, 2)
    return read_BLNX[:, :num_tokens], state_BNHX


def _chunked(values_BLNX: Tensor, num_chunks: int) -> Tensor:
    """Return the values as [Z, B, N, Y, X], the last chunk filled with zeros.

    A token whose key, value and logarithm of decay are zero changes nothing.
    """
    missing = -values_BLNX.shape[1] % num_chunks
    padded = pad(values_BLNX, (0, 0, 0, 0, 0, missing)) if missing else values_BLNX
    return padded.unflatten(1, (num_chunks, -1)).permute(1, 0, 3, 2, 4).contiguous()


def _decays(log_decay_ZBNY1: Tensor, documents_BL: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return Gamma [Z, B, N, Y, Y] and gamma [Z, B, N, Y, 1]: 0 across a document's start.

    Gamma's rows are the later tokens; it is 0 above the diagonal.
    """
    num_chunks, size = len(log_decay_ZBNY1), log_decay_ZBNY1.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=log_decay_ZBNY1.device).triu(1)
    hidden, is_carried = later, None
    if documents_BL is not None:
        last_B1, missing = documents_BL[:, -1:], num_chunks * size - documents_BL.shape[1]
        documents_BL = torch.cat([documents_BL, last_B1.expand(-1, missing)], dim=1)
        documents_ZBY = documents_BL.unflatten(1, (num_chunks, size)).transpose(0, 1)
        before_ZB1 = torch.cat([torch.zeros_like(documents_ZBY[:1]), documents_ZBY[:-1]])[..., -1:]
        hidden = later | (documents_ZBY[..., None] != documents_ZBY[..., None, :])
        is_carried = (documents_ZBY == before_ZB1)[:, :, None, :, None]
    # Sums over the earlier tokens of the same document. A cumulative sum would be rounded by the
    # documents before, and on a GPU in no fixed order.
    summed = hidden.logical_not().to(log_decay_ZBNY1.dtype)
    total_ZBNY1 = (log_decay_ZBNY1[..., 0] @ summed.mT)[..., None]
    hidden = hidden if is_carried is None else hidden[:, :, None]
    # Masked before the exponential: the difference is positive where the key is later.
    difference_ZBNYY = total_ZBNY1 - total_ZBNY1.mT
    between_ZBNYY = difference_ZBNYY.masked_fill(hidden, float("-inf")).exp()
    since_ZBNY1 = total_ZBNY1.exp()
    return between_ZBNYY, since_ZBNY1 if is_carried is None else since_ZBNY1 * is_carried


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
        reads of the last three tokens. With documents, counted from that of the token before the
        segment, nothing of an earlier one is read.
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
        each.to(inputs.write_BLN.dtype)
        for each in (inputs.query_BLNH, inputs.key_BLNH, inputs.value_BLNX)
    )
    query_BLNH, key_BLNH = (
        each * (each.square().sum(-1, keepdim=True) + NORM_SQUARE_EPSILON).rsqrt()
        for each in (query_BLNH, key_BLNH)
    )
    scaled_BLNH = query_BLNH * query_BLNH.shape[-1] ** -0.5
    return replace(inputs, query_BLNH=scaled_BLNH, key_BLNH=key_BLNH, value_BLNX=value_BLNX)


def _with_tail(documents_BL: Tensor) -> Tensor:
    """Return the documents of the tail's rows, 0, and of the segment's."""
    return torch.cat(
        [documents_BL.new_zeros(len(documents_BL), CONVOLUTION_WIDTH - 1), documents_BL], dim=1
    )


def _tail(rows_BXY: Tensor, documents_BL: Tensor | None) -> Tensor:
    """Return a copy of the last three rows: those of another document than the last are zero.

    Zero is as good as not there, so a tail needs no documents of its own.
    """
    last_BXY = rows_BXY[:, 1 - CONVOLUTION_WIDTH :]
    if documents_BL is None:
        return last_BXY.clone()
    documents_BX = _with_tail(documents_BL)[:, 1 - CONVOLUTION_WIDTH :]
    return last_BXY * (documents_BX == documents_BL[:, -1:])[:, :, None]
