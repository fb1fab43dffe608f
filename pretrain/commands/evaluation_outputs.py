"""What `pretrain evaluate` measures of each model, ready to be printed. Imports torch."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.manifest import HOW_TO_SPLIT, SPLITS, is_left_out
from foundation.errors import ConfigError, DataError
from foundation.files import make_directory, write_json
from foundation.paths import path_text
from pretrain.checkpoint.directory import step_directory
from pretrain.checkpoint.index import read_index
from pretrain.checkpoint.verify import steps_that_count
from pretrain.config.evaluation_sets import splits_of_sets
from pretrain.config.model import POSITIONS
from pretrain.distributed.threads import keep_freed_memory, set_threads
from pretrain.distributed.world import World, init_world
from pretrain.errors import CheckpointError
from pretrain.evaluation.checkpoint_curve import unscored_steps, write_point
from pretrain.evaluation.context_length import (
    ContextGrid,
    Losses,
    SplitPositions,
    context_rows,
    relative_effective_context_lengths,
)
from pretrain.evaluation.evaluate import EvaluationResult, TrainedScorer, evaluate, loss_rows
from pretrain.evaluation.probes.probe_run import ProbeSettings, probe_rows, run_probes
from pretrain.rundir.evaluated_text import MEASURED, EvaluatedText
from pretrain.rundir.metric_names import set_values, task_values
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.run_step import run_step
from pretrain.scaling.collect import PROBES
from pretrain.terminal.text import counted
from pretrain.weights.export import TrainedModel, is_export, load_tokenizer, load_trained

CONTEXT_POSITIONS, CONTEXTS = 512, 20  # for effective context lengths: positions, lengths tried
MANY_TOKENS = 1_000_000  # minutes on a CPU; said where there is no progress bar
SHARES = (0.1, 0.5, 1.0)  # the hardest fractions of positions (table 8 of the paper)


@dataclass(frozen=True)
class EvaluationOutput:
    """What is printed about one model."""

    title: str
    rows: list[tuple[str, ...]]  # heads first
    values: dict[str, Any]  # printed instead with --json


def outputs_of(arguments: argparse.Namespace) -> list[EvaluationOutput]:
    """Measure every model that the flags name; return [] on ranks above 0, which print nothing."""
    world = init_world()
    kinds = {"context_length": None, "probe": _probes, "tasks": _tasks}
    kind = next((name for name in kinds if getattr(arguments, name)), "")
    if kind and world.world_size > 1:
        raise ConfigError(
            f"--{kind.replace('_', '-')} runs on one rank, not on {world.world_size}; start it "
            "without a launcher"
        )
    if world.device.type == "cpu":
        keep_freed_memory()
    if arguments.is_curve and (curve := _curve(arguments, world)) is not None:
        return curve
    models = [_load(arguments, path, world) for path in arguments.runs]
    set_threads(0)
    if kind == "context_length":
        return _context_lengths(arguments, models)
    measure = kinds.get(kind) or _losses
    outputs = [
        measure(arguments, path, TrainedScorer(trained, world))
        for path, trained in zip(arguments.runs, models, strict=True)
    ]
    return outputs if world.is_main else []


def _curve(arguments: argparse.Namespace, world: World) -> list[EvaluationOutput] | None:
    """Score checkpoints of one run and add them to its files; None if other models are named.

    Each is printed as soon as it is scored, the table at the end.
    """
    named = [run_step(path) for path in arguments.runs if not is_export(path)]
    is_one = len({path for path, _ in named}) == 1 and len(named) == len(arguments.runs)
    steps = [step for _, step in named if step is not None]
    if not is_one or not (arguments.follow or len(steps) == len(named)):
        return None
    if world.world_size > 1:
        raise ConfigError("one rank makes a curve of checkpoints; start it without a launcher")
    run_dir = RunDir(named[0].run) if arguments.follow else RunDir.open(named[0].run)
    lines: list[dict[str, Any]] = []
    for step in unscored_steps(run_dir) if arguments.follow else sorted({*steps}):
        path = Path(f"{run_dir.path}@{step}")
        try:
            saved = read_index(step_directory(run_dir.checkpoints, step))
            scorer = TrainedScorer(_load(arguments, path, world), world)
        except CheckpointError:
            if arguments.follow and step not in steps_that_count(run_dir.checkpoints):
                continue  # the run has pruned this checkpoint
            raise
        (result,) = _evaluate_with_progress(arguments, scorer, _corpus(arguments, scorer.trained))
        values = {name: result.values()[name] for name in MEASURED}
        for name, directory in splits_of_sets(run_dir.config).items():
            (of_set,) = _evaluate_with_progress(arguments, scorer, Corpus.open(directory))
            values |= set_values(name, of_set.loss, of_set.bits_per_byte)
        if arguments.tasks:
            values |= task_values(_tasks(arguments, path, scorer).values["results"])
        lines.append(write_point(run_dir, step, {"attempt": saved.attempt, **values}))
        print(f"step {step:,}: loss {values['loss']:.4f}", file=sys.stderr, flush=True)
    if arguments.follow:
        lines = run_dir.read_evaluations()
    rows = [("step", "loss", "standard error", "validated on")]
    rows += [
        (f"{line['step']:,}", f"{line['loss']:.4f}", *EvaluatedText.of_line(line).cells)
        for line in lines
    ]
    title = (
        f"{run_dir.path}: {counted(len(lines), 'checkpoint')}, in evaluations.csv and the report"
    )
    return [EvaluationOutput(title, rows, {"results": lines})]


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
    corpus = Corpus.open(directory, cache=trained.config.data.cache)
    load_tokenizer(trained, corpus.directory.parent)
    return corpus


def _losses(arguments: argparse.Namespace, path: Path, scorer: TrainedScorer) -> EvaluationOutput:
    trained = scorer.trained
    corpus = _corpus(arguments, trained)
    results = _evaluate_with_progress(arguments, scorer, corpus)
    title = (
        f"{path}: step {trained.step}, {results[0].text.description} of {corpus.location}, "
        f"{counted(results[0].lanes, 'lane')}, segments of {results[0].segment_length}; "
        f"trained with a memory of {trained.config.model.longest_memory}"
    )
    if arguments.rope_extension is not None:
        title += f", rope extended by {arguments.rope_extension}"
    values: dict[str, Any] = {
        "step": trained.step,
        "results": [result.values() for result in results],
    }
    return EvaluationOutput(title, loss_rows(results), values)


def _evaluate_with_progress(
    arguments: argparse.Namespace, scorer: TrainedScorer, corpus: Corpus
) -> list[EvaluationResult]:
    config, max_tokens = scorer.trained.config, arguments.max_tokens
    segment_length = min(_how_to_read(arguments, scorer.trained)[1], corpus.num_tokens)
    total = min(max_tokens, corpus.num_tokens) if max_tokens else corpus.num_tokens
    console = Console(stderr=True)
    hidden = not (console.is_terminal and scorer.world.is_main)
    results = []
    if hidden and scorer.world.is_main and total > MANY_TOKENS:
        print(f"scoring {total:,} tokens; --max-tokens N scores fewer", file=sys.stderr, flush=True)
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
    arguments: argparse.Namespace, models: Sequence[TrainedModel]
) -> list[EvaluationOutput]:
    longest = arguments.longest_context
    contexts = ContextGrid(-(-longest // CONTEXTS), longest)
    corpora = [_corpus(arguments, trained) for trained in models]
    if len({corpus.manifest.hash for corpus in corpora}) > 1:
        raise ConfigError("the runs have different corpora; give one for all with --data")
    positions = SplitPositions(
        corpora[0], CONTEXT_POSITIONS, longest, arguments.max_tokens, arguments.lanes
    )

    def losses_of(trained: TrainedModel) -> Losses:
        memory, segment = _how_to_read(arguments, trained)
        return lambda length: positions.losses(trained.module, length, memory, segment)

    lengths = relative_effective_context_lengths(list(map(losses_of, models)), contexts, SHARES)
    outputs = []
    for path, trained, of_model in zip(arguments.runs, models, lengths, strict=True):
        memory, segment = _how_to_read(arguments, trained)
        title = (
            f"{path}: relative effective context length with a memory of {memory}, segments of "
            f"{segment}, {len(positions):,} positions of {corpora[0].directory}, models compared: "
            f"{len(models)}"
        )
        rows = context_rows(of_model, contexts.step)
        outputs.append(EvaluationOutput(title, rows, {"results": list(map(asdict, of_model))}))
    return outputs


def _tasks(arguments: argparse.Namespace, path: Path, scorer: TrainedScorer) -> EvaluationOutput:
    from pretrain.evaluation import harness  # late: lm-eval is an extra

    memory, segment = _how_to_read(arguments, scorer.trained)
    results = harness.run_tasks(
        scorer.trained,
        arguments.tasks,
        limit=arguments.limit or 0,
        few_shot=arguments.few_shot,
        runs_code=arguments.run_task_code,
        data=arguments.data,
        memory_length=memory,
        segment_length=segment,
        batch_size=arguments.lanes or 1,
    )
    title = f"{path}: step {scorer.trained.step}, segments of {segment} with a memory of {memory}"
    return EvaluationOutput(title, harness.task_rows(results), {"results": results})


def _probes(arguments: argparse.Namespace, path: Path, scorer: TrainedScorer) -> EvaluationOutput:
    trained = scorer.trained
    memory, segment = _how_to_read(arguments, trained)
    settings = ProbeSettings(
        names=tuple(dict.fromkeys(arguments.probe)),
        memory_length=memory,
        segment_length=segment,
        lanes=arguments.lanes or trained.config.evaluation.lanes,
        max_tokens=arguments.max_tokens,
        trials=arguments.trials,
        longest_distance=arguments.longest_distance,
    )
    has_corpus = arguments.data or settings.needs_text() or not trained.untrusted
    corpus = _corpus(arguments, trained) if has_corpus else None
    directory = arguments.output or run_step(path).run
    if arguments.output and len(arguments.runs) > 1:
        directory /= path.name
    elif not arguments.output and is_export(path):
        raise ConfigError(f"{path} is an export, which is never changed; give --output DIR")
    elif not arguments.output and (arguments.data or run_step(path).step is not None):
        raise ConfigError(
            f"{path}: tables take {directory / PROBES} as the run's latest step on its own corpus; "
            "give --output DIR for another"
        )
    tokenizer = load_tokenizer(trained, corpus.directory.parent if corpus else None)
    with Console(stderr=True).status(f"{path}: probes") as status:  # shown only on a terminal
        results = run_probes(
            scorer, tokenizer, corpus, settings, lambda words: status.update(f"{path}: {words}")
        )
    make_directory(directory)
    write_json(directory / PROBES, results.values())
    title = (
        f"{path}: step {trained.step}, segments of {segment} with a memory of {memory}; all "
        f"numbers: {directory / PROBES}"
    )
    return EvaluationOutput(title, probe_rows(results), results.values())


def _how_to_read(arguments: argparse.Namespace, trained: TrainedModel) -> tuple[int, int]:
    """Return the lengths of memory and segment, by default as in training."""
    memory = (arguments.memory_length or [trained.config.model.longest_memory])[0]
    return memory, arguments.segment_length or trained.segment_length
