"""`pretrain evaluate`: losses of trained models on a split, how far back they look, and what memory saves."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.errors import ConfigError
from pretrain.distributed.world import World, destroy_process_group, init_world
from pretrain.evaluation import context_length, sliding_window
from pretrain.evaluation.evaluate import EvaluationResult, Scorer, TrainedScorer, evaluate
from pretrain.terminal.text import text_table
from pretrain.weights.trained_model import TrainedModel, load_tokenizer, load_trained

CONTEXT_DEFAULTS = {"context_step": 50, "longest_context": 1000, "positions": 512}
SHARES = (0.1, 0.5, 1.0)  # of the positions, as in table 8 of the paper


@dataclass(frozen=True)
class Answer:
    """What is printed of one model."""

    title: str
    rows: list[tuple[str, ...]]  # the first: heads
    values: dict[str, Any]  # with --json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `pretrain evaluate`."""
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="directory of a run (newest good checkpoint) or an export",
    )
    parser.add_argument(
        "--data", type=Path, help="directory or URL of a corpus (default: the run's)"
    )
    parser.add_argument(
        "--split", default="validation", help="which of its splits (default %(default)s)"
    )
    parser.add_argument(
        "--memory-length",
        type=int,
        nargs="+",
        metavar="N",
        help="tokens of memory to try (default: as in training)",
    )
    parser.add_argument(
        "--segment-length", type=int, default=0, metavar="N", help="default: as in training"
    )
    parser.add_argument(
        "--clamp",
        type=int,
        metavar="N",
        help="distances beyond N share one encoding, 0: none (default: as in training)",
    )
    parser.add_argument(
        "--same-length", action="store_true", help="every token sees as many keys as the memory has"
    )
    parser.add_argument(
        "--lanes",
        type=int,
        default=0,
        metavar="N",
        help="streams read side by side (default: the run's)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=0, metavar="N", help="score only so many (default: all)"
    )
    parser.add_argument(
        "--ema", action="store_true", help="the running average of the weights, if the run kept one"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--context-length",
        action="store_true",
        help="relative effective context length of the models",
    )
    what.add_argument(
        "--compare-sliding-window",
        action="store_true",
        help="tokens/s against computing a window for every token",
    )
    context = parser.add_argument_group("with --context-length")
    for name, value in CONTEXT_DEFAULTS.items():
        context.add_argument(
            f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"default {value}"
        )


def run(arguments: argparse.Namespace) -> int:
    """Print a table for each run, or one for all."""
    numbers = (
        *(arguments.memory_length or [0]),
        arguments.segment_length,
        arguments.lanes,
        arguments.max_tokens,
    )
    numbers += (arguments.clamp or 0,)
    if min(numbers) < 0:
        raise ConfigError(
            "--memory-length, --segment-length, --clamp, --lanes and --max-tokens must be 0 or more"
        )
    _refuse_idle_options(arguments)
    world = init_world()
    try:
        models = [_load(arguments, path, world) for path in arguments.runs]
        if arguments.context_length:
            answers = _context_lengths(arguments, models, world)
        elif arguments.compare_sliding_window:
            answers = _sliding_windows(arguments, models, world)
        else:
            answers = _losses(arguments, models, world)
    finally:
        destroy_process_group()
    if world.is_main:
        values = [answer.values for answer in answers]
        texts = [f"{answer.title}\n\n{text_table(answer.rows, left=())}" for answer in answers]
        print(
            json.dumps(values[0] if len(values) == 1 else values)
            if arguments.json
            else "\n\n".join(texts)
        )
    return 0


def _refuse_idle_options(arguments: argparse.Namespace) -> None:
    """ConfigError for options that would do nothing; the defaults of those that do something."""
    for name, value in CONTEXT_DEFAULTS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
        elif not arguments.context_length:
            raise ConfigError(f"--{name.replace('_', '-')} goes with --context-length")
    if arguments.context_length and len(arguments.memory_length or []) > 1:
        raise ConfigError(
            "--context-length measures with one memory length; give one, and compare two calls"
        )
    if (arguments.context_length or arguments.compare_sliding_window) and arguments.lanes:
        raise ConfigError("--lanes goes with neither --context-length nor --compare-sliding-window")
    if arguments.same_length and 0 in (arguments.memory_length or []):
        raise ConfigError(
            "--same-length needs a --memory-length above 0, the number of keys each token sees"
        )


def _load(arguments: argparse.Namespace, path: Path, world: World) -> TrainedModel:
    settings: dict[str, Any] = {} if arguments.clamp is None else {"clamp_length": arguments.clamp}
    if arguments.same_length:
        settings["same_length"] = True

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    return load_trained(path, world.device, say=say, model_settings=settings, ema=arguments.ema)


def _corpus(arguments: argparse.Namespace, trained: TrainedModel) -> Corpus:
    data = dataclasses.replace(trained.config.data, path=arguments.data or trained.config.data.path)
    corpus = Corpus.open(data.directory() / arguments.split)
    load_tokenizer(trained, corpus.directory.parent)
    return corpus


