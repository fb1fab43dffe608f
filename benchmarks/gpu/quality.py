"""Loss of a small model and of the plain GPT of its size, at equal FLOPs and at equal seconds."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.gpu.findings import Context, wait_for
from benchmarks.gpu.gpt import GptTrainer, yardstick
from benchmarks.gpu.speed import visible_flops_per_token
from benchmarks.gpu.training import Trainer, forget, measured_run, one_rank, vocabulary_of
from data_pipeline.corpora.corpus import Corpus
from pretrain.evaluation.evaluate import evaluate

MODEL = "xl_modern_100m"
POINTS, WARM_UP = 6, 3
RESERVED = 30.0  # seconds of the step for imports, models, kernels and evaluation
LONGEST = 100.0  # seconds of training of each model


@dataclass(frozen=True)
class Point:
    """A model's validation loss after so many seconds and FLOPs of training."""

    seconds: float
    flops: float
    loss: float


def run(context: Context) -> None:
    """Train one after the other, each for half of the time, and compare their curves."""
    seconds = context.size(min(LONGEST, max(5.0, (context.seconds - RESERVED) / 2)), 0.2)
    run = measured_run(MODEL, context)
    # Without decay, each point of a curve is also the end of a shorter training.
    schedule = replace(run.optim.schedule, shape="constant", warmup_steps=100)
    model = replace(run.model, vocab_size=vocabulary_of(context))
    run = replace(run, model=model, optim=replace(run.optim, schedule=schedule))
    compiled = replace(run.engine, compile=not context.is_dry)
    curves = []
    with one_rank() as world:
        trainer = Trainer(run, context.corpus, world, context.work)
        curves.append(curve("ours", trainer, context, seconds))
        trainer.engine.close()
        del trainer
        forget(context.device)
        gpt = GptTrainer(yardstick(replace(run, engine=compiled)), context.corpus, world)
        curves.append(curve("gpt", gpt, context, seconds))
    ours, gpt = at_equal_flops(*curves)
    context.add("equal FLOPs", ours=ours, gpt=gpt, difference=ours - gpt)
    ours, gpt = (points[-1].loss for points in curves)
    context.add("equal seconds", ours=ours, gpt=gpt, difference=ours - gpt, seconds=seconds)


def curve(
    name: str, trainer: Trainer | GptTrainer, context: Context, seconds: float
) -> list[Point]:
    """Train for so long, the first steps and evaluations not counted; report and return points."""
    run, points, spent, steps = trainer.run, [], 0.0, 0
    corpus = Corpus.open(context.corpus / "train")
    flops = visible_flops_per_token(run) * run.tokens_per_step
    while steps < WARM_UP or spent < seconds:
        start = time.perf_counter()
        trainer.step()
        wait_for(context.device)
        steps += 1
        spent += time.perf_counter() - start if steps > WARM_UP else 0.0
        if spent >= seconds * (len(points) + 1) / POINTS:
            points.append(Point(spent, flops * steps, validation_loss(trainer, context)))
            passes = run.tokens_per_step * steps / corpus.num_tokens
            context.add(f"{name} {len(points)}", **vars(points[-1]), steps=steps, passes=passes)
    return points


def validation_loss(trainer: Trainer | GptTrainer, context: Context) -> float:
    """Return the loss on the start of the validation split, each model with its own context."""
    run, corpus = trainer.run, Corpus.open(context.corpus / "validation")
    sizes = np.zeros(run.model.vocab_size, dtype=np.int64)
    return evaluate(
        trainer.engine if isinstance(trainer, Trainer) else trainer, corpus,
        memory_length=run.model.longest_memory, segment_length=run.data.segment_length,
        num_lanes=8, max_tokens=context.size(200_000, 500), text_sizes=(sizes, sizes),
    ).loss  # fmt: skip


def at_equal_flops(ours: list[Point], theirs: list[Point]) -> tuple[float, float]:
    """Return both losses at the most FLOPs that both have spent, between points by logarithms."""
    flops = math.log(min(ours[-1].flops, theirs[-1].flops))
    first, second = (
        float(np.interp(flops, [math.log(p.flops) for p in points], [p.loss for p in points]))
        for points in (ours, theirs)
    )
    return first, second
