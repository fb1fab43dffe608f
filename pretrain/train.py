"""`pretrain train`: build everything a run needs, then the loop."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from data_pipeline.config_loader import load_config
from data_pipeline.errors import UserError
from data_pipeline.location import shown
from pretrain.config import RunConfig, accumulation_steps
from pretrain.faults import Fault
from pretrain.live_bar import live_bar
from pretrain.phases import advice_on_phases, begins_phase, runs_of_phases
from pretrain.schedule import learning_rate_at

if TYPE_CHECKING:
    from data_pipeline.lanes import SegmentBatch
    from pretrain.checkpoint import Checkpointer
    from pretrain.distributed import World
    from pretrain.engine import Engine, Memory
    from pretrain.healer import Healer
    from pretrain.heartbeat import Heartbeat
    from pretrain.memory_offload import MemoryOffload
    from pretrain.metrics import Metrics
    from pretrain.model.transformer_xl import TransformerXL
    from pretrain.preemption import StopRequest
    from pretrain.state import TrainState


def train(
    run: RunConfig,
    engine: Engine,
    lanes: Iterator[SegmentBatch],
    state: TrainState,
    checkpointer: Checkpointer,
    metrics: Metrics,
    evaluate: Callable[[], dict[str, float]],
    healer: Healer,
    stop: StopRequest,
    fault: Fault,
    heartbeat: Heartbeat,
) -> bool:
    """Train until `optim.steps` (returns True), or until a phase ends or any rank is asked to stop (returns False).

    All leave a checkpoint behind.

    SpikeFound, on every rank, when the losses are far out of line; CheckpointError when a rank cannot write its part.
    """
    offload = memory_offload(run, engine)
    while state.step < run.optim.steps:
        batch = next(lanes)
        metrics.add_batch(batch)
        memories_before = list(state.memories)
        for slot, part in enumerate(batch.split(len(state.memories))):
            # A slot is a fixed group of lanes, so each slot carries its own memory from step to step.
            loss, memory = engine.forward_backward(part, offload.fetch(slot, state.memories[slot]), state.step)
            state.memories[slot] = offload.store(slot, memory)
            metrics.add_loss(loss)
        learning_rate = learning_rate_at(run.optim, state.step)
        with metrics.saving():
            checkpointer.wait_for_copy()  # the update changes what is still being copied
        ends_interval = (state.step + 1) % run.metrics.interval == 0
        result = engine.step(learning_rate, measure_layers=ends_interval)
        if result.skipped and not result.overflowed:
            # What a harmful step left in memory would spoil all later ones. Overflows leave the forward pass sound.
            offload.wait()
            state.memories = memories_behind(batch, memories_before)
        state.step += 1
        state.tokens_seen += run.tokens_per_step
        state.cursor = batch.cursor
        metrics.end_step(state, result, learning_rate)

        stopping, save_failed = stop.requested_or_failed(checkpointer.has_failed)
        if save_failed:
            checkpointer.finish()  # which raises it on every rank: to train on would only lose more
        finished = state.step == run.optim.steps
        leaving = finished or stopping or begins_phase(run, state.step)
        saving = leaving or state.step % run.checkpoint.interval == 0
        if saving or state.step % run.metrics.interval == 0:
            offload.wait()
            healer.check(metrics.write())
        fault.strike(state.step)
        validation_loss = None
        if finished or (run.evaluation.interval and state.step % run.evaluation.interval == 0):
            heartbeat.beat(state.step, "evaluate")
            evaluation = evaluate()
            validation_loss = evaluation["loss"]
            metrics.write_evaluation(state.step, evaluation)
        if saving:
            heartbeat.beat(state.step, "save")
            with metrics.saving():
                checkpointer.save(engine, state, validation_loss)
                if leaving:
                    checkpointer.finish()
        if leaving and not finished:
            return False
        heartbeat.beat(state.step, "train")
    return True


def memories_behind(batch: SegmentBatch, memories: Sequence[Memory | None]) -> list[Memory | None]:
    """The memories of the slots where nothing of this batch is remembered."""
    import torch

    from pretrain.model.memory import behind_forgotten

    slots = batch.split(len(memories))
    return [
        behind_forgotten(memory, torch.from_numpy(slot.starts_BL)) for memory, slot in zip(memories, slots, strict=True)
    ]


def memory_offload(run: RunConfig, engine: Engine) -> MemoryOffload:
    """Where the run keeps the memories of slots that are not at work."""
    from pretrain.memory_offload import MemoryOffload

    return MemoryOffload(engine.world.device, run.engine.offload_memories)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `pretrain train`, one rank's program."""
    parser.add_argument("config", type=Path, help="experiment file (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="settings that replace those of the file")
    parser.add_argument(
        "--run-dir", type=Path, required=True, help="where checkpoints and metrics go; resumed if it holds this run"
    )


def run(arguments: argparse.Namespace) -> int:
    """Train or resume the run of this directory as one rank of WORLD_SIZE."""
    config = resolve(load_config(RunConfig, arguments.config, arguments.overrides))
    set_threads(config)
    from pretrain.attempt import train_in
    from pretrain.distributed import init_world, leave_world

    world = init_world()
    if world.is_main and (advice := advice_on_phases(config)):
        print(advice, flush=True)
    try:
        with live_bar():
            return train_in(config, arguments.run_dir, world)
    finally:
        leave_world()


def resolve(config: RunConfig) -> RunConfig:
    """Fill in what follows from the corpus, the vocabulary size; refuse a corpus that cannot fill the lanes."""
    from data_pipeline.lanes import LaneStream
    from data_pipeline.mixture import open_training_data
    from data_pipeline.tokenizer import Tokenizer

    phases = runs_of_phases(config)
    corpora = [open_training_data(phase.data.path, phase.data.mixture, phase.data.cache) for phase in phases]
    for phase, corpus in zip(phases, corpora, strict=True):
        LaneStream(corpus, phase.data.lanes, config.seed, phase.data.segment_length, range(1))
    vocab_size = Tokenizer.load(corpora[0].tokenizer_directory).vocab_size  # all have the same
    if config.model.vocab_size not in (0, vocab_size):
        raise UserError(
            f"model.vocab_size={config.model.vocab_size}, but the tokenizer of {shown(config.data.path)} has "
            f"{vocab_size} tokens; leave the setting out, it is taken from the corpus"
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))


