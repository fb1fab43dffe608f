"""The index of a checkpoint, index.json, which is checked before anything acts on it. Torch-free.

format, run, step, world_size, config     which checkpoint it is
ranks      bytes and sha256               of every rank's file, in rank order
           first_lane, num_lanes, cursor  of the rank's lanes
pieces     parameter -> kinds and runs    which rank's file has which elements (`pieces.py`)
tokens_seen, optimizer_steps, loss_scale

Files are named by rank (`rank_file`), so an index names no path.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from foundation.errors import STORAGE_FAILS
from foundation.files import LARGEST_LIST_BYTES, SMALL_FILE_BYTES, Content, read_regular
from foundation.locks import NoFileLocksError, open_shared
from foundation.typed_values import Count, Finite, Line, Positive, Sha256, from_tree, parse_json
from pretrain.checkpoint.directory import INDEX, MARKER, STEP_NAME, rank_file
from pretrain.checkpoint.pieces import Pieces, parsed_pieces
from pretrain.errors import CheckpointError, OtherVersionError, UnreadableError

INDEX_FORMAT = 7  # the version of a checkpoint's file names, tensor keys and index fields


def parse_index(path: Path, content: bytes) -> dict[str, Any]:
    """Return the contents of the index; CheckpointError unless all its fields are right."""
    try:
        index = parse_json(content)
        if type(version := index.get("format")) is int and version != INDEX_FORMAT:
            raise OtherVersionError(
                f"{path}: found format {version}, expected format {INDEX_FORMAT}; "
                "use the version that wrote it, or a new run directory"
            )
        _check(index)
    except (ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: found no index of a checkpoint of format {INDEX_FORMAT} ({error})"
        ) from None
    return index


@dataclass(frozen=True)
class _LossScale:
    scale: Finite
    updates: Count


@dataclass(frozen=True)
class _Report:
    bytes: Count
    sha256: Sha256
    first_lane: Count
    num_lanes: Count
    cursor: dict[str, Any] | None  # its reader checks what is in it; None before the first batch


@dataclass(frozen=True)
class _Index:
    format: int
    run: Line
    step: Count
    tokens_seen: Count
    optimizer_steps: Count
    config: dict[str, Any]
    loss_scale: _LossScale | None
    world_size: Positive
    ranks: tuple[_Report, ...]


def _check(tree: dict[str, Any]) -> None:
    """Raise ValueError unless the fields are of their types, and the ranks' lanes add up."""
    known = [field.name for field in fields(_Index)]
    index = from_tree(_Index, {name: tree[name] for name in known if name in tree})
    if index.world_size != len(index.ranks):
        raise ValueError(f"world_size is {index.world_size}, ranks has {len(index.ranks)}")
    parsed_pieces(tree, index.world_size)
    next_lane = 0
    for rank, report in enumerate(index.ranks):
        if report.first_lane != next_lane:
            raise ValueError(f"ranks[{rank}].first_lane is {report.first_lane}, not {next_lane}")
        next_lane += report.num_lanes
    if not next_lane:
        raise ValueError("ranks have no lanes")


class Lease:
    """A shared lock on the marker while this object lives: a run does not prune the checkpoint."""

    def __init__(self, directory: Path) -> None:
        self._descriptor = -1
        with contextlib.suppress(OSError, NoFileLocksError), open_shared(directory / MARKER) as f:
            self._descriptor = os.dup(f.fileno())

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint whose index is right; from `verify`, its files are right, too."""

    directory: Path
    index: dict[str, Any]
    is_local: bool = False  # only this rank's part, as `local_checkpoints.py` wrote it
    lease: Lease | None = field(default=None, compare=False, repr=False)

    @property
    def step(self) -> int:
        return int(self.index["step"])

    @property
    def attempt(self) -> str:
        """The attempt that saved it; '' if an earlier version did."""
        local = self.index.get("local")
        named = (local if isinstance(local, dict) else self.index).get("attempt")
        return named if isinstance(named, str) else ""

    @property
    def rank_reports(self) -> list[dict[str, Any]]:
        """The file's size and hash, lanes and cursor of each rank, in rank order."""
        return self.index["ranks"]

    @property
    def files(self) -> dict[str, Content]:
        """What each file has to contain, by its name."""
        return {
            rank_file(rank): Content(report["bytes"], report["sha256"])
            for rank, report in enumerate(self.rank_reports)
        }

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(report["bytes"] for report in self.rank_reports)

    @cached_property
    def pieces(self) -> Pieces:
        """Which rank's file has which elements."""
        return parsed_pieces(self.index, self.index["world_size"])


def read_index(directory: Path, run_id: str = "") -> Checkpoint:
    """Read the index and check it against marker and directory; CheckpointError as in `verify`."""
    with reading(directory):
        is_link = directory.is_symlink()
    if is_link:
        raise CheckpointError(
            f"{directory}: found a link, expected a directory; move what it leads to into its place"
        )
    path = directory / INDEX
    marker, content = read_whole(directory / MARKER), read_whole(path, LARGEST_LIST_BYTES)
    if marker != f"{hashlib.sha256(content).hexdigest()}\n".encode():
        raise CheckpointError(f"{path}: does not match its {MARKER} marker")
    index = parse_index(path, content)
    named = STEP_NAME.fullmatch(directory.name)
    if named and int(named.group(1)) != index["step"]:
        raise CheckpointError(f"{directory}: contains the checkpoint of step {index['step']}")
    if run_id and index["run"] != run_id:
        raise CheckpointError(
            f"{directory}: found a checkpoint of run {index['run']}, expected run {run_id}"
        )
    return Checkpoint(directory, index)


def read_whole(path: Path, limit: int = SMALL_FILE_BYTES) -> bytes:
    with reading(path):
        return read_regular(path, limit)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an error in reading `path` into a refusal that names it."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    except OSError as error:
        kind = UnreadableError if error.errno in STORAGE_FAILS else CheckpointError
        raise kind(f"{path}: cannot be read: {error.strerror or error}") from error
