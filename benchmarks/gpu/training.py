"""What trains in the steps: a run's engine on batches from lanes, without its run directory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.findings import Context
from benchmarks.gpu.steps import ROOT
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.lane_stream import LaneStream
from data_pipeline.lanes.segment_batch import LaneCursor, SegmentBatch
from foundation.settings import load_config
from pretrain.checkpoint.checkpointer import Checkpointer
from pretrain.checkpoint.disk import Disk
from pretrain.checkpoint.resume_point import find_resume_point
from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.config.resolve import with_precision
from pretrain.config.run import DataConfig, RunConfig, accumulation_steps
from pretrain.distributed.world import World, destroy_process_group, init_world
from pretrain.engines.memory_offload import MemoryOffload
from pretrain.optim.schedule import learning_rate_at
from pretrain.processes.device import has_bf16, set_determinism
from pretrain.run import build_engine
from pretrain.state import TrainState


@contextmanager
def one_rank() -> Iterator[World]:
    """Join a world of one rank, as a run on one device does."""
    world = init_world()
    try:
        yield world
    finally:
        destroy_process_group()


def lane_stream(run: RunConfig, corpus: Path, cursor: LaneCursor | None = None) -> LaneStream:
    """Return the batches of a run on one rank."""
    train, data = Corpus.open(corpus / "train"), run.data
    lanes = range(data.lanes)
    return LaneStream(train, data.lanes, run.seed, data.segment_length, lanes, cursor)


class Trainer:
    """One run in this process: its engine, its lanes and its checkpoints in `directory`."""

    def __init__(
        self, run: RunConfig, corpus: Path, world: World, directory: Path, resumes: bool = False
    ) -> None:
        self.run = run
        self.engine = build_engine(run, world)
        self._slots = accumulation_steps(run, world.world_size)
        self._offload = MemoryOffload(world.device, run.engine.offload_memories)
        self._checkpointer = Checkpointer(run, Disk(directory, "attempt", ""), world)
        self.state = TrainState.fresh(self._slots)
        if resumes:
            found = find_resume_point(directory, world, run_id="")
            assert found is not None, f"no checkpoint in {directory}"
            self.state = self._checkpointer.restore(self.engine, found)
        self.batches: Iterator[SegmentBatch] = lane_stream(run, corpus, self.state.cursor)

    def step(self) -> torch.Tensor:
        """Train one step as `pretrain.train` does; returns its mean loss, on the device."""
        batch, state, losses = next(self.batches), self.state, []
        for slot, part in enumerate(batch.split(self._slots)):
            memory = self._offload.fetch(slot, state.memories[slot])
            loss, memory = self.engine.forward_backward(part, memory, state.step)
            state.memories[slot] = self._offload.store(slot, memory)
            losses.append(loss)
        self._checkpointer.wait_for_copy()
        self.engine.step(learning_rate_at(self.run.optim, state.step))
        state.advance(batch, self.run.tokens_per_step)
        return torch.stack(losses).double().mean()

    def steps(self, count: int) -> list[str]:
        """Train `count` steps; returns their losses with all their bits."""
        return [float(self.step()).hex() for _ in range(count)]

    def save(self) -> None:
        """Start a checkpoint, which is written beside the next steps."""
        self._offload.wait()
        self._checkpointer.save(self.engine, self.state)

    def finish(self) -> None:
        """Return when the checkpoint is published."""
        self._checkpointer.finish()

    def bits(self) -> str:
        """Return a hash of masters, moments and memories."""
        self._offload.wait()
        total = sha256()
        for fragment in self.engine.fragments():
            for value in fragment.values.values():
                total.update(_bytes_of(value))
        for memory in self.state.memories:
            for part in memory or ():
                total.update(_bytes_of(part))
        return total.hexdigest()


def _bytes_of(value: torch.Tensor) -> bytes:
    return value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def forget(device: torch.device) -> None:
    """Free the memory of an engine whose last reference is gone."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def small_run(context: Context, engine: EngineConfig, **more: Any) -> RunConfig:
    """Return a run that takes seconds, with heads of 128, dropout and memory, resolved as new.

    `more` are settings of the model.
    """
    model: dict[str, Any] = {
        "vocab_size": vocabulary_of(context),
        "num_layers": context.size(4, 2),
        "d_model": context.size(512, 32),
        "num_heads": context.size(4, 2),
        "memory_length": context.size(256, 8),
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "norm_position": "pre",
    }
    data = DataConfig(lanes=4, segment_length=context.size(256, 8))
    run = RunConfig(model=ModelConfig(**model | more), data=data, engine=engine)
    return resolved(run, context)


def measured_run(case: str, context: Context) -> RunConfig:
    """Return the run of a case, "MODEL [VARIANT]": a model of configs/models, or `relative_1b`.

    For the GPT it is the run of the model that it is compared with; `yardstick` converts it.
    """
    name, _, variant = case.partition(" ")
    name, settings = ("xl_modern_1b" if name == "gpt" else name), VARIANTS[variant]
    if name == "relative_1b":  # 1.3B
        model = ModelConfig(
            vocab_size=32_000, num_layers=24, d_model=2048, num_heads=16, memory_length=2048,
            norm_position="pre", dropout=0.0,
        )  # fmt: skip
        run = RunConfig(model=model, data=DataConfig(lanes=4, segment_length=2048))
    else:
        run = load_config(RunConfig, ROOT / "configs" / "models" / f"{name}.yaml")
        # A deltanet keeps more activations: 16 lanes would not fit into 80 GB.
        tokens = 8192 if variant.startswith("hybrid") else 16_384
        lanes = max(1, tokens // run.data.segment_length)
        run = replace(run, data=replace(run.data, lanes=lanes))
    vocabulary = vocabulary_of(context)
    if context.is_dry:
        run = toy_sized(run, vocabulary)
    run = replace(run, model=replace(run.model, vocab_size=max(vocabulary, run.model.vocab_size)))
    if variant.startswith("hybrid"):
        kinds = ["attention" if n % 4 == 3 else "deltanet" for n in range(run.model.num_layers)]
        run = replace(run, model=replace(run.model, layer_kinds=tuple(kinds)))
    return resolved(replace(run, engine=EngineConfig(**settings)), context)


VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "compiled": {"compile": True},
    "atomic": {"compile": True, "attention_kernel": "atomic"},
    "ZeRO 0": {"zero_stage": 0},
    "ZeRO 1": {"zero_stage": 1},
    "ZeRO 3": {"zero_stage": 3},
    "offload": {"offload_optimizer": True},
    "hybrid": {},
    "hybrid-compiled": {"compile": True},
}


def toy_sized(run: RunConfig, vocabulary: int) -> RunConfig:
    """Return the same run with a tiny model."""
    model = replace(
        run.model, vocab_size=vocabulary, num_layers=4, d_model=32, num_heads=2,
        num_key_heads=1 if run.model.num_key_heads else 0, memory_length=8,
    )  # fmt: skip
    return replace(run, model=model, data=replace(run.data, lanes=4, segment_length=16))


def resolved(run: RunConfig, context: Context) -> RunConfig:
    """Return the run with its device's precision; set up the device as a run does."""
    run = with_precision(run, "bf16" if has_bf16(context.device) else "fp32")
    set_determinism(run, context.device)
    return run


def vocabulary_of(context: Context) -> int:
    """Return the number of tokens that the corpus has."""
    return Corpus.open(context.corpus / "train").manifest.vocab_size
