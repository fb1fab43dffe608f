"""A training step as the original takes it: the yardstick for the speed of a whole step, written
from the formulas.

Time-major rows [L, B, D], plain dropout, the original's names for parameters, post-norm, one pair
u, v for all layers.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.helpers.reference_attention import ReferenceAttention


class _FeedForward(nn.Module):
    def __init__(self, d_model: int, d_inner: int, dropout: float) -> None:
        super().__init__()
        rows = (nn.Linear(d_model, d_inner), nn.ReLU(), nn.Dropout(dropout))
        self.CoreNet = nn.Sequential(*rows, nn.Linear(d_inner, d_model), nn.Dropout(dropout))
        self.layer_norm = nn.LayerNorm(d_model)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer_norm(hidden + self.CoreNet(hidden))


class _Layer(nn.Module):
    def __init__(self, num_heads: int, d_model: int, d_inner: int, dropout: float) -> None:
        super().__init__()
        self.dec_attn = ReferenceAttention(num_heads, d_model, d_model // num_heads, dropout)
        self.pos_ff = _FeedForward(d_model, d_inner, dropout)


class _Tables(nn.Module):
    """A list of one module under the original's name for it."""

    def __init__(self, name: str, table: nn.Module) -> None:
        super().__init__()
        setattr(self, name, nn.ModuleList([table]))


class ReferenceTransformerXL(nn.Module):
    """Mean loss of a segment and the memory after it, one tensor [M, B, D] per layer and one more,
    as the original.
    """

    def __init__(
        self,
        vocab_size: int,
        num_layers: int,
        num_heads: int,
        d_model: int,
        d_inner: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.word_emb = _Tables("emb_layers", self.embedding)
        sizes = (num_heads, d_model, d_inner, dropout)
        self.layers = nn.ModuleList(_Layer(*sizes) for _ in range(num_layers))
        self.output = nn.Linear(d_model, vocab_size)
        self.output.weight = self.embedding.weight
        self.crit = _Tables("out_layers", self.output)
        self.r_w_bias = nn.Parameter(torch.zeros(num_heads, d_model // num_heads))
        self.r_r_bias = nn.Parameter(torch.zeros(num_heads, d_model // num_heads))
        self.drop = nn.Dropout(dropout)
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.0, 0.02)

    def forward(
        self, tokens_LB: Tensor, targets_LB: Tensor, memory: list[Tensor], length: int
    ) -> tuple[Tensor, list]:
        num_queries, d_model = tokens_LB.shape[0], self.embedding.embedding_dim
        hidden_LBD = self.drop(self.embedding(tokens_LB) * math.sqrt(d_model))
        num_keys = num_queries + (memory[0].shape[0] if memory else 0)
        every_LC = torch.ones(num_queries, num_keys, dtype=torch.bool)
        mask_LC = every_LC.triu(1 + num_keys - num_queries)
        encodings_CD = self.drop(_encodings(num_keys, d_model).to(hidden_LBD.dtype))
        levels = [hidden_LBD]
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, _Layer)
            memory_MBD = memory[index] if memory else hidden_LBD[:0].detach()
            shared = (encodings_CD, self.r_w_bias, self.r_r_bias, mask_LC)
            hidden_LBD = layer.pos_ff(layer.dec_attn(hidden_LBD, *shared, memory_MBD))
            levels.append(hidden_LBD)
        logits = self.output(self.drop(hidden_LBD)).flatten(0, 1)
        memory = [
            torch.cat([memory[index], level] if memory else [level])[-length:].detach()
            for index, level in enumerate(levels)
        ]
        return cross_entropy(logits, targets_LB.flatten()), memory


def original_state(model: ReferenceTransformerXL) -> dict[str, Tensor]:
    """The model's tensors under the original's names only."""
    own, state = ("embedding.", "output."), model.state_dict()
    return {name: values for name, values in state.items() if not name.startswith(own)}


def _encodings(num_keys: int, d_model: int) -> Tensor:
    distances = torch.arange(num_keys - 1, -1, -1.0)
    inverse_frequencies = 1 / (10000 ** (torch.arange(0.0, d_model, 2.0) / d_model))
    angles = torch.outer(distances, inverse_frequencies)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
