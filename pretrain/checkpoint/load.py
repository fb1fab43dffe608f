"""Loading a checkpoint at any world size and ZeRO stage: fragments by element, memories by lane.

A checkpoint of 2 ranks, read by 3 (one parameter of 12 elements):

    in the files    rank-00000: "w|0|weight" [0, 6)      rank-00001: "w|6|weight" [6, 12)
    in the engine   rank 0: [0, 4)    rank 1: [4, 8), from both files    rank 2: [8, 12)

The index lists which file holds which elements (`pieces.py`), so the world size and stage at the
save do not matter. A rank opens only the files that it needs; with unchanged ranks and stage, only
its own file.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from data_pipeline.lanes.segment_batch import LaneCursor
from pretrain.checkpoint.directory import MEMORY, rank_file
from pretrain.checkpoint.index import Checkpoint
from pretrain.checkpoint.pieces import open_tensors, piece_key
from pretrain.engines.ema import EMA
from pretrain.engines.engine import Engine
from pretrain.errors import CheckpointError
from pretrain.optim.parameter_groups import Fragment


def load_fragments(engine: Engine, checkpoint: Checkpoint) -> list[int]:
    """Fill the engine's fragments; return which ranks' files were opened."""
    with FragmentReader(checkpoint) as reader:
        for fragment in engine.fragments():
            name, start = fragment.name, fragment.start
            if checkpoint.is_local:
                name, start = local_name(fragment), 0
            for kind, view in fragment.values.items():
                reader.copy_into(view, name, start, kind)
        return reader.opened_ranks


def local_name(fragment: Fragment) -> str:
    """Return a fragment's name in a local checkpoint, which holds it as a whole parameter."""
    return f"{fragment.name}+{fragment.start}"


def restore_counters(engine: Engine, checkpoint: Checkpoint) -> None:
    """Restore the engine's counters and loss scale, once all ranks have filled all fragments."""
    engine.after_load(checkpoint.index["optimizer_steps"])
    loss_scale = checkpoint.index["loss_scale"]  # None unless the run was in fp16 at the save
    if engine.loss_scaler is not None and loss_scale is not None:
        engine.loss_scaler.restore(loss_scale)


class FragmentReader:
    """Random access to the stored elements of every parameter, over the files of all ranks.

    A file is opened when the first of its elements is read.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._directory = checkpoint.directory
        self._pieces = checkpoint.pieces
        self._stack = ExitStack()
        self._handles: dict[int, Any] = {}

    def __enter__(self) -> FragmentReader:
        return self

    def __exit__(self, *details: Any) -> None:
        self._stack.__exit__(*details)

    @property
    def opened_ranks(self) -> list[int]:
        return sorted(self._handles)

    def pieces(self) -> set[tuple[str, str]]:
        """Return all pairs of parameter and kind that are stored."""
        return {(name, kind) for name, held in self._pieces.items() for kind in held.kinds}

    def whole(self, parameter: str, kind: str) -> Tensor:
        """Return a flat copy of all elements; CheckpointError if some are missing."""
        if parameter not in self._pieces:
            raise CheckpointError(f"{self._directory}: found no {parameter}")
        whole = torch.empty(self._pieces[parameter].num_elements, dtype=torch.float32)
        self.copy_into(whole, parameter, 0, kind)
        return whole

    def copy_into(self, view: Tensor, parameter: str, start: int, kind: str) -> None:
        """Fill the 1-D `view` with a parameter's elements from `start`, of the given kind."""
        copied, end = 0, start + view.numel()
        held = self._pieces.get(parameter)
        for piece in held.between(start, end) if held and kind in held.kinds else ():
            low, high = max(start, piece.start), min(end, piece.end)
            stored = self._handle(piece.rank).get_slice(piece_key(parameter, piece.start, kind))
            view[low - start : high - start].copy_(stored[low - piece.start : high - piece.start])
            copied += high - low
        if copied != view.numel():
            raise CheckpointError(
                f"{self._directory}: found {copied} elements of {parameter} ({kind}), expected "
                f"{view.numel()}; the checkpoint belongs to a model of another shape"
            )

    def _handle(self, rank: int) -> Any:
        if rank not in self._handles:
            path = self._directory / rank_file(rank)
            self._handles[rank] = self._stack.enter_context(open_tensors(path))
        return self._handles[rank]


def load_weights(module: torch.nn.Module, checkpoint: Checkpoint, ema: bool = False) -> None:
    """Copy the fp32 master weights, or their EMA, into a whole module on one process.

    Raises CheckpointError if names or shapes differ, or if the run kept no EMA.
    """
    with FragmentReader(checkpoint) as reader, torch.no_grad():
        if ema and EMA not in {kind for _, kind in reader.pieces()}:
            raise CheckpointError(
                f"{checkpoint.directory}: found no EMA; train with optim.ema_decay above 0"
            )
        parameters = dict(module.named_parameters())
        if differing := sorted(parameters.keys() ^ checkpoint.pieces.keys()):
            raise CheckpointError(
                f"{checkpoint.directory}: parameters differ from the model's: "
                f"{', '.join(differing[:5])}"
            )
        for name, parameter in parameters.items():
            if (count := checkpoint.pieces[name].num_elements) != parameter.numel():
                raise CheckpointError(
                    f"{checkpoint.directory}: found {count} elements of {name}, "
                    f"expected {parameter.numel()}"
                )
            whole = reader.whole(name, EMA if ema else "weight")
            parameter.copy_(whole.view_as(parameter))


def load_cursor(checkpoint: Checkpoint) -> LaneCursor:
    """Return the cursor of all lanes from the ranks' reports."""
    reports = [report for report in checkpoint.rank_reports if report["num_lanes"]]
    return LaneCursor.join([LaneCursor.from_tree(report["cursor"]) for report in reports])


def load_memory(checkpoint: Checkpoint, lanes: range) -> dict[str, Tensor] | None:
    """Return the lanes' memories by the names of their parts; None if they were empty.

    They are read from the files of the ranks that held these lanes.
    """
    parts = []
    for rank, report in enumerate(checkpoint.rank_reports):
        low = max(lanes.start, report["first_lane"])
        high = min(lanes.stop, report["first_lane"] + report["num_lanes"])
        if low < high:
            own = slice(low - report["first_lane"], high - report["first_lane"])
            with open_tensors(checkpoint.directory / rank_file(rank)) as handle:
                keys = [key for key in handle.keys() if key.startswith(MEMORY)]  # noqa: SIM118
                part = {key.removeprefix(MEMORY): handle.get_slice(key)[own] for key in keys}
            parts.append(part)
    if not parts or not parts[0]:
        return None
    if any(part.keys() != parts[0].keys() for part in parts):
        raise CheckpointError(
            f"{checkpoint.directory}: found memories with different parts in the ranks' files, "
            "expected the same parts in all; remove this checkpoint"
        )
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def restore_random_state(checkpoint: Checkpoint, rank: int) -> None:
    """Set torch's random-number state to the one in a rank's file."""
    with open_tensors(checkpoint.directory / rank_file(rank)) as handle:
        torch.set_rng_state(handle.get_tensor("random.cpu"))
        if torch.cuda.is_available() and "random.cuda" in handle.keys():  # noqa: SIM118
            torch.cuda.set_rng_state(handle.get_tensor("random.cuda"))
