"""The loss of a model on a split, with memories of any length; every token is scored once.

Each lane carries its memory from segment to segment. Losses are summed per lane, in float64, and
then over the lanes in their order. These sums do not depend on which rank has which lane, so any
number of ranks gives the same result up to the rounding of matrix products. N lanes of all ranks;
other letters of shapes as in `pretrain.model`.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.corpus_identity import tokenizer_of
from data_pipeline.lanes.evaluation_stream import (
    NUM_PARTS,
    EvaluationStream,
    evaluated_lanes,
    useful_lanes,
)
from data_pipeline.lanes.segment_batch import SegmentBatch
from pretrain.distributed.collectives import sum_over_ranks
from pretrain.distributed.world import World
from pretrain.engines.engine import Scorer, batch_tensors
from pretrain.model.cached import Stream, new_stream
from pretrain.model.memory import Memory
from pretrain.rundir.evaluated_text import EvaluatedText
from pretrain.rundir.metric_names import SCORED_SPEED
from pretrain.terminal.text import format_number, perplexity
from pretrain.weights.export import TrainedModel

logger = logging.getLogger(__name__)

TextSizes = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class EvaluationResult:
    """Means over `tokens` targets, including ends of documents, and bits per unit of text."""

    memory_length: int
    segment_length: int
    lanes: int  # follows from the corpus and the settings, not from the ranks
    loss: float  # nats per token
    perplexity: float
    bits_per_byte: float
    bits_per_character: float
    tokens: int
    text: EvaluatedText
    seconds: float
    loss_by_position: tuple[float, ...]  # by index in the segment

    def values(self) -> dict[str, Any]:
        """Return the result as plain values."""
        values = {**vars(self), **vars(self.text), "standard_error": self.text.standard_error}
        del values["text"]
        return values


class TrainedScorer(Scorer):
    """A frozen model on this process, which caches keys and values instead of hidden states.

    Its losses are exact, and several times faster. A call without memory starts new streams. The
    returned memory is empty, because this object has the cache.
    """

    def __init__(self, trained: TrainedModel, world: World) -> None:
        self.trained = trained
        self.world = world
        self._stream: Stream | None = None

    def evaluate(
        self, batch: SegmentBatch, memory: Memory | None, memory_length: int, num_tokens: int = 0
    ) -> tuple[Tensor, Memory]:
        tokens_BL, targets_BL, starts_BL = batch_tensors(batch, self.world.device)
        if memory is None or self._stream is None:
            module, length = self.trained.module, tokens_BL.shape[1]
            self._stream = new_stream(module, memory_length, length, num_tokens)
        return self._stream.nll_BL(tokens_BL, targets_BL, starts_BL), ()


def evaluate(
    scorer: Scorer,
    corpus: Corpus,
    *,
    memory_length: int,
    segment_length: int,
    num_lanes: int,
    max_tokens: int = 0,
    advance: Callable[[int], None] = lambda tokens: None,
    before_batch: Callable[[], None] = lambda: None,
    text_sizes: TextSizes | None = None,
) -> EvaluationResult:
    """Score a split, or `max_tokens` tokens of its documents' heads, on all ranks together.

    `text_sizes` default to `corpus_text_sizes`, which loads the tokenizer.

    `advance` is called with the number of tokens of each batch. `before_batch` is called by every
    rank before each batch, equally often, and may raise. Bytes and characters are those in the
    manifest if the whole split is scored; else they are summed over the scored tokens.
    """
    world = scorer.world
    num_lanes = useful_lanes(corpus, num_lanes, segment_length, max_tokens, heads=True)
    lanes = evaluated_lanes(num_lanes, world.rank, world.world_size)
    # A rank without a lane reads lane 0 and does not count it: under ZeRO-3 every rank must run
    # every module.
    own_lanes = lanes or range(1)
    stream = EvaluationStream(corpus, num_lanes, segment_length, own_lanes, max_tokens, heads=True)
    bytes_V, characters_V = map(torch.from_numpy, text_sizes or corpus_text_sizes(corpus))
    num_tokens = stream.num_batches * segment_length  # of a lane: the cache needs no more rows
    start = time.perf_counter()
    # Rows of other ranks' lanes stay zero. The 2 are bytes and characters; parts have losses, then
    # tokens.
    losses_NL, tokens_NL = torch.zeros(2, num_lanes, segment_length, dtype=torch.float64)
    sizes_N2 = torch.zeros(num_lanes, 2, dtype=torch.float64)
    parts_N2P = torch.zeros(num_lanes, 2 * NUM_PARTS, dtype=torch.float64)
    own = slice(lanes.start, lanes.stop)
    memory: Memory | None = None
    for batch in stream:
        before_batch()
        nll_BL, memory = scorer.evaluate(batch, memory, memory_length, num_tokens)
        if not lanes:
            continue
        valid_BL, targets_BL = map(torch.from_numpy, (batch.valid_BL, batch.targets_BL))
        nll_BL = nll_BL.double().cpu().where(valid_BL, 0.0)
        losses_NL[own] += nll_BL
        tokens_NL[own] += valid_BL
        for column, sizes_V in enumerate((bytes_V, characters_V)):
            sizes_N2[own, column] += sizes_V[targets_BL].where(valid_BL, 0).sum(1)
        parts_BL = torch.from_numpy(batch.parts_BL)
        parts_N2P[own].scatter_add_(1, parts_BL, nll_BL)
        parts_N2P[own].scatter_add_(1, parts_BL + NUM_PARTS, valid_BL.double())
        advance(int(valid_BL.sum()) * num_lanes // len(lanes))
    documents_N1 = torch.zeros(num_lanes, 1, dtype=torch.float64)
    if lanes:
        documents_N1[lanes.start] = stream.num_documents
    sums_NX = torch.cat([losses_NL, tokens_NL, parts_N2P, sizes_N2, documents_N1], dim=1)
    # Only one rank has a row that is not zero, so this sum is not rounded. numpy then adds the rows
    # in order, so all ranks, and any number of ranks, get the same sums.
    sums_X = sum_over_ranks(sums_NX.to(world.device)).cpu().numpy().sum(axis=0).tolist()
    *sums_X, num_bytes, num_characters, num_documents = sums_X
    losses_L, tokens_L = sums_X[:segment_length], sums_X[segment_length : 2 * segment_length]
    losses_P, tokens_P = sums_X[-2 * NUM_PARTS : -NUM_PARTS], sums_X[-NUM_PARTS:]
    loss, tokens = math.fsum(losses_L), sum(tokens_L)
    if tokens == corpus.num_tokens:
        num_bytes, num_characters = corpus.num_bytes, corpus.num_characters
    return EvaluationResult(
        memory_length=memory_length,
        segment_length=segment_length,
        lanes=num_lanes,
        loss=loss / tokens,
        perplexity=perplexity(loss / tokens),
        bits_per_byte=loss / math.log(2) / max(num_bytes, 1),
        bits_per_character=loss / math.log(2) / max(num_characters, 1),
        tokens=int(tokens),
        text=EvaluatedText(
            int(num_documents),
            tuple(
                (round(of_part / count, 6), int(count))
                for of_part, count in zip(losses_P, tokens_P, strict=True)
                if count
            ),
        ),
        seconds=time.perf_counter() - start,
        loss_by_position=tuple(
            of_tokens / max(count, 1) for of_tokens, count in zip(losses_L, tokens_L, strict=True)
        ),
    )


def corpus_text_sizes(corpus: Corpus) -> TextSizes:
    """Return the bytes, and the characters, of text that each id of the tokenizer stands for."""
    return tokenizer_of(corpus.directory.parent).text_sizes()


def loss_rows(results: Sequence[EvaluationResult]) -> list[tuple[str, ...]]:
    """Return the rows of a table, heads first."""
    rows = [
        (
            f"{result.memory_length:,}",
            f"{result.loss:.4f}",
            format_number(result.text.standard_error, ".4f"),
            f"{result.perplexity:,.2f}",
            f"{result.bits_per_byte:.4f}",
            f"{result.bits_per_character:.4f}",
            f"{result.tokens / result.seconds:,.0f}",
        )
        for result in results
    ]
    heads = ("memory", "loss", "standard error", "perplexity", "bits/byte", "bits/character")
    return [(*heads, SCORED_SPEED), *rows]
