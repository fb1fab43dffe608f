"""What the lanes do in an interval, and how large what they remember is.

    memory_norm/layer.0    mean L2 norm of the rows that the first layer remembers, over all lanes; and so on
    lane_epochs_started            lanes that have begun another epoch of their own, as often as they did
    documents_started        documents that the lanes have begun; after a gap each lane begins one

Norms stay on the device and travel, like all sums here, in the vector that the ranks exchange anyway.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from data_pipeline.lanes.lane_stream import SegmentBatch
from pretrain.config.run import RunConfig
from pretrain.engines.engine import Memory
from pretrain.model.memory import memory_num_rows
from pretrain.state import TrainState


class LaneMeter:
    """Counts for this rank's lanes; `state` is the one that the loop goes on changing."""

    def __init__(self, run: RunConfig, state: TrainState) -> None:
        self._num_layers = run.model.num_layers
        self._num_lanes = run.data.lanes
        self._state = state
        self._epochs = self._epochs_begun()
        self._documents_started = 0

    def add(self, batch: SegmentBatch) -> None:
        """Take what a step reads; it lies in host memory."""
        self._documents_started += int(np.count_nonzero(batch.starts_BL))

    def take(self, device: torch.device) -> Tensor:
        """This rank's sums since the last call, float64, as many on every rank; the device is not waited for."""
        epochs, self._epochs = self._epochs, self._epochs_begun()
        starts, self._documents_started = self._documents_started, 0
        counts = torch.tensor([self._epochs - epochs, starts], dtype=torch.float64, device=device)
        memories = [memory for memory in self._state.memories if memory]
        return torch.cat([counts, *self._norm_sums(memories, device)])

    def numbers(self, sums: list[float]) -> dict[str, float | None]:
        """What goes into the metrics, from the sums of all ranks; a norm that is no number is None."""
        resets, starts, *norm_sums = sums
        num_rows = self._num_lanes * memory_num_rows(next(iter(self._state.memories), None))
        norms = [norm / num_rows if math.isfinite(norm) else None for norm in norm_sums if num_rows]
        named = {f"memory_norm/layer.{layer}": norm for layer, norm in enumerate(norms)}
        return {"lane_epochs_started": int(resets), "documents_started": int(starts), **named}

    def _norm_sums(self, memories: list[Memory], device: torch.device) -> list[Tensor]:
        """Of all rows of each layer, one slot after the other."""
        sums = [
            torch.stack([_sum_of_norms(level, device) for level in memory[: self._num_layers]])
            for memory in memories
        ]
        return [torch.stack(sums).sum(0)] if sums else []

    def _epochs_begun(self) -> int:
        return 0 if self._state.cursor is None else int(self._state.cursor.epochs_B.sum())


def _sum_of_norms(hidden_BMD: Tensor, device: torch.device) -> Tensor:
    norms_BM = torch.linalg.vector_norm(
        hidden_BMD.to(device, non_blocking=True), dim=-1, dtype=torch.float32
    )
    return norms_BM.sum(dtype=torch.float64)
