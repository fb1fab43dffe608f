"""Recall of tokens seen d tokens ago: the needle and the copy.

The model reads a pattern of random tokens, then other tokens, then the pattern again, d tokens
after its first occurrence. The needle is a key of four tokens and a value, amid text: the value is
scored after the key's second occurrence (RULER's single needle, Hsieh et al. 2024). The copy is
eight tokens amid random ones: all but the first are scored (induction, Olsson et al. 2022).

A pattern is drawn from candidates, without replacement. The prediction is the likeliest candidate
that the second occurrence has not had yet. So chance is known exactly, for every vocabulary and
every model that cannot see the first occurrence. Tokens are drawn as ids, so any tokenizer will do.
B lanes, J scored tokens of each, X candidates; other letters as in `pretrain.model`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.evaluation_stream import EvaluationStream
from data_pipeline.tokenizer import Tokenizer
from foundation.errors import ConfigError
from foundation.settings import assert_never
from pretrain.evaluation.probes.document_position import wilson_interval
from pretrain.model.adopted import LanguageModel
from pretrain.model.cached import last_logits_BTV, new_stream
from pretrain.model.memory import document_starts

SAMPLE_TOKENS = 1 << 17  # tokens of the split that are read
READ_TOKENS = 8192  # tokens of the split in one batch
MOST_TOKENS = 256  # candidates and fillers together
FEWEST_CANDIDATES = 9
LANES = 16  # trials computed together; their patterns are at the same offset in a segment
SHORTEST = 8  # tokens: the shortest distance, and the length of a copy
# The fraction of scored tokens. One hit among many candidates would already be above chance.
LEAST_RECALLED = 0.5


@dataclass(frozen=True)
class ProbeTokens:
    """Disjoint ids for what must be recalled and for what stands between, and text of a split."""

    candidates: Tensor
    fillers: Tensor
    text: Tensor | None  # tokens of the split, without ends of documents
    end_id: int  # starts every stream, as it does in training

    def filler(self, num_lanes: int, length: int, generator: torch.Generator) -> Tensor:
        """Return random fillers, [B, length]."""
        drawn = torch.randint(len(self.fillers), (num_lanes, length), generator=generator)
        return self.fillers[drawn]

    def haystack(self, num_lanes: int, length: int, generator: torch.Generator) -> Tensor:
        """Return a stretch of text for each lane, [B, length]; random fillers without text."""
        if self.text is None:
            return self.filler(num_lanes, length, generator)
        starts_B = torch.randint(len(self.text), (num_lanes,), generator=generator)
        return self.text[(starts_B[:, None] + torch.arange(length)) % len(self.text)]


def tokens_of_corpus(corpus: Corpus) -> ProbeTokens:
    """Return the most frequent tokens of a sample of the split; ConfigError if there are few.

    Every other one is a candidate, so that candidates and fillers are about as frequent.
    """
    end_id = corpus.manifest.end_id
    stream = EvaluationStream(corpus, 1, READ_TOKENS, range(1), SAMPLE_TOKENS)
    read = np.concatenate([batch.targets_BL[batch.valid_BL] for batch in stream])
    text = read[read != end_id]
    ids, counts = np.unique(text, return_counts=True)
    frequent = ids[np.argsort(-counts, kind="stable")][:MOST_TOKENS]
    return _split(frequent, text, end_id, f"{corpus.location} has")


def tokens_of_vocabulary(tokenizer: Tokenizer) -> ProbeTokens:
    """Return ids evenly spread over those of the vocabulary that stand for text."""
    sizes_V, _ = tokenizer.text_sizes()
    usable = np.arange(tokenizer.vocab_size)
    if sizes_V.any():
        usable = usable[sizes_V > 0]
    usable = usable[usable != tokenizer.end_id]
    count = min(MOST_TOKENS, len(usable))
    spread = usable[np.arange(count) * len(usable) // max(1, count)]
    return _split(spread, None, tokenizer.end_id, "the vocabulary has")


def _split(ids: np.ndarray, text: np.ndarray | None, end_id: int, whose: str) -> ProbeTokens:
    if len(ids) < 2 * FEWEST_CANDIDATES:
        raise ConfigError(
            f"{whose} {len(ids)} different tokens besides the end of a document; the probes "
            f"needle and copy need {2 * FEWEST_CANDIDATES}"
        )
    sample = None if text is None else torch.from_numpy(text.astype(np.int64))
    candidates, fillers = (torch.from_numpy(ids[first::2].astype(np.int64)) for first in (0, 1))
    return ProbeTokens(candidates, fillers, sample, end_id)


RecallKind = Literal["needle", "copy"]


@dataclass(frozen=True, kw_only=True)
class Recall:
    """Recall at one distance; the interval is Wilson's, with one observation per trial."""

    distance: int  # tokens from the first occurrence of a scored token to its second
    accuracy: float
    low: float  # of the 95% interval
    high: float
    chance: float  # the accuracy of a guess
    loss: float  # nats, among the candidates
    chance_loss: float  # nats, of a guess
    trials: int
    tokens: int  # scored tokens of all trials

    @property
    def is_recalled(self) -> bool:
        """Whether at least half is predicted, and the whole interval is above chance."""
        return self.accuracy >= LEAST_RECALLED and self.low > self.chance


@dataclass(frozen=True)
class _Pattern:
    length: int
    first_scored: int
    in_text: bool


def _pattern(kind: RecallKind) -> _Pattern:
    match kind:
        case "needle":
            return _Pattern(length=5, first_scored=4, in_text=True)
        case "copy":
            return _Pattern(length=SHORTEST, first_scored=1, in_text=False)
        case _:
            assert_never(kind)


