"""The saves of a run that leaves out lane memories (`checkpoint.memories_interval`). Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config.lane_parts import segments_remembered
from pretrain.config.run import RunConfig
from pretrain.costs.device_memory import checkpoint_bytes, lane_bytes
from pretrain.costs.flops import computed_flops_of_step, forward_flops_of_step


@dataclass(frozen=True, kw_only=True)
class Saves:
    """The two kinds of checkpoints in a run, and how many there are of each.

    The few with memories where a run stops, and after a start that has not read enough yet, are not
    counted.
    """

    with_memories: float  # bytes
    without: float  # bytes; the same if memories are always saved
    part_without: float  # of all saves
    rebuilt_steps: int  # which a resume from one without reads again; 0: there are none

    @property
    def leaves_out_memories(self) -> bool:
        return self.part_without > 0

    @property
    def mean_bytes(self) -> float:
        """The bytes of a save, on average."""
        return self.with_memories + self.part_without * (self.without - self.with_memories)

    def rebuild_seconds(self, run: RunConfig, world_size: int, step_seconds: float) -> float:
        """Return how long rebuilding memories takes, where a step of training takes so long.

        It computes forward passes only.
        """
        part = forward_flops_of_step(run, world_size) / computed_flops_of_step(run, world_size)
        return self.rebuilt_steps * part * step_seconds


def saves_of(run: RunConfig) -> Saves:
    """Return what the run saves in the phase that `run` describes."""
    whole, interval = checkpoint_bytes(run), run.checkpoint.memories_interval
    segments = segments_remembered(run.model, run.data.segment_length) if interval != 1 else None
    if not segments:  # also without memory: then nothing is left out
        return Saves(with_memories=whole, without=whole, part_without=0.0, rebuilt_steps=0)
    return Saves(
        with_memories=whole,
        without=whole - run.data.lanes * lane_bytes(run),
        part_without=1 - 1 / interval if interval else 1.0,
        rebuilt_steps=-(-segments // run.optim.gradient_segments),
    )
