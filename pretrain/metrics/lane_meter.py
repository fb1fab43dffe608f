"""Metrics of the lanes: what they read in an interval, and how large their memories are.

    memory_norm/layer.0    mean L2 norm of the rows in the first layer's memory, over all lanes
    lane_epochs_started    epochs that lanes have started; each lane has its own
    documents_started      documents that lanes have started; after a gap each lane starts one

Norms stay on the device, and all sums travel in the vector that the ranks exchange anyway.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from data_pipeline.lanes.lane_stream import SegmentBatch
from pretrain.config.run import RunConfig
from pretrain.model.lane_state import LaneState
from pretrain.state import TrainState


class LaneMeter:
    """Counts for this rank's lanes; `state` is the one that the loop advances.

    Of ranks that share lanes, one `counts_lanes`; each has its rows of their memories.
    """

    def __init__(self, run: RunConfig, state: TrainState, counts_lanes: bool = True) -> None:
        self._lane_state = LaneState(run.model)
        self._num_lanes = run.data.lanes
        self._places = run.engine.sequence_ranks
        self._counts_lanes = counts_lanes
        self._state = state
        self._epochs = self._epochs_started()
        self._documents_started = 0

    def add(self, batch: SegmentBatch) -> None:
        """Take what a step reads; it is in host memory."""
        self._documents_started += int(np.count_nonzero(batch.starts_BL))

    def take(self, device: torch.device) -> Tensor:
        """This rank's sums since the last call: float64, the same number on every rank.

        Does not wait for the device.
        """
        epochs, self._epochs = self._epochs, self._epochs_started()
        starts, self._documents_started = self._documents_started, 0
        counts = torch.tensor([self._epochs - epochs, starts], dtype=torch.float64, device=device)
        counts *= self._counts_lanes
        sums_of_slots = [
            torch.stack(
                [_sum_of_norms(layer, device) for layer in self._lane_state.vectors(memory)]
            )
            for memory in self._state.memories
            if memory
        ]
        norm_sums = [torch.stack(sums_of_slots).sum(0)] if sums_of_slots else []
        return torch.cat([counts, *norm_sums])

    def numbers(self, sums: list[float]) -> dict[str, float | None]:
        """The metrics, from the sums of all ranks; None for a norm that is not finite."""
        epochs, starts, *norm_sums = sums
        memory = next(iter(self._state.memories), None)
        rows = [each.shape[1] for each in self._lane_state.vectors(memory)] if memory else []
        named = {
            f"memory_norm/layer.{layer}": _mean(norms, self._num_lanes * self._places * count)
            for layer, (norms, count) in enumerate(zip(norm_sums, rows, strict=True))
            if count
        }
        return {"lane_epochs_started": int(epochs), "documents_started": int(starts), **named}

    def _epochs_started(self) -> int:
        return 0 if self._state.cursor is None else int(self._state.cursor.epochs_B.sum())


def _mean(total: float, count: int) -> float | None:
    return total / count if math.isfinite(total) else None


def _sum_of_norms(rows_BMX: Tensor, device: torch.device) -> Tensor:
    rows_BMX = rows_BMX.to(device, non_blocking=True)
    norms_BM = torch.linalg.vector_norm(rows_BMX, dim=-1, dtype=torch.float32)
    return norms_BM.sum(dtype=torch.float64)
