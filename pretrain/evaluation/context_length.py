"""Relative effective context length (Dai et al. 2019, section 3.3 and appendix C): how far back context still helps.

Growing the context of a position from c to c + step tokens lowers its loss less and less. The context length of a model
is the c from which on the next step lowers perplexity by less than one percent. It is measured for several models
together: over the same positions, each step starting from the best loss any of them reached with c, so that a poor
model does not look good because it has much left to gain. P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.errors import ConfigError
from data_pipeline.lanes.evaluation_stream import EvaluationStream
from pretrain.model.cached import new_stream
from pretrain.model.transformer_xl import TransformerXL

THRESHOLD = 0.01  # of perplexity
READ_TOKENS = 8192  # of the split at a time
LANES = 64  # positions computed side by side

Losses = Callable[
    [int], Tensor
]  # context length -> NLL [P] in float64, each position seeing so many tokens


@dataclass(frozen=True)
class ContextLength:
    """What one model made of growing contexts, on the positions that are hardest with short ones."""

    share: float  # r: the part of the positions taken, hardest first
    length: int  # tokens
    gains: tuple[float, ...]  # of perplexity, relative, by each further step
    reached_longest: bool  # the last step measured still helped: the true length may be more


@dataclass(frozen=True)
class ContextGrid:
    """The contexts measured: step, 2 step, ... up to `longest` tokens."""

    step: int
    longest: int

    def __post_init__(self) -> None:
        if not 0 < self.step <= self.longest // 2:
            raise ConfigError(
                f"context step {self.step} and longest context {self.longest}: "
                "the step must be positive and at most half of the longest"
            )


def relative_effective_context_lengths(
    losses: Sequence[Losses],
    contexts: ContextGrid,
    shares: Sequence[float],
    threshold: float = THRESHOLD,
) -> list[list[ContextLength]]:
    """Per model one length for each share; no context longer than needed is computed."""
    gains: list[list[list[float]]] = [[[] for _ in shares] for _ in losses]
    growing = {(model, index) for model in range(len(losses)) for index in range(len(shares))}
    shorter = torch.stack([model(contexts.step) for model in losses])
    for length in range(2 * contexts.step, contexts.longest + 1, contexts.step):
        longer = torch.stack([model(length) for model in losses])
        best_P = shorter.amin(0)
        for model, index in sorted(growing):
            gain = _gain(best_P, longer[model], shares[index])
            gains[model][index].append(gain)
            if gain < threshold:
                growing.remove((model, index))
        shorter = longer
        if not growing:
            break
    return [
        [
            ContextLength(
                share=share,
                length=contexts.step * (len(of_share) + ((model, index) in growing)),
                gains=tuple(of_share),
                reached_longest=(model, index) in growing,
            )
            for index, (share, of_share) in enumerate(zip(shares, of_model, strict=True))
        ]
        for model, of_model in enumerate(gains)
    ]


def _gain(best_P: Tensor, longer_P: Tensor, share: float) -> float:
    """By how much perplexity falls on the hardest positions: g of appendix C."""
    hardest = best_P.argsort(descending=True, stable=True)[: max(1, round(share * len(best_P)))]
    before = best_P[hardest].mean().exp()
    after = torch.minimum(best_P, longer_P)[hardest].mean().exp()
    return float((before - after) / before)


class SplitPositions:
    """Positions spread evenly over a split, each with `longest` tokens before it. ConfigError if it is too short."""

    def __init__(
        self, corpus: Corpus, num_positions: int, longest: int, max_tokens: int = 0
    ) -> None:
        parts = EvaluationStream(corpus, 1, READ_TOKENS, range(1), max_tokens)
        tokens_T = torch.cat([torch.from_numpy(part.targets_BL[part.valid_BL]) for part in parts])
        room = len(tokens_T) - longest
        if num_positions < 1:
            raise ConfigError(f"the number of positions is {num_positions}, expected 1 or more")
        if room < num_positions:
            raise ConfigError(
                f"{corpus.directory} has {max(room, 0):,} positions with {longest:,} tokens before them, "
                f"{num_positions:,} are wanted; use fewer positions or a shorter longest context"
            )
        self.tokens_T = tokens_T
        self._end_id = corpus.manifest.end_id
        self.places_P = longest + torch.arange(num_positions) * room // num_positions

    def __len__(self) -> int:
        return len(self.places_P)

    @torch.no_grad()
    def losses(
        self, module: TransformerXL, length: int, memory_length: int, segment_length: int
    ) -> Tensor:
        """NLL [P] in float64 of each position after exactly `length` tokens, read as a stream that begins there."""
        device = next(module.parameters()).device
        found = []
        for places_B in self.places_P.split(LANES):
            windows_BW = self.tokens_T[(places_B[:, None] + torch.arange(-length, 1))]
            tokens_BL, targets_B = windows_BW[:, :-1].to(device), windows_BW[:, -1].to(device)
            starts_BL = torch.zeros_like(tokens_BL, dtype=torch.bool)
            starts_BL[:, 1:] = tokens_BL[:, :-1] == self._end_id
            stream = new_stream(module, memory_length, segment_length)
            end = (
                length % segment_length or segment_length
            )  # the last segment is a full one, as in training
            begin = 0
            while end < length:
                stream.logits_BLV(tokens_BL[:, begin:end], starts_BL[:, begin:end], 1)
                begin, end = end, end + segment_length
            logits_BLV = stream.logits_BLV(tokens_BL[:, begin:end], starts_BL[:, begin:end], 1)
            found.append(-logits_BLV[:, -1].gather(1, targets_B[:, None]).squeeze(1).double().cpu())
        return torch.cat(found)
