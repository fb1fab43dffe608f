"""Memory tokens of the Recurrent Memory Transformer (Bulatov et al. 2022, arXiv 2207.06881).

Letters of shapes as in `pretrain.model`; X is the number of memory tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pretrain.config.choices import norms_inputs
from pretrain.config.model import ModelConfig
from pretrain.model.parameters import norm_of, normal


class MemoryTokens(nn.Module):
    """The vectors that a segment reads from the one before, and writes for the next.

    Layers get [read tokens | segment | write tokens] as one causal sequence. Both groups start as
    what the segment before has written, or as learned vectors if there is nothing: zeros. What the
    last layer returns for the write tokens is carried on. Layers that normalize their inputs leave
    their sum to grow from segment to segment, so it is normalized here.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.initial = normal(config.memory_tokens, config.d_model, std=config.init_std)
        self.norm = norm_of(config) if norms_inputs(config.norm_position) else None
        self._scale = config.embedding_scale
        self._count = config.memory_tokens  # ZeRO-3 has sharded the parameter when it is asked

    def forward(
        self, hidden_BLD: Tensor, written_BXD: Tensor, is_new_document_B: Tensor | None
    ) -> Tensor:
        """Return the segment between its read and its write tokens, [B, X + L + X, D].

        Where documents are isolated, the write tokens know nothing of what was written before a new
        document started; that the tokens of this document see no read tokens is up to the masks.
        """
        initial_XD = self.initial * self._scale
        has_written_B11 = written_BXD.flatten(1).any(1)[:, None, None]
        read_BXD = write_BXD = torch.where(has_written_B11, written_BXD, initial_XD)
        if is_new_document_B is not None:
            write_BXD = torch.where(is_new_document_B[:, None, None], initial_XD, read_BXD)
        return torch.cat([read_BXD, hidden_BLD, write_BXD], dim=1)

    def split(self, hidden_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the segment's tokens of the last layer's output, and what is written."""
        written_BXD = hidden_BLD[:, -self._count :]
        written_BXD = written_BXD.clone() if self.norm is None else self.norm(written_BXD)
        return hidden_BLD[:, self._count : -self._count], written_BXD


def documents_with_tokens(documents_BL: Tensor, count: int) -> Tensor:
    """Return the documents of read tokens, segment and write tokens.

    Read tokens belong to the document of the token before the segment, write tokens to the last.
    """
    if not count:
        return documents_BL
    before_BX = documents_BL.new_zeros(len(documents_BL), count)
    return torch.cat([before_BX, documents_BL, documents_BL[:, -1:].expand(-1, count)], dim=1)
