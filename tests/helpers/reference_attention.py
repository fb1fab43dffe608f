"""Attention as the original lays it out: the yardstick for speed, written from the formulas.

Time-major rows [L, B, D], one projection of memory and segment for query, key and value alike
(memory's queries are thrown away), einsum over [L, C, B, N] scores masked in float32, the shift by
concatenating a zero column.
"""

import math

import torch
from torch import Tensor, nn


class ReferenceAttention(nn.Module):
    """Post-norm residual attention; u and v are arguments, the mask is True where forbidden."""

    def __init__(self, num_heads: int, d_model: int, d_head: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.d_head = num_heads, d_head
        self.qkv_net = nn.Linear(d_model, 3 * num_heads * d_head, bias=False)
        self.r_net = nn.Linear(d_model, num_heads * d_head, bias=False)
        self.o_net = nn.Linear(num_heads * d_head, d_model, bias=False)
        self.layer_norm = nn.LayerNorm(d_model)
        self.drop = nn.Dropout(dropout)
        self.scale = 1 / math.sqrt(d_head)

    def forward(
        self,
        hidden_LBD: Tensor,
        encodings_CD: Tensor,
        u_NH: Tensor,
        v_NH: Tensor,
        mask_LC: Tensor,
        memory_MBD: Tensor,
    ) -> Tensor:
        num_queries, num_lanes, _ = hidden_LBD.shape
        heads = (self.num_heads, self.d_head)
        rows_CBX = self.qkv_net(torch.cat([memory_MBD, hidden_LBD]))
        query, key, value = rows_CBX.chunk(3, dim=-1)
        query_LBNH = query[-num_queries:].view(num_queries, num_lanes, *heads)
        key_CBNH, value_CBNH = key.view(-1, num_lanes, *heads), value.view(-1, num_lanes, *heads)
        relative_CNH = self.r_net(encodings_CD).view(-1, *heads)
        content_LCBN = torch.einsum("ibnd,jbnd->ijbn", query_LBNH + u_NH, key_CBNH)
        position_LCBN = _shifted(torch.einsum("ibnd,jnd->ijbn", query_LBNH + v_NH, relative_CNH))
        scores_LCBN = (content_LCBN + position_LCBN) * self.scale
        hidden_LC11 = mask_LC[:, :, None, None]
        masked_LCBN = scores_LCBN.float().masked_fill(hidden_LC11, -math.inf)
        weights_LCBN = torch.softmax(masked_LCBN.type_as(scores_LCBN), dim=1)
        attended_LBNH = torch.einsum("ijbn,jbnd->ibnd", weights_LCBN, value_CBNH)
        return self.layer_norm(hidden_LBD + self.drop(self.o_net(attended_LBNH.flatten(2))))


def _shifted(scores_LCBN: Tensor) -> Tensor:
    num_queries, num_keys, *rest = scores_LCBN.shape
    padded = torch.cat([scores_LCBN.new_zeros(num_queries, 1, *rest), scores_LCBN], dim=1)
    return padded.view(num_keys + 1, num_queries, *rest)[1:].view_as(scores_LCBN)
