"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464), in chunks and step by step.

A head's state S [H, X] maps keys of width H to values of width X. Token t first lets S decay by
alpha_t, then replaces the part beta_t of what S has stored under its key, and reads:

    S <- alpha_t S        S <- S + k_t (beta_t (v_t - S^T k_t))^T        o_t = S^T q_t
with keys of norm 1, alpha and beta between 0 and 1. Both forms compute the same. In chunks, what
tokens of one chunk tell each other is matrix products and one triangular solve for all chunks
together; only S goes from chunk to chunk. Document starts reset S to zero, inside a chunk as well.

Letters of shapes as in `pretrain.model`; X is the width of a head's values, Z the number of chunks
and Y the tokens of one (Y x Y: queries, keys).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pretrain.config.mixer import chunks_of
from pretrain.config.model import AttentionKernel, ModelConfig
from pretrain.kernels.flash_linear_attention import chunk_gated_delta_rule
from pretrain.kernels.triton.settings import DTYPES
from pretrain.mixers.deltanet.facts import CHANNEL_CHUNK, CHUNK, fla_here, rule_text
from pretrain.model.attention_backends import log_once
from pretrain.model.recurrent_parts import chunk_decays, chunked, is_new_BL1

NORM_SQUARE_EPSILON = 1e-6  # added to the squared norm of a query or key
FORGOTTEN = -128.0  # log of a decay that is 0 in float32, also as a summand


@dataclass(frozen=True)
class DeltaInputs:
    """What tokens do to the states of all lanes and heads.

    `delta_rule` takes all in one floating-point type, queries and keys `normalized`. `documents_BL`
    are the tokens' documents (0: of the token before the segment); None: all have the same.
    """

    query_BLNH: Tensor
    key_BLNH: Tensor
    value_BLNX: Tensor
    log_decay_BLN: Tensor  # log(alpha), at most 0; or by channel of a key, [B, L, N, H]
    write_BLN: Tensor  # beta
    documents_BL: Tensor | None = None


# From what tokens do and a state [B, N, H, X] to what they read, [B, L, N, X], and the state after.
DeltaRulePath = Callable[[DeltaInputs, Tensor], tuple[Tensor, Tensor]]


def delta_rule_for(
    kernel: AttentionKernel, model: ModelConfig, kind: str, device: torch.device, dtype: torch.dtype
) -> DeltaRulePath:
    """Return the function that computes states on the device; on a GPU, log the choice once."""
    on_gpu = device.type != "cpu"
    uses_fla, reason = fla_here(kernel, model, kind, on_gpu=on_gpu, is_half=dtype in DTYPES)
    if on_gpu:
        log_once(rule_text(uses_fla, reason))
    return fla_delta_rule if uses_fla else delta_rule


def normalized(inputs: DeltaInputs) -> DeltaInputs:
    """Return the inputs in the gates' type, keys with norm 1, queries with norm H^-1/2.

    Vectors near zero get smaller norms, and zero stays zero.
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


def fla_delta_rule(inputs: DeltaInputs, state_BNHX: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `delta_rule` returns for the inputs `normalized`, by kernels in half precision.

    Earlier documents affect a document's sums of decays by rounding alone.
    """
    log_decay_BLN = inputs.log_decay_BLN
    if inputs.documents_BL is not None:
        log_decay_BLN = log_decay_BLN.masked_fill(is_new_BL1(inputs.documents_BL), FORGOTTEN)
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
    """Return what `delta_rule` returns, token by token: the definition; fastest for one token."""
    decay_BLNH = _by_channel(inputs.log_decay_BLN).exp()
    if inputs.documents_BL is not None:
        decay_BLNH = decay_BLNH.masked_fill(is_new_BL1(inputs.documents_BL)[..., None], 0.0)
    read = []
    for t in range(decay_BLNH.shape[1]):
        key_BNH1 = inputs.key_BLNH[:, t, :, :, None]
        state_BNHX = state_BNHX * decay_BLNH[:, t, ..., None]
        error_BN1X = inputs.value_BLNX[:, t, :, None] - key_BNH1.mT @ state_BNHX
        state_BNHX = state_BNHX + key_BNH1 @ (inputs.write_BLN[:, t, :, None, None] * error_BN1X)
        read.append(inputs.query_BLNH[:, t, :, None] @ state_BNHX)
    return torch.cat(read, dim=2).transpose(1, 2), state_BNHX


