"""`pretrain evaluate`: losses on a split, context lengths, and the sliding-window baseline."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.errors import ConfigError
from data_pipeline.sizes import size_of
from pretrain.distributed.world import World, destroy_process_group, init_world
from pretrain.evaluation import context_length, sliding_window
from pretrain.evaluation.evaluate import EvaluationResult, TrainedScorer, evaluate, loss_rows
from pretrain.rundir.run_paths import run_path
from pretrain.terminal.text import counted, text_table
from pretrain.weights.trained_model import TrainedModel, load_tokenizer, load_trained

CONTEXT_DEFAULTS = {"context_step": 50, "longest_context": 1000, "positions": 512}
SHARES = (0.1, 0.5, 1.0)  # of the positions, as in table 8 of the paper


@dataclass(frozen=True)
class EvaluationOutput:
    """What is printed about one model."""

    title: str
    rows: list[tuple[str, ...]]  # heads first
    values: dict[str, Any]  # with --json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    runs = "run (latest valid checkpoint), its name in runs/, or export"
    add("runs", type=run_path, nargs="+", metavar="RUN", help=runs)
    data = "directory or URL of a corpus (default: the run's; an export needs one)"
    add("--data", type=Path, help=data)
    add("--split", default="validation", help="split of the corpus (default %(default)s)")
    memory = "tokens of memory, one result for each (default: as in training)"
    add("--memory-length", type=size_of("tokens"), nargs="+", metavar="N", help=memory)
    segment = "tokens per segment (default: as in training)"
    add("--segment-length", type=size_of("tokens"), default=0, metavar="N", help=segment)
    clamp = "distances above N get the encoding of N; 0: no limit (default: as in training)"
    add("--clamp", type=int, metavar="N", help=clamp)
    same_length = "let every token see as many keys as the memory has rows"
    add("--same-length", action="store_true", help=same_length)
    lanes = "streams evaluated together (default: the run's)"
    add("--lanes", type=int, default=0, metavar="N", help=lanes)
    max_tokens = "score about the first N tokens (default: all)"
    add("--max-tokens", type=size_of("tokens"), default=0, metavar="N", help=max_tokens)
    add("--ema", action="store_true", help="use the weight EMA, if the run has one")
    add("--json", action="store_true", help="print JSON instead of a table")
    what = parser.add_mutually_exclusive_group().add_argument
    measure = "measure the relative effective context length of the models"
    what("--context-length", action="store_true", help=measure)
    compare = "compare tokens/s with computing a window for every token"
    what("--compare-sliding-window", action="store_true", help=compare)
    context = parser.add_argument_group("with --context-length")
    for name, value in CONTEXT_DEFAULTS.items():
        flag = f"--{name.replace('_', '-')}"
        context.add_argument(flag, type=int, metavar="N", help=f"default {value}")


def run(arguments: argparse.Namespace) -> int:
    """Print a table, or JSON, for each run."""
    _check(arguments)
    world = init_world()
    try:
        models = [_load(arguments, path, world) for path in arguments.runs]
        if arguments.context_length:
            outputs = _context_lengths(arguments, models, world)
        elif arguments.compare_sliding_window:
            outputs = _sliding_windows(arguments, models, world)
        else:
            outputs = _losses(arguments, models, world)
    finally:
        destroy_process_group()
    if world.is_main:
        values = [output.values for output in outputs]
        texts = [f"{output.title}\n\n{text_table(output.rows)}" for output in outputs]
        as_json = json.dumps(values[0] if len(values) == 1 else values)
        print(as_json if arguments.json else "\n\n".join(texts))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Set the defaults of --context-length; ConfigError for bad numbers and unused options."""
    memory_lengths = arguments.memory_length or []
    options = (arguments.segment_length, arguments.lanes, arguments.max_tokens, arguments.clamp)
    if min(*memory_lengths, *(value or 0 for value in options)) < 0:
        raise ConfigError(
            "--memory-length, --segment-length, --clamp, --lanes and --max-tokens must be 0 or more"
        )
    for name, value in CONTEXT_DEFAULTS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
        elif not arguments.context_length:
            raise ConfigError(f"--{name.replace('_', '-')} requires --context-length")
    if arguments.context_length and len(memory_lengths) > 1:
        raise ConfigError(
            "--context-length measures with one memory length; give one, and compare two calls"
        )
    if (arguments.context_length or arguments.compare_sliding_window) and arguments.lanes:
        raise ConfigError("--lanes goes with neither --context-length nor --compare-sliding-window")
    if arguments.same_length and 0 in memory_lengths:
        raise ConfigError(
            "--same-length needs a --memory-length above 0, the number of keys each token sees"
        )


def _load(arguments: argparse.Namespace, path: Path, world: World) -> TrainedModel:
    settings: dict[str, Any] = {} if arguments.clamp is None else {"clamp_length": arguments.clamp}
    if arguments.same_length:
        settings["same_length"] = True
    return load_trained(path, world.device, model_settings=settings, ema=arguments.ema)