def _losses(
    arguments: argparse.Namespace, models: Sequence[TrainedModel], world: World
) -> list[Answer]:
    answers = []
    for path, trained in zip(arguments.runs, models, strict=True):
        corpus, config = _corpus(arguments, trained), trained.config
        results = _with_progress(
            TrainedScorer(trained, world),
            corpus,
            arguments.memory_length or [config.model.memory_length],
            segment_length=min(_segment_length(arguments, trained), corpus.num_tokens),
            num_lanes=arguments.lanes or config.evaluation.lanes,
            max_tokens=arguments.max_tokens,
        )
        title = (
            f"{path}: step {trained.step}, {results[0].tokens:,} tokens of {corpus.place}, segments of "
            f"{results[0].segment_length}; trained with a memory of {config.model.memory_length}"
        )
        values = {"step": trained.step, "results": list(map(dataclasses.asdict, results))}
        answers.append(Answer(title, loss_rows(results), values))
    return answers


def loss_rows(results: Sequence[EvaluationResult]) -> list[tuple[str, ...]]:
    """A row of heads and one per result."""
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
    return [("memory", "loss", "perplexity", "bits/byte", "bits/character", "tokens/s"), *rows]


def _context_lengths(
    arguments: argparse.Namespace, models: Sequence[TrainedModel], world: World
) -> list[Answer]:
    contexts = context_length.ContextGrid(arguments.context_step, arguments.longest_context)
    _refuse_ranks(world, "--context-length")
    corpora = [_corpus(arguments, trained) for trained in models]
    if len({corpus.manifest.hash for corpus in corpora}) > 1:
        raise ConfigError("the runs have different corpora; give one for all with --data")
    positions = context_length.SplitPositions(
        corpora[0], arguments.positions, contexts.longest, arguments.max_tokens
    )

    def losses_of(trained: TrainedModel) -> context_length.Losses:
        memory, segment = _first_memory(arguments, trained), _segment_length(arguments, trained)
        return lambda length: positions.losses(trained.module, length, memory, segment)

    lengths = context_length.relative_effective_context_lengths(
        list(map(losses_of, models)), contexts, SHARES
    )
    answers = []
    for path, trained, of_model in zip(arguments.runs, models, lengths, strict=True):
        title = (
            f"{path}: relative effective context length with a memory of {_first_memory(arguments, trained)}, "
            f"segments of {_segment_length(arguments, trained)}, "
            f"{len(positions):,} positions of {corpora[0].directory}, models compared: {len(models)}"
        )
        rows = [
            ("r", "context length", f"perplexity falls with each {contexts.step} tokens more by")
        ]
        for each in of_model:
            length = f"{each.length:,}{' or more' if each.reached_longest else ''}"
            rows.append((f"{each.share:g}", length, " ".join(f"{gain:.1%}" for gain in each.gains)))
        answers.append(Answer(title, rows, {"results": list(map(dataclasses.asdict, of_model))}))
    return answers


def _sliding_windows(
    arguments: argparse.Namespace, models: Sequence[TrainedModel], world: World
) -> list[Answer]:
    _refuse_ranks(world, "--compare-sliding-window")
    answers = []
    for path, trained in zip(arguments.runs, models, strict=True):
        segment = _segment_length(arguments, trained)
        if arguments.memory_length:
            lengths = [memory + segment for memory in arguments.memory_length]
        else:
            lengths = sliding_window.attention_lengths(trained.config.model, segment)
        results = [sliding_window.compare(trained.module, length, segment) for length in lengths]
        rows = [
            (
                "attention length",
                "tokens/s with memory",
                "with a sliding window",
                "ratio",
                "ratio by FLOPs",
            )
        ]
        rows += [
            (
                f"{each.attention_length:,}",
                f"{each.cached:,.0f}",
                f"{each.sliding_window:,.1f}",
                f"{each.ratio:,.0f}x",
                f"{each.by_flops:,.0f}x",
            )
            for each in results
        ]
        values = {
            "results": [{**dataclasses.asdict(each), "ratio": each.ratio} for each in results]
        }
        answers.append(Answer(f"{path}: segments of {segment}, one stream", rows, values))
    return answers


def _first_memory(arguments: argparse.Namespace, trained: TrainedModel) -> int:
    return (arguments.memory_length or [trained.config.model.memory_length])[0]


def _segment_length(arguments: argparse.Namespace, trained: TrainedModel) -> int:
    return arguments.segment_length or trained.segment_length


def _refuse_ranks(world: World, option: str) -> None:
    if world.world_size > 1:
        raise ConfigError(
            f"{option} runs on one rank, not on {world.world_size}; start it without a launcher"
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
    with Progress(
        console=console, transient=True, disable=not (console.is_terminal and scorer.world.is_main)
    ) as bar:
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
