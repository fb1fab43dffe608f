"""Relative effective context length (section 3.3 and appendix C): how far back context still helps.

Each step from a context of c tokens to c + step lowers the loss less than the previous. The
context length of a model is the c from which the next step lowers perplexity by less than 1%. It is
measured for several models together, over the same P positions. Each step starts from the best loss
that any of them reached with c, so that a weak model does not look good because it has more left to
gain.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.evaluation_stream import EvaluationStream
from foundation.errors import ConfigError
from pretrain.model.adopted import LanguageModel
from pretrain.model.cached import new_stream
from pretrain.model.memory import document_starts

THRESHOLD = 0.01  # relative decrease of perplexity that still counts as help
READ_TOKENS = 8192  # tokens of the split in one batch
LANES = 64  # positions computed together by default
# Takes a context length; returns the NLL [P] of each position after so many tokens, in float64.
Losses = Callable[[int], Tensor]


@dataclass(frozen=True)
class ContextLength:
    """How far back context helps one model, on the positions that are hardest with a short one."""

    share: float  # r: the fraction of positions counted, hardest first
    length: int  # tokens
    gains: tuple[float, ...]  # relative decrease of perplexity in each step
    reached_longest: bool  # the last step still helped, so the true length may be greater


@dataclass(frozen=True)
class ContextGrid:
    """The contexts measured: step, 2 step, ..., up to `longest` tokens."""

    step: int
    longest: int


def relative_effective_context_lengths(
    losses: Sequence[Losses],
    contexts: ContextGrid,
    shares: Sequence[float],
    threshold: float = THRESHOLD,
) -> list[list[ContextLength]]:
    """Return one length per model and share; longer contexts than needed are not computed."""
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

    def length_of(model: int, index: int) -> ContextLength:
        gained, grows = gains[model][index], (model, index) in growing
        length = contexts.step * (len(gained) + grows)
        return ContextLength(shares[index], length, tuple(gained), reached_longest=grows)

    return [[length_of(model, i) for i in range(len(shares))] for model in range(len(losses))]


def _gain(best_P: Tensor, longer_P: Tensor, share: float) -> float:
    """Return the relative decrease of perplexity on the hardest positions: g of appendix C."""
    hardest = best_P.argsort(descending=True, stable=True)[: max(1, round(share * len(best_P)))]
    before = best_P[hardest].mean().exp()
    after = torch.minimum(best_P, longer_P)[hardest].mean().exp()
    return float((before - after) / before)


class SplitPositions:
    """Up to `most` positions spread evenly over a split, each after `longest` tokens or more.

    `lanes` of them are computed together.
    """

    def __init__(
        self, corpus: Corpus, most: int, longest: int, max_tokens: int = 0, lanes: int = 0
    ) -> None:
        parts = EvaluationStream(corpus, 1, READ_TOKENS, range(1), max_tokens)
        tokens_T = torch.cat([torch.from_numpy(part.targets_BL[part.valid_BL]) for part in parts])
        available = len(tokens_T) - longest
        if available < 1:
            raise ConfigError(
                f"{corpus.directory} has {len(tokens_T):,} tokens, expected more than the longest "
                f"context, {longest:,}; use a shorter one"
            )
        num_positions = min(most, available)
        self.tokens_T, self._lanes = tokens_T, lanes or LANES
        self._end_id = corpus.manifest.end_id
        self.offsets_P = longest + torch.arange(num_positions) * available // num_positions

    def __len__(self) -> int:
        return len(self.offsets_P)

    @torch.no_grad()
    def losses(
        self, module: LanguageModel, length: int, memory_length: int, segment_length: int
    ) -> Tensor:
        """Return the NLL [P] in float64 after exactly `length` tokens, read as a new stream."""
        device = next(module.parameters()).device
        losses_of_windows = []
        for offsets_B in self.offsets_P.split(self._lanes):
            windows_BW = self.tokens_T[(offsets_B[:, None] + torch.arange(-length, 1))]
            tokens_BL, targets_B = windows_BW[:, :-1].to(device), windows_BW[:, -1].to(device)
            starts_BL = document_starts(tokens_BL, self._end_id)
            stream = new_stream(module, memory_length, segment_length)
            # The first segment is the short one: the last is full, as in training.
            start, end = 0, length % segment_length or segment_length
            while end < length:
                stream.logits_BLV(tokens_BL[:, start:end], starts_BL[:, start:end], 1)
                start, end = end, end + segment_length
            logits_BLV = stream.logits_BLV(tokens_BL[:, start:end], starts_BL[:, start:end], 1)
            scored_B1 = logits_BLV[:, -1].gather(1, targets_B[:, None])
            losses_of_windows.append(-scored_B1.squeeze(1).double().cpu())
        return torch.cat(losses_of_windows)


def context_rows(lengths: Sequence[ContextLength], step: int) -> list[tuple[str, ...]]:
    """Return the rows of a table for one model, heads first."""
    rows = [("r", "context length", f"perplexity decreases with each {step} tokens more by")]
    gains = [[f"{gain:.1%}" for gain in result.gains] for result in lengths]
    width = max((len(gain) for row in gains for gain in row), default=0)
    most = max(map(len, gains))
    for result, texts in zip(lengths, gains, strict=True):
        length = f"{result.length:,}{' or more' if result.reached_longest else ''}"
        # Shorter rows are padded, so that a step has the same column in all rows.
        steps = " ".join(text.rjust(width) for text in [*texts, *[""] * (most - len(texts))])
        rows.append((f"{result.share:g}", length, steps))
    return rows
