"""Memories of a checkpoint without them (`checkpoint.memories_interval`), from the text before it.

The lanes read the segments of as many steps before the checkpoint again as the memories depend on
(`segments_remembered`), from an earlier cursor in the checkpoint, with the dropout of those steps.
The stream then is where the run continues. Every row is computed from the tokens that it was
computed from before, but by the checkpoint's weights instead of those of each step: that is the
only difference, and there is none but rounding where the weights stood still.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from data_pipeline.lanes.lane_stream import LaneCursor, SegmentBatch
from foundation.errors import CheckpointError, ConfigError
from pretrain.checkpoint.elastic_reader import load_cursor
from pretrain.checkpoint.marker import Checkpoint
from pretrain.config.lane_parts import segments_remembered
from pretrain.config.phases import starts_phase
from pretrain.config.run import RunConfig, lanes_of_rank
from pretrain.distributed.world import raise_on_all_ranks
from pretrain.engines.engine import Engine, read_slot
from pretrain.engines.memory_offload import MemoryOffload
from pretrain.model.lane_state import LaneState
from pretrain.state import Past, PastStep, TrainState, memories_without

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rebuild:
    """What to read again: that of so many steps from the cursor `before`; 0: memories are there."""

    steps: int
    before: LaneCursor | None  # of this rank's lanes
    forgotten: frozenset[int] = frozenset()  # those of them that were skipped


def rebuild_of(
    config: RunConfig, rank: int, world_size: int, found: Checkpoint | None, state: TrainState
) -> Rebuild:
    """Return what a start has to read again for its memories, and note which it reads from then on.

    ConfigError if a phase starts here: its lanes or segments are others.
    """
    kept, length = config.checkpoint, config.data.segment_length
    segments = segments_remembered(config.model, length) if kept.memories_interval != 1 else 0
    state.past = Past(-(-(segments or 0) // config.optim.gradient_segments))
    tree = found.index["rebuild"] if found is not None else None
    if found is None or tree is None:
        return Rebuild(0, state.cursor)
    if starts_phase(config, state.step):
        raise ConfigError(
            f"data.phases: a phase starts at step {state.step}, and {found.directory} is without "
            "the lanes' memories; let it start at a later step"
        )
    before = None
    if any(report["past"] is not None for report in found.rank_reports):
        before = load_cursor(found, "past").take(lanes_of_rank(config, rank, world_size))
    return Rebuild(tree["steps"], before, frozenset(tree["forgotten"]))


def rebuild_memories(
    config: RunConfig,
    engine: Engine,
    state: TrainState,
    rebuild: Rebuild,
    batches: Iterator[SegmentBatch],
    beat: Callable[[], None] = lambda: None,
) -> None:
    """Set the state's memories from what `batches` begins with, which it then is past.

    CheckpointError, on every rank, unless that leads to the state's cursor.
    """
    if not rebuild.steps:
        return
    started, cursor = time.monotonic(), state.cursor
    state.cursor = rebuild.before
    offload = MemoryOffload(engine.world.device, config.engine.offload_memories)
    for n in range(rebuild.steps):
        beat()
        batch, before = next(batches), list(state.memories)
        for slot, part in enumerate(batch.split(len(before))):
            _remember(config, engine, state, offload, slot, part, n - rebuild.steps)
        if is_forgotten := n in rebuild.forgotten:
            offload.wait()
            state.memories = memories_without(LaneState(config.model), batch, before)
        state.past.add(PastStep(state.cursor, is_forgotten))
        state.cursor = batch.cursor
    offload.wait()
    with raise_on_all_ranks():
        if state.cursor != cursor:
            raise CheckpointError(
                f"the segments of the {rebuild.steps} steps before step {state.step} do not lead "
                "to where its lanes stopped; use a checkpoint with memories, or the corpus and "
                "settings that the run was started with"
            )
    if engine.world.is_main:
        what = "memories rebuilt in %.1f s from the %d steps before step %d: not bitwise from here"
        logger.info(what, time.monotonic() - started, rebuild.steps, state.step)


def _remember(
    config: RunConfig,
    engine: Engine,
    state: TrainState,
    offload: MemoryOffload,
    slot: int,
    part: SegmentBatch,
    steps_from_here: int,
) -> None:
    """Set a slot's memory to the one after the segments, as the step's forward pass computed it."""
    memory, step = offload.fetch(slot, state.memories[slot]), state.step + steps_from_here
    with torch.no_grad():
        _, memory = read_slot(engine.module, config, part, memory, step, engine.world)
    state.memories[slot] = offload.store(slot, memory)
