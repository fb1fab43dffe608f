"""Streams through a frozen model that carry on what training carries: a memory of hidden states.

Letters of shapes as in `pretrain.model`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pretrain.model.lane_state import Memory, selected_lanes
from pretrain.model.transformer_xl import TransformerXL


class HiddenStateStream:
    """A stream that remembers hidden states, as in training."""

    def __init__(self, module: TransformerXL, memory_length: int, longest_segment: int) -> None:
        self._module = module.eval()
        self._memory_length = memory_length
        self._longest_segment = longest_segment
        self.memory: Memory | None = None

    @torch.no_grad()
    def nll_BL(
        self, tokens_BL: Tensor, targets_BL: Tensor, starts_BL: Tensor | None = None
    ) -> Tensor:
        """Return negative log-likelihoods in float32, and remember the segment."""
        self._module.expect_keys(self._memory_length, self._longest_segment)
        nll_BL, self.memory = self._module(
            tokens_BL, targets_BL, self.memory, starts_BL, memory_length=self._memory_length
        )
        return nll_BL

    @torch.no_grad()
    def logits_BLV(
        self, tokens_BL: Tensor, starts_BL: Tensor | None = None, num_last: int | None = None
    ) -> Tensor:
        """Return log-probabilities after each of the last `num_last` tokens (default: all)."""
        self._module.expect_keys(self._memory_length, self._longest_segment)
        logits_BLV, self.memory = self._module.logits_BLV(
            tokens_BL, self.memory, starts_BL, self._memory_length, num_last
        )
        return logits_BLV

    def select(self, rows_B: Tensor) -> None:
        """Continue with these of the present rows, in this order; one may occur several times."""
        if self.memory is not None:
            self.memory = selected_lanes(self.memory, rows_B)


class SegmentStream:
    """A stream whose segments have memory tokens, which they read and write once.

    Tokens whose logits are asked for continue the present segment, which is read again, while they
    fit into it.
    """

    def __init__(self, module: TransformerXL, memory_length: int, longest_segment: int) -> None:
        self._longest_segment = longest_segment
        self._stream = HiddenStateStream(module, memory_length, longest_segment)
        self._before: Memory | None = None  # the memory before the present segment
        self._present: tuple[Tensor, Tensor] | None = None  # its tokens, and document starts

    def nll_BL(
        self, tokens_BL: Tensor, targets_BL: Tensor, starts_BL: Tensor | None = None
    ) -> Tensor:
        """Return the losses of a segment of its own."""
        self._present = None
        return self._stream.nll_BL(tokens_BL, targets_BL, starts_BL)

    def logits_BLV(
        self, tokens_BL: Tensor, starts_BL: Tensor | None = None, num_last: int | None = None
    ) -> Tensor:
        """Return log-probabilities after each of the last `num_last` of these tokens (all)."""
        if starts_BL is None:
            starts_BL = torch.zeros_like(tokens_BL, dtype=torch.bool)
        new, num_last = (tokens_BL, starts_BL), num_last or tokens_BL.shape[1]
        if self._present is not None:
            joined = tuple(torch.cat(pair, dim=1) for pair in zip(self._present, new, strict=True))
            if joined[0].shape[1] <= self._longest_segment:
                new = joined
                self._stream.memory = self._before
        self._before, self._present = self._stream.memory, (new[0], new[1])
        return self._stream.logits_BLV(*self._present, num_last)

    def select(self, rows_B: Tensor) -> None:
        self._stream.select(rows_B)
        if self._before is not None:
            self._before = selected_lanes(self._before, rows_B)
        if self._present is not None:
            self._present = (self._present[0][rows_B], self._present[1][rows_B])