def set_threads(config: RunConfig) -> None:
    """Give every rank its share of the cores, more makes ranks wait for each other; and vanishing numbers no time."""
    import torch

    torch.set_num_threads(config.engine.threads or max(1, (os.cpu_count() or 1) // ranks_here()))
    # Weights below 1e-38, such as alibi's of far keys, cost a CPU a hundred times as much as zeros do.
    torch.set_flush_denormal(True)


def ranks_here() -> int:
    """How many ranks share this machine."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))))


def build_engine(config: RunConfig, world: World) -> Engine:
    """The model with its published initialisation, the same on every rank, inside the engine the run asks for."""
    import torch

    from pretrain.model.transformer_xl import TransformerXL

    torch.manual_seed(config.seed)
    engine = config.engine
    build = partial(
        TransformerXL,
        config.model,
        engine.activation_checkpointing,
        engine.attention_kernel,
        engine.head_chunk_tokens,
        engine.checkpoint_every,
    )
    built = _engine_of_kind(config, build, world)
    if not config.optim.average_decay:
        return built
    from pretrain.averaging import AveragingEngine

    return cast("Engine", AveragingEngine(built, config.optim.average_decay))


def _engine_of_kind(config: RunConfig, build: Callable[[], TransformerXL], world: World) -> Engine:
    slots = accumulation_steps(config, world.world_size)
    if config.engine.kind == "torch":
        from pretrain.engine import TorchEngine

        return TorchEngine(config, build(), world, slots)
    from pretrain.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(config, build, world, slots)
