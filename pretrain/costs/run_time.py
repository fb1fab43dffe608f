"""How long a run takes: training by phase, and its evaluations. Torch-free.

At an assumed part of the peak; starts, saves and waiting for data are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from data_pipeline.corpora.manifest import MANIFEST_NAME
from data_pipeline.files import url_of
from pretrain.config.phases import spans_of_phases
from pretrain.config.run import RunConfig
from pretrain.costs.flops import computed_flops_of_step, flops_of


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """Seconds of a run and what they are spent on; evaluation is None if it is not known."""

    of_step: tuple[float, ...]  # by phase
    training: float
    evaluation: float | None
    evaluations: int
    tokens: int | None  # of an evaluation


def run_time(run: RunConfig, world_size: int, flops_per_second: float) -> RunTime:
    """Return the time of a run on ranks that compute this many FLOPs per second each."""
    spans = spans_of_phases(run, range(run.optim.steps))
    of_step = [
        computed_flops_of_step(phase, world_size) / (world_size * flops_per_second)
        for phase, _ in spans
    ]
    counts = _evaluations(run)
    tokens = _evaluated_tokens(run)
    evaluation = None
    if tokens is not None:
        evaluation = sum(
            count * flops_of_evaluation(phase, tokens, world_size) / flops_per_second
            for (phase, _), count in zip(spans, counts, strict=True)
        )
    return RunTime(
        of_step=tuple(of_step),
        training=sum(count * each for (_, count), each in zip(spans, of_step, strict=True)),
        evaluation=evaluation,
        evaluations=sum(counts),
        tokens=tokens,
    )


def flops_of_evaluation(run: RunConfig, tokens: int, world_size: int) -> float:
    """Return the FLOPs of the busiest rank in an evaluation, with memory and without.

    Ranks beyond the number of lanes compute what is not counted, and shorten nothing.
    """
    length = run.data.segment_length
    lanes, batches = _lanes_and_batches(run, tokens)
    own = -(-lanes // world_size)
    models = [run.model]
    if run.model.memory_length:
        models.append(replace(run.model, memory_length=0, compressed_length=0, same_length=False))
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


def _evaluated_tokens(run: RunConfig) -> int | None:
    """How many tokens an evaluation scores; None if that is all of a split that is not here."""
    manifest = _validation(run)
    asked = run.evaluation.max_tokens or None
    if manifest is None:
        return asked
    from data_pipeline.corpora.manifest import read_manifest

    there = read_manifest(manifest.parent).tokens
    return there if asked is None else min(asked, there)


def _lanes_and_batches(run: RunConfig, tokens: int) -> tuple[int, int]:
    """Lanes that an evaluation uses, and its batches; estimated if the corpus is not here.

    Lanes are whole documents: a few long ones leave some lanes empty, which takes longer.
    """
    lanes, length = run.evaluation.lanes, run.data.segment_length
    manifest = _validation(run)
    if manifest is None:
        return lanes, -(-tokens // (lanes * length))
    from data_pipeline.corpora.corpus import Corpus  # late: numpy
    from data_pipeline.lanes.evaluation_stream import EvaluationStream, useful_lanes

    corpus, most = Corpus.open(manifest.parent), run.evaluation.max_tokens
    lanes = useful_lanes(corpus, lanes, length, most)
    return lanes, len(EvaluationStream(corpus, lanes, length, range(1), most))


def _validation(run: RunConfig) -> Path | None:
    """The manifest of the validation split, if it is on this machine."""
    if url_of(run.data.path) is not None:  # its shards would be fetched
        return None
    path = Path(run.data.path) / "validation" / MANIFEST_NAME
    return path if path.is_file() else None
