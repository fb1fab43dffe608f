"""Saving and restoring a run: engine state by fragments, lane memories by lane, at any world size and ZeRO stage.

Each rank writes its own files without talking to the others (layout and publication: `checkpoint_files`). A reader
takes the slices it needs, so the writer's world size and stage do not matter. No pickle anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data_pipeline.config_loader import to_tree
from data_pipeline.errors import CheckpointError, UserError
from data_pipeline.files import fsync_file, write_json
from data_pipeline.lanes import LaneCursor
from pretrain import checkpoint_files as files
from pretrain.config import RunConfig, accumulation_steps, lanes_of_rank
from pretrain.distributed import World, from_main_rank, gather_errors
from pretrain.engine import Engine, Memory
from pretrain.state import TrainState

KINDS = ("weight", "exp_avg", "exp_avg_sq")


class Checkpointer:
    """Saves and restores one run. `attempt` is a token that all ranks of this start share and no other start has."""

    def __init__(self, run: RunConfig, root: Path, world: World, attempt: str) -> None:
        self._run = run
        self._root = root
        self._world = world
        self._attempt = attempt

    def save(self, engine: Engine, state: TrainState) -> Path:
        """Publish a checkpoint of `state.step`; raises on every rank if any rank could not write its part."""
        partial = files.partial_directory(self._root, state.step, self._attempt)
        final = files.step_directory(self._root, state.step)
        problem = ""
        try:
            partial.mkdir(parents=True, exist_ok=True)
            self._write_rank(partial, engine, state)
        except (OSError, UserError, RuntimeError, SafetensorError) as error:
            problem = str(error)
        self._raise_together(problem, partial)
        if self._world.is_main:
            try:
                index = self._index(engine, state)
                files.publish(partial, final, index, self._world.world_size)
                kept = self._run.checkpoint
                files.prune(self._root, kept.keep_last, kept.keep_every)
            except (OSError, UserError) as error:
                problem = str(error)
        self._raise_together(problem, partial)
        return final

    def restore_latest(self, engine: Engine) -> TrainState | None:
        """Load the newest good checkpoint into the engine; None when the run has none yet."""
        found, problem = None, ""
        if self._world.is_main:
            files.remove_partial(self._root)
            try:
                found = files.newest_good(self._root, say=lambda text: print(text, flush=True))
            except UserError as error:
                problem = str(error)
        found, problem = from_main_rank((found, problem))
        if problem:
            raise CheckpointError(problem)
        if found is None:
            return None
        if self._world.is_main:
            print(f"going on from {found.directory}", flush=True)
        load_engine(engine, found)
        return self._restore_state(engine, found)

    def _write_rank(self, partial: Path, engine: Engine, state: TrainState) -> None:
        rank = self._world.rank
        names = [files.rank_file("engine", rank), files.rank_file("state", rank)]
        for name, tensors in zip(names, (_engine_tensors(engine), _state_tensors(state)), strict=True):
            save_file(tensors, partial / name)
            fsync_file(partial / name)
        lanes = lanes_of_rank(self._run, rank, self._world.world_size)
        report = {
            "files": {name: files.describe_file(partial / name) for name in names},
            "first_lane": lanes.start,
            "num_lanes": len(lanes),
            "cursor": state.cursor.to_tree() if state.cursor else None,
        }
        write_json(partial / files.rank_file("rank", rank), report)

    def _index(self, engine: Engine, state: TrainState) -> dict[str, Any]:
        return {
            "step": state.step,
            "tokens_seen": state.tokens_seen,
            "optimizer_steps": engine.optimizer_step_count(),
            "world_size": self._world.world_size,
            "config": to_tree(self._run),
        }

    def _raise_together(self, problem: str, partial: Path) -> None:
        problems = gather_errors(problem)
        if problems:
            if self._world.is_main:
                files.remove_partial(self._root)
            raise CheckpointError(
                f"could not save {partial.name.removeprefix('.')}: {problems[0]}; older checkpoints are untouched, "
                "free the place and start the run again to go on from the newest"
            )

    def _restore_state(self, engine: Engine, found: files.Checkpoint) -> TrainState:
        world = self._world
        lanes = lanes_of_rank(self._run, world.rank, world.world_size)
        num_slots = accumulation_steps(self._run, world.world_size)
        memory = load_memory(found, lanes)
        per_slot = len(lanes) // num_slots
        memories: list[Memory | None] = [None] * num_slots
        if memory is not None:
            dtype = next(engine.module.parameters()).dtype  # another one than was saved, if the precision changed
            moved = tuple(part.to(world.device, dtype if part.is_floating_point() else None) for part in memory)
            memories = [
                tuple(tensor[slot * per_slot : (slot + 1) * per_slot].clone() for tensor in moved)
                for slot in range(num_slots)
            ]
        if found.index["world_size"] == world.world_size:
            _restore_random_state(found.directory / files.rank_file("state", world.rank))
        cursors = [LaneCursor.from_tree(report["cursor"]) for report in files.rank_reports(found.index)]
        return TrainState(
            step=found.index["step"],
            tokens_seen=found.index["tokens_seen"],
            memories=memories,
            cursor=LaneCursor.join(cursors).take(lanes),
        )


def load_engine(engine: Engine, found: files.Checkpoint) -> None:
    """Fill the engine's fragments from whatever slices the checkpoint holds them in."""
    with FragmentReader(found) as reader:
        for fragment in engine.fragments():
            for kind, view in fragment.values.items():
                reader.copy_into(view, fragment.name, fragment.start, kind)
    engine.after_load(found.index["optimizer_steps"])