def delta_rule_in_chunks(
    inputs: DeltaInputs, state_BNHX: Tensor, chunk_tokens: int = 0
) -> tuple[Tensor, Tensor]:
    """Return what `delta_rule` returns, in chunks of at most `chunk_tokens` tokens (0: default).

    The names are the paper's: with Gamma the decay between two tokens of a chunk and gamma the one
    since its start, (I + A)^-1 is the inverse in the WY form of the chunk's updates (section 3.3),

        A = strictly_lower(diag(beta) K K^T * Gamma)
        U, W = (I + A)^-1 diag(beta) [V, diag(gamma) K]        V' = U - W S
        O = diag(gamma) Q S + lower(Q K^T * Gamma) V'
        S <- gamma_last S + (diag(Gamma_last) K)^T V'

    Where channels decay by themselves, each product of two tokens' channels has its own Gamma.
    """
    num_tokens, by_channel = inputs.query_BLNH.shape[1], inputs.log_decay_BLN.dim() == 4
    num_chunks, _ = chunks_of(num_tokens, chunk_tokens or (CHANNEL_CHUNK if by_channel else CHUNK))
    gates = (_by_channel(inputs.log_decay_BLN), inputs.write_BLN[..., None])
    query, key, value, log_decay, write = (
        chunked(values, num_chunks)
        for values in (inputs.query_BLNH, inputs.key_BLNH, inputs.value_BLNX, *gates)
    )  # [Z, B, N, Y, width]
    between, since_ZBNYH = chunk_decays(log_decay, inputs.documents_BL)
    written_ZBNYH = key * write
    # `mixing` is A, whose diagonal the solve does not read. `left` is (diag(Gamma_last) K)^T, with
    # Gamma's last row.
    if by_channel:
        decayed_ZBNYYH = key[..., None, :, :] * between
        mixing_ZBNYY, weights_ZBNYY = (
            (vectors[..., None, :] * decayed_ZBNYYH).sum(-1) for vectors in (written_ZBNYH, query)
        )
        left_ZBNHY = decayed_ZBNYYH[..., -1, :, :].mT
    else:
        mixing_ZBNYY = (written_ZBNYH @ key.mT) * between
        weights_ZBNYY = (query @ key.mT) * between
        left_ZBNHY = (key * between[..., -1, :, None]).mT
    updates_ZBNYX, keys_ZBNYH = torch.linalg.solve_triangular(
        mixing_ZBNYY,
        torch.cat([value * write, written_ZBNYH * since_ZBNYH], dim=-1),
        upper=False,
        unitriangular=True,
    ).split([value.shape[-1], key.shape[-1]], dim=-1)  # U, W
    reading_ZBNYH, kept_ZBN1H = query * since_ZBNYH, since_ZBNYH[..., -1:, :]
    read, of_chunks = [], (updates_ZBNYX, keys_ZBNYH, weights_ZBNYY, left_ZBNHY, reading_ZBNYH)
    # Unbind the chunks: the gradient of indexing a single one would be a tensor of all chunks.
    for update_BNYX, key_BNYH, weight_BNYY, left_BNHY, reading_BNYH, kept_BN1H in zip(
        *(values.unbind() for values in (*of_chunks, kept_ZBN1H)), strict=True
    ):
        new_BNYX = update_BNYX - key_BNYH @ state_BNHX
        read.append(reading_BNYH @ state_BNHX + weight_BNYY @ new_BNYX)
        state_BNHX = state_BNHX * kept_BN1H.mT + left_BNHY @ new_BNYX
    return torch.cat(read, dim=2).transpose(1, 2)[:, :num_tokens], state_BNHX


def _by_channel(decay: Tensor) -> Tensor:
    """Return a decay [B, L, N] or [B, L, N, H] with its last dimension, 1 or H."""
    return decay[..., None] if decay.dim() == 3 else decay
