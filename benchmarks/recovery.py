"""`python -m benchmarks recovery`: false alarms and detected spikes of `pretrain/recovery/`.

Small runs train on the standard library's sources. Healthy runs have aggressive learning rates and
recover from their jumps without help, so each of their rewinds is a false alarm. Other runs are
damaged after DAMAGED_AFTER steps, and every damage has to be noticed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from benchmarks.measure import Measurement, Section, add_report_arguments, machine, run_benchmarks
from benchmarks.texts import standard_library, write_jsonl
from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.config import CorpusConfig, TokenizerConfig
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.lane_stream import LaneStream
from data_pipeline.lanes.segment_batch import SegmentBatch
from pretrain.config.run import (
    DataConfig,
    EngineConfig,
    ModelConfig,
    OptimConfig,
    RecoveryConfig,
    RunConfig,
    ScheduleConfig,
)
from pretrain.distributed.world import destroy_process_group, init_world
from pretrain.engines.engine import Engine
from pretrain.model.memory import Memory
from pretrain.optim.schedule import learning_rate_at
from pretrain.recovery.rewind import SpikeDetector
from pretrain.run import build_engine
from pretrain.rundir.events import Spike

STEPS = 300
HEALTHY_RUNS, MOST_TRIED = 50, 100
DAMAGED_AFTER, DAMAGED_RUNS_OF_A_KIND = 200, 7
LANES, LENGTH = 8, 32
# The level of a loss is its mean over this many steps. A run is healthy if it ends at most
# HEALTHY_MARGIN above the lowest level it had, and was never HEALTHY_RISE times as high as before.
LEVEL_STEPS, HEALTHY_MARGIN, HEALTHY_RISE = 40, 0.1, 1.5
HARMFUL_STEPS = 60  # for which lanes read random bytes
NOISE = 4.0  # added to weights, as a multiple of their standard deviation
LARGE_RATE, LARGE_UPDATES = 100.0, 5

# Called before step NUMBER after the damage, from 0; returns a factor of the learning rate.
Damage = Callable[[Engine, SegmentBatch, int], float]


@dataclass(frozen=True)
class Recorded:
    """A run and its losses; None where a step was skipped."""

    name: str
    warmup_steps: int
    losses: tuple[float | None, ...]

    def spike(self, settings: RecoveryConfig) -> Spike | None:
        """Return the first spike at which the run would rewind."""
        schedule = ScheduleConfig(warmup_steps=self.warmup_steps)
        optim = OptimConfig(steps=10 * STEPS, schedule=schedule)
        detector = SpikeDetector(RunConfig(recovery=settings, optim=optim))
        lines = (
            {"kind": "train", "step": step, "loss": loss, "skipped": loss is None}
            for step, loss in enumerate(self.losses, 1)
        )
        spikes = (detector.observe([line]) for line in lines)
        return next((spike for spike in spikes if spike), None)

    @property
    def is_healthy(self) -> bool:
        """Whether it ends at about its lowest level and never left it for long."""
        if None in self.losses:
            return False
        levels = np.convolve(self.losses, np.ones(LEVEL_STEPS) / LEVEL_STEPS, "valid")  # type: ignore[arg-type]
        rises = levels / np.minimum.accumulate(levels)
        return bool(rises[-1] <= 1 + HEALTHY_MARGIN and rises.max() <= HEALTHY_RISE)

    @property
    def largest_jump(self) -> float:
        """How far a loss rose above the median of the losses just before it."""
        pairs = [
            (loss, statistics.median(before))
            for at in range(LEVEL_STEPS, len(self.losses))
            if (loss := self.losses[at]) is not None
            and (before := [each for each in self.losses[at - LEVEL_STEPS : at] if each])
        ]
        return max(loss - usual for loss, usual in pairs)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_report_arguments(parser)
    parser.add_argument("--record", type=Path, metavar="FILE", help="write all losses as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure and report; return 0 if there is no false alarm and every spike is detected."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    recorded: list[Recorded] = []
    sections = [
        Section("healthy runs", lambda directory: healthy(directory, recorded)),
        Section("damaged runs", lambda directory: damaged(directory, recorded)),
    ]
    try:
        status = run_benchmarks(arguments, machine(1), sections)
    finally:
        destroy_process_group()
        if arguments.record is not None:
            arguments.record.write_text(json.dumps([asdict(each) for each in recorded]) + "\n")
    return status


def healthy(directory: Path, recorded: list[Recorded]) -> Iterator[Measurement]:
    """Train until there are HEALTHY_RUNS healthy runs; yield how many of them would rewind."""
    corpus, settings = small_corpus(directory), RecoveryConfig()
    tried = []
    while sum(each.is_healthy for each in tried) < HEALTHY_RUNS and len(tried) < MOST_TRIED:
        tried.append(record(aggressive_run(len(tried)), corpus))
    recorded += tried
    runs = [each for each in tried if each.is_healthy]
    alarms = [each.name for each in runs if each.spike(settings)]
    sick = [each for each in tried if not each.is_healthy]
    jumps = sorted(each.largest_jump for each in runs)
    yield Measurement("healthy runs", [len(runs)], "", at_least=HEALTHY_RUNS, tolerance=0.0)
    yield Measurement(
        "rewinds of healthy runs", [len(alarms)], "", at_most=0, tolerance=0.0,
        detail=f"largest jumps of losses {jumps[len(jumps) // 2]:.2f} (median) and "
        f"{jumps[-1]:.2f} (highest); {', '.join(alarms)}".rstrip("; "),
    )  # fmt: skip
    noticed = sum(each.spike(settings) is not None for each in sick)
    yield Measurement("runs that got worse for good", [len(sick)], "", detail=f"{noticed} noticed")


def damaged(directory: Path, recorded: list[Recorded]) -> Iterator[Measurement]:
    """Train runs that are damaged; for each kind of damage, yield the share that is noticed."""
    corpus, settings = small_corpus(directory), RecoveryConfig()
    for kind, damage in DAMAGES.items():
        runs = [
            record(moderate_run(number, kind), corpus, damage)
            for number in range(DAMAGED_RUNS_OF_A_KIND)
        ]
        recorded += runs
        spikes = [spike for each in runs if (spike := each.spike(settings))]
        delays = [spike.last_step - DAMAGED_AFTER for spike in spikes]
        early = sum(spike.first_step <= DAMAGED_AFTER for spike in spikes)
        yield Measurement(
            f"spikes detected: {kind}", [(len(spikes) - early) / len(runs)], "", at_least=1.0,
            tolerance=0.0, detail=f"{max(delays, default=0)} steps after the damage at most",
        )  # fmt: skip


def small_corpus(directory: Path) -> Corpus:
    """Build a corpus of bytes from the start of the standard library."""
    text = directory / "text" / "library.jsonl"
    write_jsonl(text, islice(standard_library(), 300))
    output = directory / "corpus"
    build_corpus(
        CorpusConfig(input=(text,), output=output, threads=1,
                     tokenizer=TokenizerConfig(kind="bytes"))
    )  # fmt: skip
    return Corpus.open(output / "train")


def aggressive_run(number: int) -> RunConfig:
    """Return a run with up to 25 times a good rate, with or without warm-up and clipping."""
    draw = random.Random(number)
    warmup_steps = draw.choice([0, 10, 30, 60])
    rate = 4e-3 * 25 ** draw.random()
    shape = "cosine" if draw.choice([True, False]) else "constant"
    clip_norm = draw.choice([0.0, 0.25, 1.0])
    norm_position = draw.choice(["post", "pre"])
    name = (
        f"{number}: rate {rate:.1e}, {shape}, warm-up {warmup_steps}, clip {clip_norm}, "
        f"{norm_position}"
    )
    run = _run(name, number, OptimConfig(
        steps=STEPS, learning_rate=rate, clip_norm=clip_norm,
        schedule=ScheduleConfig(shape=shape, warmup_steps=warmup_steps),
    ))  # fmt: skip
    return replace(run, model=replace(run.model, norm_position=norm_position))


def moderate_run(number: int, name: str) -> RunConfig:
    """Return a run that would be healthy without the damage."""
    schedule = ScheduleConfig(shape="cosine", warmup_steps=20)
    optim = OptimConfig(steps=STEPS, learning_rate=4e-3, clip_norm=1.0, schedule=schedule)
    run = _run(f"{name} {number}", 1000 + number, optim)
    return replace(run, model=replace(run.model, norm_position="pre"))


def _run(name: str, seed: int, optim: OptimConfig) -> RunConfig:
    return RunConfig(
        name=name, seed=seed, optim=optim,
        model=ModelConfig(vocab_size=320, num_layers=2, d_model=48, num_heads=2, memory_length=32),
        data=DataConfig(lanes=LANES, segment_length=LENGTH),
        engine=EngineConfig(kind="torch"),
    )  # fmt: skip


def record(run: RunConfig, corpus: Corpus, damage: Damage | None = None) -> Recorded:
    """Train the run, damaged after DAMAGED_AFTER steps; return its losses."""
    engine = build_engine(run, init_world())
    stream = LaneStream(corpus, LANES, run.seed, LENGTH, range(LANES))
    losses: list[float | None] = []
    memory: Memory | None = None
    for step, batch in enumerate(islice(stream, STEPS)):
        rate = learning_rate_at(run.optim, step)
        if damage is not None and step >= DAMAGED_AFTER:
            rate *= damage(engine, batch, step - DAMAGED_AFTER)
        before = memory
        loss, memory = engine.forward_backward(batch, memory, step)
        result = engine.step(rate)
        if result.skipped:
            memory = before
        losses.append(None if result.skipped or not math.isfinite(loss) else float(loss))
    return Recorded(run.name, run.optim.schedule.warmup_steps, tuple(losses))


def random_documents(engine: Engine, batch: SegmentBatch, number: int) -> float:
    """For HARMFUL_STEPS steps, let half of the lanes read random bytes."""
    if number < HARMFUL_STEPS:
        generator = np.random.default_rng(number)
        for tokens_BL in (batch.tokens_BL, batch.targets_BL):
            tokens_BL[::2] = generator.integers(0, 256, tokens_BL[::2].shape)
    return 1.0


def noise_on_weights(engine: Engine, batch: SegmentBatch, number: int) -> float:
    """Once, add noise to every matrix, with NOISE times its standard deviation."""
    if number == 0:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in engine.module.parameters():
                if weight.dim() > 1:
                    weight += NOISE * weight.std() * torch.randn(weight.shape, generator=generator)
    return 1.0


def too_large_updates(engine: Engine, batch: SegmentBatch, number: int) -> float:
    """For a few updates, take a rate that is much too large."""
    return LARGE_RATE if number < LARGE_UPDATES else 1.0


DAMAGES: dict[str, Damage] = {
    "random documents in half of the lanes": random_documents,
    "noise on all weights": noise_on_weights,
    "a few much too large updates": too_large_updates,
}
