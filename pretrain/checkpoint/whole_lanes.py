"""Ranks that share lanes save whole ones, so that a checkpoint does not know who shared what.

Each saves its part of the lanes of its group (`saved_lanes_of_rank`), perhaps none: with 2 ranks
and 3 lanes, place 0 saves the first lane and place 1 the others. On resume every rank reads the
whole lanes that it shares then, and keeps its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from data_pipeline.lanes.lane_stream import LaneCursor
from pretrain.config.run import RunConfig, lanes_of_rank, saved_lanes_of_rank
from pretrain.distributed.sequence import SequenceShare
from pretrain.distributed.world import World
from pretrain.model.lane_state import LaneState, Memory, joined_lanes
from pretrain.state import TrainState


def with_whole_lanes(state: TrainState, run: RunConfig, world: World) -> TrainState:
    """Return the state with what this rank saves of the lanes. A collective of those that share.

    Its memories are new tensors on the device of the old ones.
    """
    share = world.sequence
    if share is None:
        return state
    first = world.rank - share.place
    each = [saved_lanes_of_rank(run, first + n, world.world_size) for n in range(share.places)]
    own, start = each[share.place], lanes_of_rank(run, first, world.world_size).start
    memories = [memory for memory in state.memories if memory is not None]
    if memories:
        rows = slice(own.start - start, own.stop - start)
        counts = [len(lanes) for lanes in each]
        memories = [_whole(LaneState(run.model), joined_lanes(memories), share, counts, rows)]
    return replace(
        state,
        memories=memories if own else [],
        cursor=state.cursor.take(own) if own and state.cursor else None,
    )


def _whole(
    lane_state: LaneState, memory: Memory, share: SequenceShare, counts: list[int], rows: slice
) -> Memory:
    return tuple(
        share.whole_rows(tensor, counts) if part.is_shared else tensor[rows]
        for part, tensor in zip(lane_state.parts, memory, strict=True)
    )


def report_of_lanes(
    cursor: LaneCursor | None, past: LaneCursor | None, run: RunConfig, world: World
) -> dict[str, Any]:
    """Return what the index says of the lanes that this rank saves, `cursor` being theirs."""
    lanes = saved_lanes_of_rank(run, world.rank, world.world_size)
    return {
        "first_lane": lanes.start,
        "num_lanes": len(lanes),
        "cursor": cursor.to_tree() if cursor else None,
        "past": past.take(lanes).to_tree() if past and lanes else None,
    }


def own_rows(
    lane_state: LaneState, tensors: Mapping[str, Tensor], share: SequenceShare | None
) -> dict[str, Tensor]:
    """Return this rank's part of whole lanes, by the names of their parts."""
    if share is None:
        return dict(tensors)
    shared = {part.name for part in lane_state.parts if part.is_shared}
    return {
        name: share.own_rows(tensor) if name in shared else tensor
        for name, tensor in tensors.items()
    }
