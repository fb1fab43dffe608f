"""What layers with a recurrent state have in common: a short convolution, chunks, documents.

Letters of shapes as in `pretrain.model`; Z is the number of chunks and Y the tokens of one (Y x Y:
queries, keys), or in the convolution the channels.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, relu

from pretrain.model.parameters import uniform

SOFTPLUS_LINEAR = 40.0  # from here on log(1 + exp(x)) is x, also in float64


def softplus(values: Tensor) -> Tensor:
    """Return log(1 + exp(x)).

    Torch's softplus and sigmoid round the last few values of a tensor differently from the others.
    Gates are such small tensors that a lane's values would depend on the number of lanes.
    """
    return values.clamp(max=SOFTPLUS_LINEAR).exp().log1p() + relu(values - SOFTPLUS_LINEAR)


def sigmoid(values: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)), see `softplus`."""
    return (-softplus(-values)).exp()


def decay_parameters(rates: int, biases: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A and b as Mamba-2 draws them, for decays such as exp(-exp(A) softplus(x + b)).

    exp(A) is uniform, and softplus(b) is between 0.001 and 0.1, uniform in its logarithm. The
    slowest heads forget a token's trace after a thousand tokens.
    """
    rate = nn.Parameter(uniform(rates, low=1.0, high=16.0).log())
    return rate, nn.Parameter(uniform(biases, low=-6.908, high=-2.303).exp().expm1().log())


def is_new_BL1(documents_BL: Tensor) -> Tensor:
    """Return which tokens are in another document than the previous token, [B, L, 1]."""
    before_B1 = torch.zeros_like(documents_BL[:, :1])
    return (documents_BL.diff(dim=1, prepend=before_B1) != 0)[:, :, None]


def convolved(rows_BXY: Tensor, weight_X1Y: Tensor, documents_BL: Tensor | None) -> Tensor:
    """Return each token's causal convolution, per channel, in its document: [B, L, Y].

    The rows are the tail's and the segment's; `weight_X1Y` has the tap of the earliest row first.
    """
    before = len(weight_X1Y) - 1
    num_tokens = rows_BXY.shape[1] - before
    documents_BX = None if documents_BL is None else _with_tail(documents_BL, before)
    mixed_BLY = rows_BXY[:, before:] * weight_X1Y[before]
    for tap in range(before):
        tap_BLY = rows_BXY[:, tap : tap + num_tokens]
        if documents_BX is not None:
            is_same_BL = documents_BX[:, tap : tap + num_tokens] == documents_BX[:, before:]
            tap_BLY = tap_BLY * is_same_BL[:, :, None]
        mixed_BLY = torch.addcmul(mixed_BLY, tap_BLY, weight_X1Y[tap])
    return mixed_BLY


def tail_of(rows_BXY: Tensor, count: int, documents_BL: Tensor | None) -> Tensor:
    """Return a copy of the last `count` rows, with zeros for other documents than the last row's.

    Zeros add nothing to the convolution, so a tail needs no documents of its own.
    """
    last_BXY = rows_BXY[:, -count:]
    if documents_BL is None:
        return last_BXY.clone()
    documents_BX = _with_tail(documents_BL, count)[:, -count:]
    return last_BXY * (documents_BX == documents_BL[:, -1:])[:, :, None]


def _with_tail(documents_BL: Tensor, count: int) -> Tensor:
    """Return the documents of the tail's rows, 0, and of the segment's."""
    return torch.cat([documents_BL.new_zeros(len(documents_BL), count), documents_BL], dim=1)


def chunked(values_BLNX: Tensor, num_chunks: int) -> Tensor:
    """Return the values as [Z, B, N, Y, X], the last chunk filled with zeros.

    A token whose key, value and logarithm of decay are zero changes nothing.
    """
    missing = -values_BLNX.shape[1] % num_chunks
    padded = pad(values_BLNX, (0, 0, 0, 0, 0, missing)) if missing else values_BLNX
    return padded.unflatten(1, (num_chunks, -1)).permute(1, 0, 3, 2, 4).contiguous()


def chunk_decays(log_decay_ZBNYH: Tensor, documents_BL: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the decay between any two tokens of a chunk and since its start, by channel.

    They are [Z, B, N, Y (query), Y (key), H], without H where it is 1, and [Z, B, N, Y, H]. Decays
    are 0 across a document's start and where the key is later than the query.
    """
    num_chunks, size = len(log_decay_ZBNYH), log_decay_ZBNYH.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=log_decay_ZBNYH.device).triu(1)
    hidden, is_carried = later, None
    if documents_BL is not None:
        last_B1, missing = documents_BL[:, -1:], num_chunks * size - documents_BL.shape[1]
        documents_BL = torch.cat([documents_BL, last_B1.expand(-1, missing)], dim=1)
        documents_ZBY = documents_BL.unflatten(1, (num_chunks, size)).transpose(0, 1)
        before_ZB1 = torch.cat([torch.zeros_like(documents_ZBY[:1]), documents_ZBY[:-1]])[..., -1:]
        hidden = later | (documents_ZBY[..., None] != documents_ZBY[..., None, :])
        is_carried = (documents_ZBY == before_ZB1)[:, :, None, :, None]
    # Sums over the earlier tokens of the same document. A cumulative sum would be rounded with the
    # earlier documents in it, and on a GPU in no fixed order.
    summed = hidden.logical_not().to(log_decay_ZBNYH.dtype)
    hidden = hidden if is_carried is None else hidden[:, :, None]
    # Masked before the exponential: the difference is positive where the key is later.
    if log_decay_ZBNYH.shape[-1] == 1:
        total_ZBNYH = (log_decay_ZBNYH[..., 0] @ summed.mT)[..., None]
        difference = total_ZBNYH - total_ZBNYH.mT
    else:
        total_ZBNYH = (summed if is_carried is None else summed[:, :, None]) @ log_decay_ZBNYH
        difference = total_ZBNYH[..., None, :] - total_ZBNYH[..., None, :, :]
        hidden = hidden[..., None]
    between = difference.masked_fill(hidden, float("-inf")).exp()
    since_ZBNYH = total_ZBNYH.exp()
    return between, since_ZBNYH if is_carried is None else since_ZBNYH * is_carried
