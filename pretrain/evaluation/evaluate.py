"""The loss of a model on a split, with memories of any length; every token is scored once.

Each lane carries its memory from segment to segment. What is summed of each lane, in float64, and
the sum over lanes in their order do not depend on which rank has which lane, so that any number of
ranks gives the same result up to the rounding of matrix products. N lanes of all ranks; other
letters of shapes as in `pretrain.model`.

Tasks of lm-eval while a run trains: rank 0 has the whole weights and runs them. It tells the others
before each batch of texts that it works: no watchdog takes the wait for a hang, and a request to
stop ends the tasks on all ranks at the same batch.

Relative effective context length (section 3.3 and appendix C) is how far back context still helps.
Each step from a context of c tokens to c + step lowers the loss less than the one before. The
context length of a model is the c from which the next step lowers perplexity by less than 1%. It is
measured for several models together, over the same P positions. Each step starts from the best loss
that any of them reached with c, so that a weak model does not look good because it has more left to
gain.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from data_pipeline.corpora.corpus import Corpus, tokenizer_of
from data_pipeline.lanes.lane_stream import (
    EvaluationStream,
    SegmentBatch,
    evaluated_lanes,
    useful_lanes,
)
from foundation.errors import ConfigError
from pretrain.config.run import RunConfig
from pretrain.distributed.collectives import broadcast_value, sum_over_ranks
from pretrain.distributed.world import World
from pretrain.engines.engine import Engine, batch_tensors
from pretrain.evaluation.task_names import check_tasks
from pretrain.model.cached import Stream, new_stream
from pretrain.model.lane_state import Memory, document_starts
from pretrain.model.transformer_xl import TransformerXL
from pretrain.recovery.stop_requests import StopRequested
from pretrain.rundir.metric_names import SCORED_SPEED, set_values, task_values
from pretrain.terminal.text import perplexity
from pretrain.weights.export import TrainedModel

logger = logging.getLogger(__name__)

TextSizes = tuple[np.ndarray, np.ndarray]


class Scorer(Protocol):
    """The part of an engine that evaluation needs.

    `num_tokens` of a lane may save space; positions are those of the memory length.
    """

    @property
    def world(self) -> World: ...

    def evaluate(
        self,
        batch: SegmentBatch,
        memory: Memory | None,
        memory_length: int,
        num_tokens: int | None = None,
    ) -> tuple[Tensor, Memory]: ...


@dataclass(frozen=True)
class EvaluationResult:
    """Means over `tokens` targets, including ends of documents; bits are per unit of their text."""

    memory_length: int
    segment_length: int
    lanes: int  # used: follows from the corpus and the settings, not from the ranks
    loss: float  # nats per token
    perplexity: float
    bits_per_byte: float
    bits_per_character: float
    tokens: int
    seconds: float
    loss_by_position: tuple[float, ...]  # in the segment: later tokens have more of it as context


class TrainedScorer:
    """A frozen model on this process, with cached keys and values: exact, and several times faster.

    The cache is internal: a call without memory starts new streams, and the memory returned is
    empty.
    """

    def __init__(self, trained: TrainedModel, world: World) -> None:
        self.trained = trained
        self.world = world
        self._stream: Stream | None = None

    def evaluate(
        self,
        batch: SegmentBatch,
        memory: Memory | None,
        memory_length: int,
        num_tokens: int | None = None,
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
    """Score a split, or about its first `max_tokens` tokens, on all ranks together.

    `text_sizes` are those of the corpus' tokenizer, which is loaded to know them.

    `advance` is called with the number of tokens of each batch. `before_batch` is called by every
    rank before each batch, of which all have equally many, and may raise. Bytes and characters are
    those of the manifest if the whole split is scored, else those of the scored tokens.
    """
    world = scorer.world
    num_lanes = useful_lanes(corpus, num_lanes, segment_length, max_tokens)
    lanes = evaluated_lanes(num_lanes, world.rank, world.world_size)
    # A rank without a lane computes one that is not counted: under ZeRO-3 every rank must run
    # every module.
    stream = EvaluationStream(corpus, num_lanes, segment_length, lanes or range(1), max_tokens)
    bytes_V, characters_V = map(torch.from_numpy, text_sizes or text_sizes_of(corpus))
    num_tokens = stream.num_batches * segment_length  # of a lane: there are no more to remember
    start = time.perf_counter()
    # Of each lane: loss and tokens by position, bytes, characters. Rows of other ranks stay zero.
    losses_NL, tokens_NL = torch.zeros(2, num_lanes, segment_length, dtype=torch.float64)
    sizes_N2 = torch.zeros(num_lanes, 2, dtype=torch.float64)
    own = slice(lanes.start, lanes.stop)
    memory: Memory | None = None
    for batch in stream:
        before_batch()
        nll_BL, memory = scorer.evaluate(batch, memory, memory_length, num_tokens)
        if not lanes:
            continue
        valid_BL, targets_BL = map(torch.from_numpy, (batch.valid_BL, batch.targets_BL))
        losses_NL[own] += nll_BL.double().cpu().where(valid_BL, 0.0)
        tokens_NL[own] += valid_BL
        for column, sizes_V in enumerate((bytes_V, characters_V)):
            sizes_N2[own, column] += sizes_V[targets_BL].where(valid_BL, 0).sum(1)
        advance(int(valid_BL.sum()) * num_lanes // len(lanes))
    sums_NX = torch.cat([losses_NL, tokens_NL, sizes_N2], dim=1).to(world.device)
    # Each row is of one rank, so that nothing is rounded here. numpy then adds one row after the
    # other: the same sums on all ranks, and of any number of them.
    sums_X = sum_over_ranks(sums_NX).cpu().numpy().sum(axis=0)
    *by_position, num_bytes, num_characters = sums_X.tolist()
    losses_L, tokens_L = by_position[:segment_length], by_position[segment_length:]
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
        seconds=time.perf_counter() - start,
        loss_by_position=tuple(
            of_tokens / max(count, 1) for of_tokens, count in zip(losses_L, tokens_L, strict=True)
        ),
    )


def text_sizes_of(corpus: Corpus) -> TextSizes:
    """Return the bytes and characters of text of each of its tokens."""
    return tokenizer_of(corpus.directory.parent).text_sizes()


def training_evaluator(
    run: RunConfig,
    engine: Engine,
    sets: Mapping[str, Path] | None = None,
    before_corpus: Callable[[], None] = lambda: None,
    before_batch: Callable[[], None] = lambda: None,
) -> Callable[[], dict[str, float]]:
    """Return a function that measures the validation loss with the training memory and without.

    It also measures the losses of `sets`, splits by name, with the training memory. Every loss
    starts with no memory. `before_corpus` is called before each.
    """
    validation = run.data.directory() / "validation"
    corpora = {
        directory: Corpus.open(directory, cache=run.data.cache)
        for directory in (validation, *(sets or {}).values())
    }

    # To load a tokenizer takes a second, and thousands of ranks would read its file each time.
    sizes_of = functools.cache(text_sizes_of)

    def measure(memory_length: int, directory: Path = validation) -> EvaluationResult:
        before_corpus()
        return evaluate(
            engine,
            corpora[directory],
            memory_length=memory_length,
            segment_length=run.data.segment_length,
            num_lanes=run.evaluation.lanes,
            max_tokens=run.evaluation.max_tokens,
            before_batch=before_batch,
            text_sizes=sizes_of(corpora[directory]),
        )

    def values() -> dict[str, float]:
        result = measure(run.model.longest_memory)
        shown = ("loss", "perplexity", "bits_per_byte", "bits_per_character", "tokens")
        without = result.loss if run.model.longest_memory == 0 else measure(0).loss
        found = {name: getattr(result, name) for name in shown} | {"loss_without_memory": without}
        known = {validation: result}  # a part of a mixture may be the corpus of the run
        for name, directory in (sets or {}).items():
            if directory not in known:
                known[directory] = measure(run.model.longest_memory, directory)
            found |= set_values(name, known[directory].loss, known[directory].bits_per_byte)
        return found

    return values


def loss_rows(results: Sequence[EvaluationResult]) -> list[tuple[str, ...]]:
    """Return the rows of a table, heads first."""
    rows = [
        (
            f"{result.memory_length:,}",
            f"{result.loss:.4f}",
            f"{result.perplexity:,.2f}",
            f"{result.bits_per_byte:.4f}",
            f"{result.bits_per_character:.4f}",
            f"{result.tokens / result.seconds:,.0f}",
        )
        for result in results
    ]
    return [("memory", "loss", "perplexity", "bits/byte", "bits/character", SCORED_SPEED), *rows]


def check_training_tasks(run: RunConfig) -> None:
    """Raise ConfigError or DataError if the run's tasks, or their data, cannot be loaded."""
    if run.evaluation.tasks:
        check_tasks(run.evaluation.tasks)
        with kept_random_state():
            from pretrain.evaluation.harness import load_tasks  # late: lm-eval is an extra

            load_tasks(run.evaluation.tasks)


