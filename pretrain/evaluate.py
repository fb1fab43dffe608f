"""`pretrain evaluate`: how well a model predicts a split, with memories of any length; every token is scored once.

B lanes, L tokens of the segment, V vocabulary. Each lane carries its memory from segment to segment; lanes and ranks
are joined by sums in float64, so the result does not depend on how many ranks took part (beyond rounding).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from data_pipeline.corpus import Corpus
from data_pipeline.errors import ConfigError
from data_pipeline.lanes import EvaluationStream, SegmentBatch
from data_pipeline.tokenizer import Tokenizer
from pretrain.config import RunConfig
from pretrain.console import perplexity
from pretrain.distributed import World, init_world, leave_world, sum_over_ranks
from pretrain.engine import Engine, Memory, batch_tensors
from pretrain.inference import TrainedModel, load_tokenizer, load_trained
from pretrain.model.cached import Stream, new_stream


class Scorer(Protocol):
    """What evaluation needs of an engine."""

    @property
    def world(self) -> World: ...

    def evaluate(self, batch: SegmentBatch, memory: Memory | None, memory_length: int) -> tuple[Tensor, Memory]: ...


@dataclass(frozen=True)
class EvaluationResult:
    """Means over `tokens` targets, ends of documents included; bits are per byte and character of their text."""

    memory_length: int
    segment_length: int
    loss: float  # nats per token
    perplexity: float
    bits_per_byte: float
    bits_per_character: float
    tokens: int
    seconds: float
    loss_by_position: tuple[float, ...]  # of the segment: the later, the more the segment itself tells


class TrainedScorer:
    """A whole frozen model on this process, which remembers projected keys and values: exact, and several times faster.

    The cache stays inside: a call without a memory begins new streams, and the memory handed out is empty.
    """

    def __init__(self, trained: TrainedModel, world: World) -> None:
        self.trained = trained
        self.world = world
        self._stream: Stream | None = None

    def evaluate(self, batch: SegmentBatch, memory: Memory | None, memory_length: int) -> tuple[Tensor, Memory]:
        tokens_BL, targets_BL, starts_BL = batch_tensors(batch, self.world.device)
        if memory is None or self._stream is None:
            self._stream = new_stream(self.trained.module, memory_length, tokens_BL.shape[1])
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
) -> EvaluationResult:
    """Score a split with all ranks together, or about its first `max_tokens` tokens; `advance` hears of each batch's.

    The bytes and characters are those of the manifest when the whole split is scored, else of the scored tokens.
    """
    world = scorer.world
    lanes_per_rank = -(-num_lanes // world.world_size)
    lanes = range(world.rank * lanes_per_rank, (world.rank + 1) * lanes_per_rank)
    stream = EvaluationStream(corpus, lanes_per_rank * world.world_size, segment_length, lanes, max_tokens)
    bytes_V, characters_V = (
        torch.from_numpy(sizes) for sizes in Tokenizer.load(corpus.tokenizer_directory).text_sizes()
    )
    begin = time.perf_counter()
    sums = torch.zeros(2, segment_length, dtype=torch.float64)  # loss and number of tokens by position
    sizes = torch.zeros(2, 1, dtype=torch.float64)  # bytes, characters
    memory: Memory | None = None
    for batch in stream:
        nll_BL, memory = scorer.evaluate(batch, memory, memory_length)
        valid_BL = torch.from_numpy(batch.valid_BL)
        scored = torch.from_numpy(batch.targets_BL)[valid_BL]
        sums[0] += nll_BL.double().cpu().where(valid_BL, 0.0).sum(0)
        sums[1] += valid_BL.sum(0)
        sizes += torch.stack([bytes_V[scored].sum(), characters_V[scored].sum()])[:, None]
        advance(len(scored) * world.world_size)
    total = sum_over_ranks(torch.cat([sums, sizes], dim=1).to(world.device)).cpu()
    (loss, tokens), (num_bytes, num_characters) = total[:, :-1].sum(1).tolist(), total[:, -1].tolist()
    if tokens == corpus.num_tokens:
        num_bytes, num_characters = corpus.num_bytes, corpus.num_characters
    return EvaluationResult(
        memory_length=memory_length,
        segment_length=segment_length,
        loss=loss / tokens,
        perplexity=perplexity(loss / tokens),
        bits_per_byte=loss / math.log(2) / max(num_bytes, 1),
        bits_per_character=loss / math.log(2) / max(num_characters, 1),
        tokens=int(tokens),
        seconds=time.perf_counter() - begin,
        loss_by_position=tuple((total[0, :-1] / total[1, :-1].clamp(min=1)).tolist()),
    )


def training_evaluator(run: RunConfig, engine: Engine) -> Callable[[], dict[str, float]]:
    """What the training loop calls at its intervals: the validation loss with the training memory and without any."""
    corpus = Corpus.open(run.data.path / "validation")

    def measure(memory_length: int) -> EvaluationResult:
        return evaluate(
            engine,
            corpus,
            memory_length=memory_length,
            segment_length=run.data.segment_length,
            num_lanes=run.evaluation.lanes,
            max_tokens=run.evaluation.max_tokens,
        )

    def values() -> dict[str, float]:
        result = measure(run.model.memory_length)
        shown = ("loss", "perplexity", "bits_per_byte", "bits_per_character", "tokens")
        without = result.loss if run.model.memory_length == 0 else measure(0).loss
        return {**{name: getattr(result, name) for name in shown}, "loss_without_memory": without}

    return values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `pretrain evaluate`."""
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="directory of a run (its newest good checkpoint is used) or an export"
    )
    parser.add_argument("--data", type=Path, help="corpus made by 'data-pipeline build' (default: the run's)")
    parser.add_argument("--split", default="validation", help="which of its splits (default %(default)s)")
    parser.add_argument(
        "--memory-length", type=int, nargs="+", metavar="N", help="tokens of memory to try (default: as in training)"
    )
    parser.add_argument("--segment-length", type=int, default=0, metavar="N", help="default: as in training")
    parser.add_argument(
        "--lanes", type=int, default=0, metavar="N", help="streams read side by side (default: the run's)"
    )
    parser.add_argument("--max-tokens", type=int, default=0, metavar="N", help="score only so many (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print one row per memory length."""
    if (
        min(arguments.memory_length or [0]) < 0
        or min(arguments.segment_length, arguments.lanes, arguments.max_tokens) < 0
    ):
        raise ConfigError("--memory-length, --segment-length, --lanes and --max-tokens must be 0 or more")
    world = init_world()
    try:
        trained = load_trained(arguments.run, world.device, say=lambda text: print(text, file=sys.stderr))
        config = trained.config
        corpus = Corpus.open((arguments.data or config.data.path) / arguments.split)
        load_tokenizer(trained, corpus.directory.parent)
        results = _with_progress(
            TrainedScorer(trained, world),
            corpus,
            arguments.memory_length or [config.model.memory_length],
            segment_length=arguments.segment_length or config.data.segment_length,
            num_lanes=arguments.lanes or config.evaluation.lanes,
            max_tokens=arguments.max_tokens,
        )
    finally:
        leave_world()
    if world.is_main and arguments.json:
        print(json.dumps({"step": trained.step, "results": [dataclasses.asdict(result) for result in results]}))
    elif world.is_main:
        print(
            f"step {trained.step}, {results[0].tokens:,} tokens of {corpus.directory}, segments of "
            f"{results[0].segment_length}; trained with a memory of {config.model.memory_length}\n"
        )
        print(table(results))
    return 0


def table(results: Sequence[EvaluationResult]) -> str:
    """One aligned row per result."""
    heads = ("memory", "loss", "perplexity", "bits/byte", "bits/character", "tokens/s")
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
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (heads, *rows)
    )


def _with_progress(
    scorer: Scorer,
    corpus: Corpus,
    memory_lengths: Sequence[int],
    *,
    segment_length: int,
    num_lanes: int,
    max_tokens: int,
) -> list[EvaluationResult]:
    from rich.console import Console
    from rich.progress import Progress

    results = []
    total = min(max_tokens, corpus.num_tokens) if max_tokens else corpus.num_tokens
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not (console.is_terminal and scorer.world.is_main)) as bar:
        for memory_length in memory_lengths:
            task = bar.add_task(f"memory {memory_length}", total=total)
            results.append(
                evaluate(
                    scorer,
                    corpus,
                    memory_length=memory_length,
                    segment_length=segment_length,
                    num_lanes=num_lanes,
                    max_tokens=max_tokens,
                    advance=lambda tokens, task=task: bar.advance(task, tokens),
                )
            )
    return results
