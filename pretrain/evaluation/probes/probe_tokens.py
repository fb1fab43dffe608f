"""Which tokens probes are made of: ids of the vocabulary itself, so that any tokenizer will do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.errors import ConfigError
from data_pipeline.lanes.evaluation_stream import EvaluationStream
from data_pipeline.tokenizer import Tokenizer

SAMPLE_TOKENS = 1 << 17  # of the split
READ_TOKENS = 8192  # at a time
MOST_TOKENS = 256  # candidates and fillers
FEWEST_CANDIDATES = 9


@dataclass(frozen=True)
class ProbeTokens:
    """Disjoint ids for what must be recalled and for what stands between, and text of a split."""

    candidates: Tensor
    fillers: Tensor
    text: Tensor | None  # without ends of documents
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
    """Return ids from all over the vocabulary, of tokens that stand for text."""
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