def training_tasks(
    run: RunConfig, engine: Engine, before_batch: Callable[[], None]
) -> Callable[[int], dict[str, float | None]]:
    """Return a function that measures the run's tasks after a step. A collective; {} if they fail.

    Rank 0 returns what it measured, the others {}. `before_batch` is called by every rank before
    each batch of texts, and may raise. Weights, memories and random numbers stay as they are.
    """
    world = engine.world

    def tick() -> None:
        broadcast_value(True, bool)
        before_batch()

    def measure(step: int) -> dict[str, float | None]:
        if not world.is_main:
            while broadcast_value(False, bool):
                before_batch()
            return {}
        try:
            with kept_random_state(), evaluating(engine) as module:
                from pretrain.evaluation.harness import run_tasks

                trained = TrainedModel(module, run, step, run.data.directory())
                results = run_tasks(
                    trained,
                    run.evaluation.tasks,
                    limit=run.evaluation.tasks_limit,
                    bootstrap_iters=0,  # standard errors take longer than small tasks
                    memory_length=run.model.longest_memory,
                    segment_length=run.data.segment_length,
                    batch_size=run.evaluation.lanes,
                    before_batch=tick,
                )
        except StopRequested:
            raise  # by all ranks
        except Exception as error:  # of a library, in code that only measures
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            logger.warning("evaluation.tasks gave no results after step %d: %s", step, reason)
            results = {}
        broadcast_value(False, bool)
        return task_values(results)

    return measure


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore all random number generators after the block: the harness seeds and uses them."""
    python, of_numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


@contextlib.contextmanager
def evaluating(engine: Engine) -> Iterator[TransformerXL]:
    """The model without dropout in the block; it keeps its mode, and the angles of training."""
    module = cast("TransformerXL", engine.module)
    was_training = module.training
    try:
        yield module.eval()
    finally:
        module.train(was_training)
        module.trained_keys = ()
        module.expect_keys(0, 0)


THRESHOLD = 0.01  # of perplexity
READ_TOKENS = 8192  # of the split at a time
LANES = 64  # positions computed together

# From a context length to the NLL [P] in float64 of every position after that many tokens.
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
        found, grows = gains[model][index], (model, index) in growing
        length = contexts.step * (len(found) + grows)
        return ContextLength(shares[index], length, tuple(found), reached_longest=grows)

    return [[length_of(model, i) for i in range(len(shares))] for model in range(len(losses))]


def _gain(best_P: Tensor, longer_P: Tensor, share: float) -> float:
    """Return the relative decrease of perplexity on the hardest positions: g of appendix C."""
    hardest = best_P.argsort(descending=True, stable=True)[: max(1, round(share * len(best_P)))]
    before = best_P[hardest].mean().exp()
    after = torch.minimum(best_P, longer_P)[hardest].mean().exp()
    return float((before - after) / before)


class SplitPositions:
    """Up to `most` positions spread evenly over a split, each after `longest` tokens or more."""

    def __init__(self, corpus: Corpus, most: int, longest: int, max_tokens: int = 0) -> None:
        parts = EvaluationStream(corpus, 1, READ_TOKENS, range(1), max_tokens)
        tokens_T = torch.cat([torch.from_numpy(part.targets_BL[part.valid_BL]) for part in parts])
        available = len(tokens_T) - longest
        if available < 1:
            raise ConfigError(
                f"{corpus.directory} has {len(tokens_T):,} tokens, expected more than the longest "
                f"context, {longest:,}; use a shorter one"
            )
        num_positions = min(most, available)
        self.tokens_T = tokens_T
        self._end_id = corpus.manifest.end_id
        self.offsets_P = longest + torch.arange(num_positions) * available // num_positions

    def __len__(self) -> int:
        return len(self.offsets_P)

    @torch.no_grad()
    def losses(
        self, module: TransformerXL, length: int, memory_length: int, segment_length: int
    ) -> Tensor:
        """Return the NLL [P] in float64 after exactly `length` tokens, read as a new stream."""
        device = next(module.parameters()).device
        found = []
        for offsets_B in self.offsets_P.split(LANES):
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
            found.append(-scored_B1.squeeze(1).double().cpu())
        return torch.cat(found)


def context_rows(lengths: Sequence[ContextLength], step: int) -> list[tuple[str, ...]]:
    """Return the rows of a table for one model, heads first."""
    rows = [("r", "context length", f"perplexity decreases with each {step} tokens more by")]
    gains = [[f"{gain:.1%}" for gain in each.gains] for each in lengths]
    width = max((len(gain) for row in gains for gain in row), default=0)
    most = max(map(len, gains))
    for each, texts in zip(lengths, gains, strict=True):
        length = f"{each.length:,}{' or more' if each.reached_longest else ''}"
        # A step is in the same place of every row, also of those that end earlier.
        steps = " ".join(text.rjust(width) for text in [*texts, *[""] * (most - len(texts))])
        rows.append((f"{each.share:g}", length, steps))
    return rows
