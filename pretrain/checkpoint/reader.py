"""Reading a checkpoint: weights, moments and lane memories by slices, at any world size and ZeRO stage."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from data_pipeline.errors import CheckpointError
from pretrain.checkpoint import directory as files
from pretrain.engines.ema import AVERAGE
from pretrain.engines.engine import Engine, Memory


def load_engine(engine: Engine, found: files.Checkpoint) -> None:
    """Fill the engine's fragments from whatever slices the checkpoint holds them in."""
    with FragmentReader(found) as reader:
        for fragment in engine.fragments():
            for kind, view in fragment.values.items():
                reader.copy_into(view, fragment.name, fragment.start, kind)
    engine.after_load(found.index["optimizer_steps"])
    loss_scale = found.index.get("loss_scale")  # None: the run had another precision
    if engine.loss_scaler is not None and loss_scale is not None:
        engine.loss_scaler.restore(loss_scale)


class FragmentReader:
    """Random access to the stored elements of every parameter, however many ranks wrote them."""

    def __init__(self, found: files.Checkpoint) -> None:
        self._stack = ExitStack()
        self._pieces: dict[tuple[str, str], list[tuple[int, Any]]] = {}
        for name in found.index["files"]:
            if name.startswith("engine-"):
                handle = self._stack.enter_context(
                    safe_open(found.directory / name, framework="pt")
                )
                for key in handle.keys():  # noqa: SIM118  (not a mapping)
                    parameter, start, kind = key.split("|")
                    self._pieces.setdefault((parameter, kind), []).append(
                        (int(start), handle.get_slice(key))
                    )
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece[0])
        self._directory = found.directory

    def __enter__(self) -> FragmentReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def parameter_names(self) -> set[str]:
        return {parameter for parameter, _ in self._pieces}

    def kinds(self) -> set[str]:
        return {kind for _, kind in self._pieces}

    def num_elements(self, parameter: str) -> int:
        start, piece = self._pieces[parameter, "weight"][-1]
        return start + piece.get_shape()[0]

    def copy_into(self, view: Tensor, parameter: str, start: int, kind: str) -> None:
        """Fill the 1-D `view` with elements [start, start + len(view)) of a parameter's weight or moment."""
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
                f"{self._directory}: holds {copied} of the {view.numel()} elements wanted of {parameter} ({kind}); "
                "the checkpoint belongs to a model of another shape"
            )


def load_weights(module: torch.nn.Module, found: files.Checkpoint, ema: bool = False) -> None:
    """Copy the fp32 master weights, or their averages, into a whole module on one process.

    CheckpointError if names or shapes differ, or the run kept no averages.
    """
    kind = AVERAGE if ema else "weight"
    with FragmentReader(found) as reader, torch.no_grad():
        if ema and AVERAGE not in reader.kinds():
            raise CheckpointError(
                f"{found.directory} holds no averaged weights; train with optim.ema_decay above 0"
            )
        parameters = dict(module.named_parameters())
        if parameters.keys() != reader.parameter_names():
            odd = sorted(parameters.keys() ^ reader.parameter_names())
            raise CheckpointError(
                f"{found.directory}: parameters differ from the model's: {', '.join(odd[:5])}"
            )
        for name, parameter in parameters.items():
            whole = torch.empty(parameter.numel(), dtype=torch.float32)
            if reader.num_elements(name) != parameter.numel():
                raise CheckpointError(
                    f"{found.directory}: {name} has another size than the model's"
                )
            reader.copy_into(whole, name, 0, kind)
            parameter.copy_(whole.view_as(parameter))


def load_memory(found: files.Checkpoint, lanes: range) -> Memory | None:
    """The memories of the given lanes, from all rank files that hold some of them; None if none had begun."""
    parts = []
    for rank, report in enumerate(files.rank_reports(found.index)):
        low = max(lanes.start, report["first_lane"])
        high = min(lanes.stop, report["first_lane"] + report["num_lanes"])
        if low < high:
            rows = slice(low - report["first_lane"], high - report["first_lane"])
            parts.append(_memory_rows(found.directory / files.rank_file("state", rank), rows))
    if not parts or not parts[0]:
        return None
    return tuple(torch.cat(level) for level in zip(*parts, strict=True))


def _memory_rows(path: Path, rows: slice) -> Memory:
    with safe_open(path, framework="pt") as handle:
        num_levels = sum(key.startswith("memory.") for key in handle.keys())  # noqa: SIM118
        return tuple(handle.get_slice(f"memory.{level:03d}")[rows] for level in range(num_levels))


def restore_random_state(path: Path) -> None:
    """Put back the random-number state that `random_state` took."""
    with safe_open(path, framework="pt") as handle:
        torch.set_rng_state(handle.get_tensor("random.cpu"))
        if torch.cuda.is_available() and "random.cuda" in handle.keys():  # noqa: SIM118
            torch.cuda.set_rng_state(handle.get_tensor("random.cuda"))
