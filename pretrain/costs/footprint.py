"""What a run occupies: memory of a rank's device and of its host, and disk. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config.run import RunConfig
from pretrain.costs.device_memory import (
    MASTER_BYTES,
    Part,
    checkpoint_bytes,
    largest_phase,
    memory_parts,
    offloaded_bytes,
    total_bytes,
)
from pretrain.costs.flops import parameters_of
from pretrain.costs.zero_buffers import stage_of


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of a run in the phase that needs the most memory."""

    run: RunConfig  # in that phase
    parts: tuple[Part, ...]  # of a rank's device; on a CPU, of host memory
    offloaded: float  # host memory of a rank, for what its GPU offloads
    drawn: float  # host memory of a rank, for the weights as it draws them
    checkpoint: float
    copy: float  # host memory of a rank while it saves

    @property
    def device(self) -> float:
        """Bytes of a rank's device."""
        return total_bytes(list(self.parts))

    @property
    def host(self) -> float:
        """Bytes of a rank's host memory at its peak, besides the process itself; for a GPU."""
        return max(self.drawn, self.offloaded + self.copy)

    @property
    def disk(self) -> float:
        """Bytes of the checkpoints that are kept, and of the one being written."""
        return (self.run.checkpoint.keep_last + 1) * self.checkpoint


def footprint_of(run: RunConfig, world_size: int, on_gpu: bool) -> Footprint:
    """Return what the run occupies on so many ranks."""
    largest = largest_phase(run, world_size, on_gpu)
    saved = checkpoint_bytes(largest)
    is_drawn_on_device = on_gpu and stage_of(largest) == 3
    return Footprint(
        run=largest,
        parts=tuple(memory_parts(largest, world_size, on_gpu)),
        offloaded=offloaded_bytes(largest, world_size) if on_gpu else 0.0,
        drawn=0.0 if is_drawn_on_device else MASTER_BYTES * parameters_of(largest.model).total,
        checkpoint=saved,
        copy=saved / world_size if largest.checkpoint.asynchronous else 0.0,
    )
