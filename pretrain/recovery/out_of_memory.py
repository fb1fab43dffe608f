"""After memory ran out (OOM), the ledger has a record, and later starts use smaller micro-batches.

They have half the lanes per forward pass and twice the accumulation slots. So a step has the same
lanes and, up to rounding, the same losses.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from foundation.errors import ConfigError
from pretrain.config.run import RunConfig, accumulation_steps, lanes_of_rank
from pretrain.distributed.world import World
from pretrain.engines.engine import is_out_of_memory
from pretrain.rundir.events import OutOfMemory
from pretrain.rundir.run_dir import RunDir

logger = logging.getLogger(__name__)


def record_out_of_memory(run: RunConfig, run_dir: RunDir, world: World, error: Exception) -> bool:
    """Write the micro-batch that later starts must stay below to the ledger, on this rank.

    Returns False, with nothing written, if `error` is not a lack of memory.
    """
    if not is_out_of_memory(error):
        return False
    per_rank = lanes_of_rank(run, world.rank, world.world_size)
    lanes = len(per_rank) // accumulation_steps(run, world.world_size)
    run_dir.ledger.append(
        OutOfMemory(
            rank=world.rank,
            micro_batch_lanes=lanes,
            settings=memory_settings(run, world.world_size),
            message=str(error).partition("\n")[0],
        )
    )
    logger.warning(
        "recovery: out of memory (OOM) with %d lanes per forward pass; %s from the latest "
        "checkpoint with half as many. Lanes and losses do not change",
        lanes,
        "resuming" if world.world_size == 1 else "the next start resumes",
    )
    return True


def with_fitting_micro_batch(
    run: RunConfig, world_size: int, shortages: Sequence[tuple[int, dict[str, Any]]]
) -> RunConfig:
    """Return the run with a smaller micro-batch than any that ran out of memory with its settings.

    ConfigError if a single lane ran out of memory.
    """
    settings = memory_settings(run, world_size)
    failed = [lanes for lanes, others in shortages if others == settings]
    if not failed:
        return run
    if min(failed) == 1:
        raise ConfigError(
            "a single lane per forward pass runs out of memory; use "
            "engine.activation_checkpointing=full, a higher engine.zero_stage, "
            "shorter segments or memories, or more ranks"
        )
    per_rank = len(lanes_of_rank(run, 0, world_size))
    lanes = max(lanes for lanes in range(1, min(failed) // 2 + 1) if per_rank % lanes == 0)
    return replace(run, engine=replace(run.engine, micro_batch_lanes=lanes))


def memory_settings(run: RunConfig, world_size: int) -> dict[str, Any]:
    """Return what determines the memory of a lane, except the model, which a run never changes."""
    names = (
        "zero_stage", "precision", "activation_checkpointing", "offload_optimizer",
        "offload_memories", "logits_chunk_tokens",
    )  # fmt: skip
    engine = {name: getattr(run.engine, name) for name in names}
    return {"world_size": world_size, "segment_length": run.data.segment_length, **engine}
