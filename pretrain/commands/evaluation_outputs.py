"""What `pretrain evaluate` measures of each model, ready to be printed. Imports torch.

What `pretrain evaluate --probe` measures, and the files that it writes. Imports torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.manifest import HOW_TO_SPLIT, SPLITS, is_left_out
from foundation.errors import ConfigError, DataError
from foundation.files import path_text, write_json, write_text
from pretrain.config.choices import POSITIONS
from pretrain.config.resolve import splits_of_sets
from pretrain.distributed.threads import set_threads
from pretrain.distributed.world import World, destroy_process_group, init_world
from pretrain.evaluation import context_length, harness, sliding_window
from pretrain.evaluation.evaluate import EvaluationResult, TrainedScorer, evaluate, loss_rows
from pretrain.evaluation.probes.probe_page import render
from pretrain.evaluation.probes.probe_run import ProbeResults, probe_rows, run_probes
from pretrain.evaluation.probes.probe_settings import ProbeSettings
from pretrain.scaling.probed import PROBES
from pretrain.terminal.text import counted
from pretrain.weights.export import is_export
from pretrain.weights.trained_model import TrainedModel, load_tokenizer, load_trained

PAGE = "probes.html"


def probe_settings(
    arguments: argparse.Namespace, trained: TrainedModel, memory_length: int, segment_length: int
) -> ProbeSettings:
    """Return what the flags and the model's settings ask for."""
    return ProbeSettings(
        names=tuple(dict.fromkeys(arguments.probe)),
        memory_length=memory_length,
        segment_length=segment_length,
        lanes=arguments.lanes or trained.config.evaluation.lanes,
        max_tokens=arguments.max_tokens,
        trials=arguments.trials,
        longest_distance=arguments.longest_distance,
        seed=arguments.seed,
    )


def probe_directory(arguments: argparse.Namespace, path: Path) -> Path:
    """Return where page and numbers go; ConfigError for an export, to which nothing is added."""
    if arguments.output:
        return arguments.output / path.name if len(arguments.runs) > 1 else arguments.output
    if is_export(path):
        raise ConfigError(f"{path} is an export, to which nothing is added; give --output DIR")
    return path


def probe_with_status(
    scorer: TrainedScorer, path: Path, corpus: Corpus | None, settings: ProbeSettings
) -> ProbeResults:
    """Take the probes; a terminal shows which one is running."""
    tokenizer = load_tokenizer(scorer.trained, corpus.directory.parent if corpus else None)
    console = Console(stderr=True)
    if not console.is_terminal:
        return run_probes(scorer, tokenizer, corpus, settings)
    with console.status(f"{path}: probes") as status:
        return run_probes(
            scorer, tokenizer, corpus, settings, lambda words: status.update(f"{path}: {words}")
        )


def write_probes(directory: Path, path: Path, step: int, results: ProbeResults) -> dict[str, Any]:
    """Write page and numbers, each whole or not at all; return the numbers."""
    values = {"step": step, **results.values()}
    with warnings.catch_warnings():
        # `set_threads` makes denormal floats 0, which numpy notices when matplotlib is imported.
        warnings.filterwarnings("ignore", "The value of the smallest subnormal")
        html = render(path.name, step, results)
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / PAGE, html)
    write_json(directory / PROBES, values)
    return values


SHARES = (0.1, 0.5, 1.0)  # of the positions, as in table 8 of the paper


@dataclass(frozen=True)
class EvaluationOutput:
    """What is printed about one model."""

    title: str
    rows: list[tuple[str, ...]]  # heads first
    values: dict[str, Any]  # with --json


def outputs_of(arguments: argparse.Namespace) -> list[EvaluationOutput]:
    """Measure every model that the flags name; on ranks other than the first nothing to print."""
    world = init_world()
    try:
        models = [_load(arguments, path, world) for path in arguments.runs]
        set_threads(arguments.threads or 0)
        if arguments.context_length:
            outputs = _context_lengths(arguments, models, world)
        elif arguments.compare_sliding_window:
            outputs = _sliding_windows(arguments, models, world)
        elif arguments.probe:
            outputs = _probes(arguments, models, world)
        elif arguments.tasks:
            outputs = _tasks(arguments, models, world)
        else:
            outputs = _losses(arguments, models, world)
    finally:
        destroy_process_group()
    return outputs if world.is_main else []


def _load(arguments: argparse.Namespace, path: Path, world: World) -> TrainedModel:
    settings: dict[str, Any] = {} if arguments.clamp is None else {"clamp_length": arguments.clamp}
    if arguments.same_length:
        settings["same_length"] = True
    if arguments.rope_extension is not None:
        settings["rope_extension"] = arguments.rope_extension
    options = {"ema": arguments.ema, "precision": arguments.precision}
    trained = load_trained(path, world.device, model_settings=settings, **options)
    positions = trained.config.model.positions
    if arguments.rope_extension is not None and not POSITIONS[positions].rotates:
        raise ConfigError(
            f"--rope-extension stretches rotations, but {path} has model.positions={positions}; "
            "leave it out"
        )
    return trained