def _corpus(arguments: argparse.Namespace, trained: TrainedModel) -> Corpus:
    corpus = Corpus.open(trained.corpus_directory(arguments.data) / arguments.split)
    load_tokenizer(trained, corpus.directory.parent)
    return corpus


def _losses(
    arguments: argparse.Namespace, models: Sequence[TrainedModel], world: World
) -> list[EvaluationOutput]:
    outputs = []
    for path, trained in zip(arguments.runs, models, strict=True):
        corpus = _corpus(arguments, trained)
        results = _evaluate_with_progress(arguments, TrainedScorer(trained, world), corpus)
        title = (
            f"{path}: step {trained.step}, {results[0].tokens:,} tokens of {corpus.location}, "
            f"{counted(results[0].lanes, 'lane')}, segments of {results[0].segment_length}; "
            "trained with a memory of "
            f"{trained.config.model.memory_length}"
        )
        values = {"step": trained.step, "results": list(map(dataclasses.asdict, results))}
        outputs.append(EvaluationOutput(title, loss_rows(results), values))
    return outputs


def _evaluate_with_progress(
    arguments: argparse.Namespace, scorer: TrainedScorer, corpus: Corpus
) -> list[EvaluationResult]:
    from rich.console import Console
    from rich.progress import Progress

    config, max_tokens = scorer.trained.config, arguments.max_tokens
    segment_length = min(_segment_length(arguments, scorer.trained), corpus.num_tokens)
    total = min(max_tokens, corpus.num_tokens) if max_tokens else corpus.num_tokens
    console = Console(stderr=True)
    hidden = not (console.is_terminal and scorer.world.is_main)
    results = []
    with Progress(console=console, transient=True, disable=hidden) as bar:
        for memory_length in arguments.memory_length or [config.model.memory_length]:
            task = bar.add_task(f"memory {memory_length}", total=total)
            result = evaluate(
                scorer,
                corpus,
                memory_length=memory_length,
                segment_length=segment_length,
                num_lanes=arguments.lanes or config.evaluation.lanes,
                max_tokens=max_tokens,
                advance=lambda tokens, task=task: bar.advance(task, tokens),
            )
            results.append(result)
    return results


def _context_lengths(
    arguments: argparse.Namespace, models: Sequence[TrainedModel], world: World
) -> list[EvaluationOutput]:
    contexts = context_length.ContextGrid(arguments.context_step, arguments.longest_context)
    _require_one_rank(world, "--context-length")
    corpora = [_corpus(arguments, trained) for trained in models]
    if len({corpus.manifest.hash for corpus in corpora}) > 1:
        raise ConfigError("the runs have different corpora; give one for all with --data")
    positions = context_length.SplitPositions(
        corpora[0], arguments.positions, contexts.longest, arguments.max_tokens
    )

    def losses_of(trained: TrainedModel) -> context_length.Losses:
        memory, segment = _memory_length(arguments, trained), _segment_length(arguments, trained)
        return lambda length: positions.losses(trained.module, length, memory, segment)

    lengths = context_length.relative_effective_context_lengths(
        list(map(losses_of, models)), contexts, SHARES
    )
    outputs = []
    for path, trained, of_model in zip(arguments.runs, models, lengths, strict=True):
        title = (
            f"{path}: relative effective context length with a memory of "
            f"{_memory_length(arguments, trained)}, segments of "
            f"{_segment_length(arguments, trained)}, {len(positions):,} positions of "
            f"{corpora[0].directory}, models compared: {len(models)}"
        )
        rows = context_length.context_rows(of_model, contexts.step)
        values = {"results": list(map(dataclasses.asdict, of_model))}
        outputs.append(EvaluationOutput(title, rows, values))
    return outputs


def _sliding_windows(
    arguments: argparse.Namespace, models: Sequence[TrainedModel], world: World
) -> list[EvaluationOutput]:
    _require_one_rank(world, "--compare-sliding-window")
    outputs = []
    for path, trained in zip(arguments.runs, models, strict=True):
        segment = _segment_length(arguments, trained)
        if arguments.memory_length:
            lengths = [memory + segment for memory in arguments.memory_length]
        else:
            lengths = sliding_window.attention_lengths(trained.config.model, segment)
        results = [sliding_window.compare(trained.module, length, segment) for length in lengths]
        values = [{**dataclasses.asdict(each), "ratio": each.ratio} for each in results]
        title = f"{path}: segments of {segment}, one stream"
        rows = sliding_window.comparison_rows(results)
        outputs.append(EvaluationOutput(title, rows, {"results": values}))
    return outputs


def _memory_length(arguments: argparse.Namespace, trained: TrainedModel) -> int:
    return (arguments.memory_length or [trained.config.model.memory_length])[0]


def _segment_length(arguments: argparse.Namespace, trained: TrainedModel) -> int:
    return arguments.segment_length or trained.segment_length


def _require_one_rank(world: World, option: str) -> None:
    if world.world_size > 1:
        raise ConfigError(
            f"{option} runs on one rank, not on {world.world_size}; start it without a launcher"
        )
