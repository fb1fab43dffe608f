"""Reading a checkpoint at any world size and ZeRO stage: fragments by element, memories by lane.

A checkpoint of 2 ranks, read by 3 (one parameter of 12 elements):

    in the files    engine-00000: "w|0|weight" [0, 6)      engine-00001: "w|6|weight" [6, 12)
    in the engine   rank 0: [0, 4)    rank 1: [4, 8), from both files    rank 2: [8, 12)

A key is PARAMETER|START|KIND, so the files say which elements they hold, and neither the writer's
world size nor its stage matters. Each rank opens all files but reads only the slices that it needs.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_pipeline.errors import CheckpointError
from pretrain.checkpoint.directory import MEMORY, rank_file
from pretrain.checkpoint.marker import Checkpoint
from pretrain.checkpoint.pieces import opened, pieces_of
from pretrain.engines.ema import EMA
from pretrain.engines.engine import Engine
from pretrain.optim.fragments import Fragment


def load_fragments(engine: Engine, found: Checkpoint) -> None:
    """Fill the engine's fragments from the checkpoint."""
    with FragmentReader(found) as reader:
        for fragment in engine.fragments():
            name, start = fragment.name, fragment.start
            if found.is_local:
                name, start = local_name(fragment), 0
            for kind, view in fragment.values.items():
                reader.copy_into(view, name, start, kind)


def local_name(fragment: Fragment) -> str:
    """A fragment's name in its rank's local checkpoint, which holds it as a whole parameter."""
    return f"{fragment.name}+{fragment.start}"


def restore_counters(engine: Engine, found: Checkpoint) -> None:
    """Set the engine's counters and its loss scale to those of the checkpoint, once all fragments
    are filled on all ranks."""
    engine.after_load(found.index["optimizer_steps"])
    loss_scale = found.index["loss_scale"]  # None if the run was in another precision
    if engine.loss_scaler is not None and loss_scale is not None:
        engine.loss_scaler.restore(loss_scale)


class FragmentReader:
    """Random access to the stored elements of every parameter, over the files of all ranks."""

    def __init__(self, found: Checkpoint) -> None:
        self._directory = found.directory
        self._stack = ExitStack()
        names = [name for name in found.index["files"] if name.startswith("engine-")]
        handles = {
            name: self._stack.enter_context(opened(found.directory / name)) for name in names
        }
        self._pieces = pieces_of(found.directory, handles)

    def __enter__(self) -> FragmentReader:
        return self

    def __exit__(self, *details: Any) -> None:
        self._stack.__exit__(*details)

    def parameter_names(self) -> set[str]:
        return {parameter for parameter, _ in self._pieces}

    def kinds(self) -> set[str]:
        return {kind for _, kind in self._pieces}

    def pieces(self) -> set[tuple[str, str]]:
        """Return what there is, as pairs of a parameter and a kind."""
        return set(self._pieces)

    def num_elements(self, parameter: str) -> int:
        start, piece = self._pieces[parameter, "weight"][-1]
        return start + piece.get_shape()[0]

    def whole(self, parameter: str, kind: str) -> Tensor:
        """Return a flat copy of all elements; CheckpointError if some are missing."""
        if (parameter, "weight") not in self._pieces:
            raise CheckpointError(f"{self._directory}: found no {parameter}")
        whole = torch.empty(self.num_elements(parameter), dtype=torch.float32)
        self.copy_into(whole, parameter, 0, kind)
        return whole

    def copy_into(self, view: Tensor, parameter: str, start: int, kind: str) -> None:
        """Fill the 1-D `view` with a parameter's elements from `start`, of the given kind."""
        copied = 0
        for piece_start, piece in self._pieces.get((parameter, kind), []):
            low = max(start, piece_start)
            high = min(start + view.numel(), piece_start + piece.get_shape()[0])
            if low < high:
                view[low - start : high - start].copy_(
                    piece[low - piece_start : high - piece_start]
                )
                copied += high - low
        if copied != view.numel():
            raise CheckpointError(
                f"{self._directory}: found {copied} elements of {parameter} ({kind}), expected "
                f"{view.numel()}; the checkpoint belongs to a model of another shape"
            )


def load_weights(module: torch.nn.Module, found: Checkpoint, ema: bool = False) -> None:
    """Copy the fp32 master weights, or their EMA, into a whole module on one process.

    Raises CheckpointError if names or shapes differ, or if the run kept no EMA.
    """
    with FragmentReader(found) as reader, torch.no_grad():
        if ema and EMA not in reader.kinds():
            raise CheckpointError(
                f"{found.directory}: found no EMA; train with optim.ema_decay above 0"
            )
        parameters = dict(module.named_parameters())
        if parameters.keys() != reader.parameter_names():
            odd = sorted(parameters.keys() ^ reader.parameter_names())
            raise CheckpointError(
                f"{found.directory}: parameters differ from the model's: {', '.join(odd[:5])}"
            )
        for name, parameter in parameters.items():
            if (count := reader.num_elements(name)) != parameter.numel():
                raise CheckpointError(
                    f"{found.directory}: found {count} elements of {name}, "
                    f"expected {parameter.numel()}"
                )
            whole = reader.whole(name, EMA if ema else "weight")
            parameter.copy_(whole.view_as(parameter))


def load_memory(found: Checkpoint, lanes: range) -> dict[str, Tensor] | None:
    """Return the memories of the lanes, from the ranks that had them, by the names of their parts.

    None if they were empty.
    """
    parts = []
    for rank, report in enumerate(found.rank_reports):
        low = max(lanes.start, report["first_lane"])
        high = min(lanes.stop, report["first_lane"] + report["num_lanes"])
        if low < high:
            own = slice(low - report["first_lane"], high - report["first_lane"])
            parts.append(_memory_of(found.directory / rank_file("state", rank), own))
    if not parts or not parts[0]:
        return None
    if any(part.keys() != parts[0].keys() for part in parts):
        raise CheckpointError(
            f"{found.directory}: found memories of unlike parts in the ranks' files, expected the "
            "same in all; remove this checkpoint"
        )
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _memory_of(path: Path, lanes: slice) -> dict[str, Tensor]:
    """Return the parts of the memories of these lanes in a rank's file, by name."""
    with opened(path) as handle:
        keys = [key for key in handle.keys() if key.startswith(MEMORY)]  # noqa: SIM118
        return {key.removeprefix(MEMORY): handle.get_slice(key)[lanes] for key in keys}


def restore_random_state(path: Path) -> None:
    """Set the random-number state to the one in a rank's state file."""
    with opened(path) as handle:
        torch.set_rng_state(handle.get_tensor("random.cpu"))
        if torch.cuda.is_available() and "random.cuda" in handle.keys():  # noqa: SIM118
            torch.cuda.set_rng_state(handle.get_tensor("random.cuda"))