def _corpus(arguments: argparse.Namespace, trained: TrainedModel) -> Corpus:
    directory = trained.corpus_directory(arguments.data) / arguments.split
    if arguments.data and is_left_out(directory):
        raise DataError(
            f"--data={path_text(arguments.data)} has no {arguments.split} split; "
            f"use --split {SPLITS[0]}, or {HOW_TO_SPLIT}"
        )
    corpus = Corpus.open(directory)
    load_tokenizer(trained, corpus.directory.parent)
    return corpus


def _losses(
    arguments: argparse.Namespace, models: Sequence[TrainedModel], world: World
) -> list[EvaluationOutput]:
    outputs = []
    for path, trained in zip(arguments.runs, models, strict=True):
        corpus, scorer = _corpus(arguments, trained), TrainedScorer(trained, world)
        sets = _corpora_of_sets(arguments, trained)
        results = _evaluate_with_progress(arguments, scorer, corpus)
        of_sets = {
            name: _evaluate_with_progress(arguments, scorer, each) for name, each in sets.items()
        }
        title = (
            f"{path}: step {trained.step}, {results[0].tokens:,} tokens of {corpus.location}, "
            f"{counted(results[0].lanes, 'lane')}, segments of {results[0].segment_length}; "
            "trained with a memory of "
            f"{trained.config.model.longest_memory}"
        )
        if arguments.rope_extension is not None:
            title += f", rope extended by {arguments.rope_extension}"
        values = {"step": trained.step, "results": list(map(dataclasses.asdict, results))}
        rows = loss_rows(results)
        if of_sets:
            values["sets"] = {
                name: list(map(dataclasses.asdict, found)) for name, found in of_sets.items()
            }
            rows = [("set", *rows[0]), *((arguments.split, *row) for row in rows[1:])]
            for name, found in of_sets.items():
                rows += [(name, *row) for row in loss_rows(found)[1:]]
        outputs.append(EvaluationOutput(title, rows, values))
    return outputs


def _corpora_of_sets(arguments: argparse.Namespace, trained: TrainedModel) -> dict[str, Corpus]:
    """The sets that --sets asks for, by name; ConfigError if it would be those of other people."""
    if arguments.sets is None:
        return {}
    config = trained.config
    if arguments.sets:
        named = {name: Path(path) for name, _, path in (x.partition("=") for x in arguments.sets)}
        evaluation = replace(config.evaluation, sets=named)
        data = replace(config.data, mixture=(), phases=())  # whose parts are sets too
        config = replace(config, evaluation=evaluation, data=data)
    elif trained.untrusted:
        raise ConfigError(
            f"{trained.untrusted}, whose settings do not choose what is read; name each set: "
            "--sets NAME=PATH"
        )
    corpus = trained.corpus_directory(arguments.data)
    if not (splits := splits_of_sets(config, corpus)):
        raise ConfigError("the run has neither evaluation.sets nor a mixture; use --sets NAME=PATH")
    return {name: Corpus.open(split) for name, split in splits.items()}


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
        for memory_length in arguments.memory_length or [config.model.longest_memory]:
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


def _tasks(
    arguments: argparse.Namespace, models: Sequence[TrainedModel], world: World
) -> list[EvaluationOutput]:
    _require_one_rank(world, "--tasks")
    outputs = []
    for path, trained in zip(arguments.runs, models, strict=True):
        memory, segment = _memory_length(arguments, trained), _segment_length(arguments, trained)
        results = harness.run_tasks(
            trained,
            arguments.tasks,
            limit=arguments.limit or 0,
            few_shot=arguments.few_shot,
            runs_code=arguments.run_task_code,
            data=arguments.data,
            memory_length=memory,
            segment_length=segment,
            batch_size=arguments.lanes or 1,
        )
        title = f"{path}: step {trained.step}, segments of {segment} with a memory of {memory}"
        outputs.append(EvaluationOutput(title, harness.task_rows(results), {"results": results}))
    return outputs


def _probes(
    arguments: argparse.Namespace, models: Sequence[TrainedModel], world: World
) -> list[EvaluationOutput]:
    _require_one_rank(world, "--probe")
    outputs = []
    for path, trained in zip(arguments.runs, models, strict=True):
        memory, segment = _memory_length(arguments, trained), _segment_length(arguments, trained)
        settings = probe_settings(arguments, trained, memory, segment)
        has_corpus = arguments.data or settings.needs_text() or not trained.untrusted
        corpus = _corpus(arguments, trained) if has_corpus else None
        directory = probe_directory(arguments, path)
        results = probe_with_status(TrainedScorer(trained, world), path, corpus, settings)
        values = write_probes(directory, path, trained.step, results)
        title = (
            f"{path}: step {trained.step}, segments of {segment} with a memory of {memory}; "
            f"{directory / PAGE} and {PROBES}"
        )
        outputs.append(EvaluationOutput(title, probe_rows(results), values))
    return outputs


def _memory_length(arguments: argparse.Namespace, trained: TrainedModel) -> int:
    return (arguments.memory_length or [trained.config.model.longest_memory])[0]


def _segment_length(arguments: argparse.Namespace, trained: TrainedModel) -> int:
    return arguments.segment_length or trained.segment_length


def _require_one_rank(world: World, option: str) -> None:
    if world.world_size > 1:
        raise ConfigError(
            f"{option} runs on one rank, not on {world.world_size}; start it without a launcher"
        )