class FragmentReader:
    """Random access to the stored elements of every parameter, however many ranks wrote them."""

    def __init__(self, found: files.Checkpoint) -> None:
        self._stack = ExitStack()
        self._pieces: dict[tuple[str, str], list[tuple[int, Any]]] = {}
        for name in found.index["files"]:
            if name.startswith("engine-"):
                handle = self._stack.enter_context(safe_open(found.directory / name, framework="pt"))
                for key in handle.keys():  # noqa: SIM118  (not a mapping)
                    parameter, start, kind = key.split("|")
                    self._pieces.setdefault((parameter, kind), []).append((int(start), handle.get_slice(key)))
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece[0])
        self._directory = found.directory

    def __enter__(self) -> FragmentReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def parameter_names(self) -> set[str]:
        return {parameter for parameter, _ in self._pieces}

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
                view[low - start : high - start].copy_(piece[low - piece_start : high - piece_start])
                copied += high - low
        if copied != view.numel():
            raise CheckpointError(
                f"{self._directory}: holds {copied} of the {view.numel()} elements wanted of {parameter} ({kind}); "
                "the checkpoint belongs to a model of another shape"
            )


def load_weights(module: torch.nn.Module, found: files.Checkpoint) -> None:
    """Copy the fp32 master weights into a whole module on one process; raises if names or shapes differ."""
    with FragmentReader(found) as reader, torch.no_grad():
        parameters = dict(module.named_parameters())
        if parameters.keys() != reader.parameter_names():
            odd = sorted(parameters.keys() ^ reader.parameter_names())
            raise CheckpointError(f"{found.directory}: parameters differ from the model's: {', '.join(odd[:5])}")
        for name, parameter in parameters.items():
            whole = torch.empty(parameter.numel(), dtype=torch.float32)
            if reader.num_elements(name) != parameter.numel():
                raise CheckpointError(f"{found.directory}: {name} has another size than the model's")
            reader.copy_into(whole, name, 0, "weight")
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


def _engine_tensors(engine: Engine) -> dict[str, Tensor]:
    return {
        f"{fragment.name}|{fragment.start}|{kind}": fragment.values[kind].detach().cpu().contiguous()
        for fragment in engine.fragments()
        if fragment.owned
        for kind in KINDS
    }


def _state_tensors(state: TrainState) -> dict[str, Tensor]:
    """Memories of all slots in lane order, and this rank's random-number state."""
    tensors = dict(_random_state())
    begun = [memory for memory in state.memories if memory is not None]
    if begun:
        for level, slots in enumerate(zip(*begun, strict=True)):
            tensors[f"memory.{level:03d}"] = torch.cat([slot.cpu() for slot in slots]).contiguous()
    return tensors


def _random_state() -> Iterator[tuple[str, Tensor]]:
    yield "random.cpu", torch.get_rng_state()
    if torch.cuda.is_available():
        yield "random.cuda", torch.cuda.get_rng_state()


def _restore_random_state(path: Path) -> None:
    with safe_open(path, framework="pt") as handle:
        torch.set_rng_state(handle.get_tensor("random.cpu"))
        if torch.cuda.is_available() and "random.cuda" in handle.keys():  # noqa: SIM118
            torch.cuda.set_rng_state(handle.get_tensor("random.cuda"))