@dataclass(frozen=True)
class Trials:
    """Streams that end with the scored tokens, and the candidates that these may be."""

    tokens_BT: Tensor
    num_scored: int  # tokens at the end
    place_BX: Tensor  # each candidate's index in the pattern; beyond its end if not in it


def distances_up_to(longest: int, borders: Sequence[int]) -> list[int]:
    """Return powers of two from 8 up, the borders among them, and the longest itself."""
    if longest < SHORTEST:
        raise ConfigError(f"the longest distance is {longest}, expected {SHORTEST} or more")
    powers = [1 << power for power in range(SHORTEST.bit_length() - 1, longest.bit_length())]
    chosen = {*powers, *borders, longest}
    return sorted(distance for distance in chosen if SHORTEST <= distance <= longest)


def num_choices(kind: RecallKind, tokens: ProbeTokens) -> list[int]:
    """Return for each scored token how many candidates a guess chooses from."""
    pattern, count = _pattern(kind), len(tokens.candidates)
    return [count - place for place in range(pattern.first_scored, pattern.length)]


def drawn_trials(
    kind: RecallKind,
    tokens: ProbeTokens,
    distance: int,
    lead: int,
    num_lanes: int,
    generator: torch.Generator,
) -> Trials:
    """Return trials: an end of document, `lead` tokens, the pattern, others, the pattern."""
    pattern = _pattern(kind)
    order_BX = torch.rand(num_lanes, len(tokens.candidates), generator=generator).argsort(1)
    pattern_BX = tokens.candidates[order_BX[:, : pattern.length]]
    between = tokens.haystack if pattern.in_text else tokens.filler
    other_BX = between(num_lanes, lead + distance - pattern.length, generator)
    end_B1 = torch.full((num_lanes, 1), tokens.end_id)
    parts = (end_B1, other_BX[:, :lead], pattern_BX, other_BX[:, lead:], pattern_BX)
    num_scored = pattern.length - pattern.first_scored
    return Trials(torch.cat(parts, dim=1), num_scored, place_BX=order_BX.argsort(1))


@torch.no_grad()
def scored_logits(
    module: LanguageModel, trials: Trials, memory_length: int, segment_length: int, end_id: int
) -> Tensor:
    """Return log-probabilities [B, J, V] of the scored tokens, read in segments with memory."""
    device = next(module.parameters()).device
    inputs_BT = trials.tokens_BT[:, :-1].to(device)
    starts_BT = document_starts(inputs_BT, end_id)
    read = new_stream(module, memory_length, segment_length, inputs_BT.shape[1]).logits_BLV
    return last_logits_BTV(read, inputs_BT, starts_BT, segment_length, trials.num_scored)


def measure_recall(
    kind: RecallKind,
    module: LanguageModel,
    tokens: ProbeTokens,
    distance: int,
    *,
    memory_length: int,
    segment_length: int,
    num_trials: int,
    seed: int = 0,
) -> Recall:
    """Return the recall at one distance; the seed and the distance fix the trials.

    Over the trials, the second occurrence is spread evenly over the offsets in a segment.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + distance)
    groups = -(-num_trials // LANES)
    first_scored = _pattern(kind).first_scored
    right, losses = [], []
    for number in range(groups):
        place = (number + float(torch.rand((), generator=generator))) / groups
        lead = segment_length + int(place * segment_length)
        num_lanes = min(LANES, num_trials - number * LANES)
        trials = drawn_trials(kind, tokens, distance, lead, num_lanes, generator)
        logits_BJV = scored_logits(module, trials, memory_length, segment_length, tokens.end_id)
        right_BJ, losses_BJ = _scored(logits_BJV, trials, tokens.candidates, first_scored)
        right.append(right_BJ.double().mean(1))
        losses.append(losses_BJ.flatten())
    right_B, losses_X = torch.cat(right), torch.cat(losses)
    low, high = wilson_interval(float(right_B.sum()), num_trials)
    choices = num_choices(kind, tokens)
    return Recall(
        distance=distance,
        accuracy=float(right_B.mean()),
        low=low,
        high=high,
        chance=sum(1 / count for count in choices) / len(choices),
        loss=float(losses_X.mean()),
        chance_loss=sum(map(math.log, choices)) / len(choices),
        trials=num_trials,
        tokens=len(losses_X),
    )


def _scored(
    logits_BJV: Tensor, trials: Trials, candidates: Tensor, first_scored: int
) -> tuple[Tensor, Tensor]:
    """Return which tokens are predicted rightly, and each one's loss among candidates, [B, J]."""
    logits_BJX = logits_BJV[..., candidates.to(logits_BJV.device)].double().cpu()
    places_J1 = first_scored + torch.arange(trials.num_scored)[:, None]
    place_B1X = trials.place_BX[:, None]
    logits_BJX = logits_BJX.masked_fill(place_B1X < places_J1, -math.inf)
    target_BJ = (place_B1X == places_J1).long().argmax(-1)
    losses_BJ = -logits_BJX.log_softmax(-1).gather(2, target_BJ[..., None]).squeeze(2)
    return logits_BJX.argmax(-1) == target_BJ, losses_BJ


def recall_distance(results: Sequence[Recall]) -> int:
    """Return the longest distance up to which every tested one is recalled; 0 for none."""
    reached = 0
    for result in results:
        if not result.is_recalled:
            break
        reached = result.distance
    return reached
