"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464), in chunks and step by step.

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
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from pretrain.config.engine import DeltaRule
from pretrain.config.model import DELTANET_CHUNK, AttentionKernel, ModelConfig
from pretrain.kernels.flash_linear_attention import chunk_gated_delta_rule, delta_rule_here
from pretrain.kernels.triton.settings import DTYPES
from pretrain.model.attention_backends import log_once

FORGOTTEN = -128.0  # log of a decay that is 0 in float32, also as a summand


@dataclass(frozen=True)
class DeltaInputs:
    """What one head's tokens do to its state, for all lanes and heads.

    `delta_rule` takes all in one floating-point type, queries and keys `normalized`. `documents_BL`
    are the tokens' documents; 0: the same as before the segment; None: one.
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

    Earlier documents affect a document's sums of decays by rounding alone.
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
    """Return which tokens are in another document than the previous token, [B, L, 1]."""
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
