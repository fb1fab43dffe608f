"""How long a run takes: training by phase, and its evaluations. Torch-free.

At an assumed part of the peak; starts, saves and waiting for data are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data_pipeline.corpora.manifest import MANIFEST_NAME, read_manifest
from foundation.files import url_of
from pretrain.config.model import ModelConfig
from pretrain.config.phases import spans_of_phases
from pretrain.config.resolve import EvaluationSet, evaluation_sets, split_of
from pretrain.config.run import RunConfig
from pretrain.costs.flops import computed_flops_of_step, flops_of


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """Seconds of a run and what they are spent on; evaluation is None if it is not known."""

    of_step: tuple[float, ...]  # by phase
    training: float
    evaluation: float | None
    evaluations: int
    tokens: int | None  # of an evaluation's validation split
    sets: int  # measured besides


def run_time(run: RunConfig, world_size: int, flops_per_second: float) -> RunTime:
    """Return the time of a run on ranks that compute this many FLOPs per second each."""
    spans = spans_of_phases(run, range(run.optim.steps))
    of_step = [
        computed_flops_of_step(phase, world_size) / (world_size * flops_per_second)
        for phase, _ in spans
    ]
    counts = _evaluations(run)
    tokens = _evaluated_tokens(run, _split_here(run.data.path))
    sets = [_split_here(each.path) for each in _measured_sets(run)]
    evaluation = None
    if tokens is not None and None not in (_evaluated_tokens(run, split) for split in sets):
        evaluation = sum(
            count
            * (
                flops_of_evaluation(phase, tokens, world_size)
                + sum(_flops_of_set(phase, split, world_size) for split in sets)
            )
            / flops_per_second
            for (phase, _), count in zip(spans, counts, strict=True)
        )
    return RunTime(
        of_step=tuple(of_step),
        training=sum(count * each for (_, count), each in zip(spans, of_step, strict=True)),
        evaluation=evaluation,
        evaluations=sum(counts),
        tokens=tokens,
        sets=len(sets),
    )


def flops_of_evaluation(run: RunConfig, tokens: int, world_size: int) -> float:
    """Return the FLOPs of the busiest rank for the validation loss, with memory and without."""
    models = [run.model]
    if run.model.longest_memory:
        models.append(replace(run.model, memory_length=0, compressed_length=0, same_length=False))
    return _flops_of_corpus(run, _split_here(run.data.path), tokens, world_size, models)


def _flops_of_set(run: RunConfig, split: Path | None, world_size: int) -> float:
    """The FLOPs of the busiest rank for the loss of a set; its tokens are known."""
    tokens = _evaluated_tokens(run, split)
    assert tokens is not None
    return _flops_of_corpus(run, split, tokens, world_size, [run.model])


def _flops_of_corpus(
    run: RunConfig, split: Path | None, tokens: int, world_size: int, models: Sequence[ModelConfig]
) -> float:
    """The FLOPs of the busiest rank.

    Ranks beyond the number of lanes compute what is not counted, and shorten nothing.
    """
    length = run.data.segment_length
    lanes, batches = _lanes_and_batches(run, split, tokens)
    own = -(-lanes // world_size)
    forward = sum(flops_of(model, length, own).forward for model in models)
    return batches * own * length * forward


def _evaluations(run: RunConfig) -> list[int]:
    """How many evaluations each phase has: at every interval, and at the end."""
    steps, interval = run.optim.steps, run.evaluation.interval
    counts, start = [], 0
    for _, count in spans_of_phases(run, range(steps)):
        stop = start + count
        counts.append(stop // interval - start // interval if interval else 0)
        start = stop
    counts[-1] += not interval or steps % interval > 0
    return counts


def _evaluated_tokens(run: RunConfig, split: Path | None) -> int | None:
    """How many tokens of a split are scored; None if that is all of one that is not here."""
    asked = run.evaluation.max_tokens or None
    if split is None:
        return asked
    there = read_manifest(split).tokens
    return there if asked is None else min(asked, there)


def _lanes_and_batches(run: RunConfig, split: Path | None, tokens: int) -> tuple[int, int]:
    """Lanes that an evaluation uses, and its batches; estimated if the corpus is not here.

    Lanes are whole documents: a few long ones leave some lanes empty, which takes longer.
    """
    lanes, length = run.evaluation.lanes, run.data.segment_length
    if split is None:
        return lanes, -(-tokens // (lanes * length))
    from data_pipeline.corpora.corpus import Corpus  # late: numpy
    from data_pipeline.lanes.evaluation_stream import EvaluationStream, useful_lanes

    corpus, most = Corpus.open(split), run.evaluation.max_tokens
    lanes = useful_lanes(corpus, lanes, length, most)
    return lanes, len(EvaluationStream(corpus, lanes, length, range(1), most))


def _measured_sets(run: RunConfig) -> list[EvaluationSet]:
    """The sets that take time: not the corpus of the run, nor a part without validation here."""
    return [
        each
        for each in evaluation_sets(run)
        if each.path != run.data.path
        and not (each.is_part and url_of(each.path) is None and _split_here(each.path) is None)
    ]


def _split_here(path: Path) -> Path | None:
    """The split of an evaluation, if it is on this machine."""
    if url_of(path) is not None:  # its shards would be fetched
        return None
    split = split_of(Path(path))
    return split if (split / MANIFEST_NAME).is_file() else None
