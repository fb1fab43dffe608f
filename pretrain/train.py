"""The training loop, and nothing else: `pretrain/run.py` builds what it works with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from data_pipeline.lanes.segment_batch import SegmentBatch
from pretrain.checkpoint.checkpointer import Checkpointer
from pretrain.config.phases import begins_phase
from pretrain.config.run import RunConfig
from pretrain.engines.engine import Engine, Memory
from pretrain.engines.memory_offload import MemoryOffload
from pretrain.metrics.recorder import MetricsRecorder
from pretrain.model.memory import after_forgotten_segment
from pretrain.optim.learning_rate import learning_rate_at
from pretrain.recovery.faults import Fault
from pretrain.recovery.rewind import SpikeMonitor
from pretrain.recovery.stop_requests import StopRequest
from pretrain.rundir.heartbeat import Heartbeat
from pretrain.state import TrainState


def train(
    run: RunConfig,
    engine: Engine,
    lanes: Iterator[SegmentBatch],
    state: TrainState,
    checkpointer: Checkpointer,
    metrics: MetricsRecorder,
    evaluate: Callable[[], dict[str, float]],
    spike_monitor: SpikeMonitor,
    stop: StopRequest,
    fault: Fault,
    heartbeat: Heartbeat,
) -> bool:
    """Train until `optim.steps` (returns True), or until a phase ends or any rank is asked to stop (returns False).

    All leave a checkpoint behind.

    SpikeFound, on every rank, when the losses are far out of line; CheckpointError when a rank cannot write its part.
    """
    offload = MemoryOffload(engine.world.device, run.engine.offload_memories)
    while state.step < run.optim.steps:
        batch = next(lanes)
        metrics.add_batch(batch)
        memories_before = list(state.memories)
        for slot, part in enumerate(batch.split(len(state.memories))):
            # A slot is a fixed group of lanes, so each slot carries its own memory from step to step.
            loss, memory = engine.forward_backward(
                part, offload.fetch(slot, state.memories[slot]), state.step
            )
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
            spike_monitor.check(metrics.write())
        fault.trigger(state.step)
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
    slots = batch.split(len(memories))
    return [
        after_forgotten_segment(memory, torch.from_numpy(slot.starts_BL))
        for memory, slot in zip(memories, slots, strict=True)
    ]
