"""The marker of a checkpoint: publishing, verifying, finding the latest valid one. Torch-free.

A save writes into a hidden directory, in this order:

    1. every rank: its safetensors file and its part of that of its node, hashed while they are
       written and then fsynced
    2. every rank: its report to rank 0, with sizes and hashes of those two, once both are on disk
    3. rank 0, once it has all reports and sees all their files: index.json, which merges them
    4. rank 0: COMPLETE, the marker, which holds the SHA-256 of index.json
    5. rank 0: the rename to step-N, and an fsync of the parent directory

JSON and marker are themselves written to a temporary file, fsynced and renamed
(`foundation.files`). So at any moment a crash or a power cut leaves either no directory of that
step or a whole one, and never touches older checkpoints. Marker -> index -> files is a chain of
hashes over every byte: whatever is truncated, exchanged between ranks or copied from another step
breaks it. There is no `latest` link to go stale: the latest valid checkpoint is found by verifying
from the end.

`verify` alone decides whether a checkpoint is good. It reads everything, so the questions that are
asked often (what to prune, how far a run is) go to `counts`: marker, index and sizes are right, and
no start has refused the checkpoint, which leaves a note in it (`REFUSED`).

The index of a checkpoint, index.json: what it says is checked once, before anything acts on it.

format, run, step, world_size, config     which checkpoint it is
files      name -> bytes and sha256       of every file but index and marker, as a list of the parts
                                          that one rank each has written, one after the other
pieces     parameter -> kinds and runs    which rank's file has which elements (`pieces.py`)
ranks      first_lane, num_lanes, cursor  of every rank, in their order; `state`, the file with its
                                          memories (`state_of_rank`)
tokens_seen, optimizer_steps, loss_scale, validation_loss

Who hashes what of a checkpoint: every byte once over the ranks, and rank 0 shows how far it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from foundation.errors import STORAGE_FAILS, CheckpointError, UnreadableError
from foundation.files import (
    fsync_directory,
    parse_json,
    read_regular,
    read_together,
    sha256_of,
    write_text,
)
from foundation.records import Fields, InvalidField, shown
from pretrain.checkpoint import pieces
from pretrain.checkpoint.directory import (
    INDEX,
    KINDS,
    MARKER,
    REFUSED,
    STEP_NAME,
    rank_file,
    remove,
    step_directory,
    steps_on_disk,
)
from pretrain.checkpoint.pieces import (
    Pieces,
    elements_of_rank,
    merged,
    parsed,
    require_pieces,
)
from pretrain.terminal.text import counted

FORMAT = 6  # of a checkpoint: file names, keys of tensors and of the index


def parse_index(path: Path, content: bytes) -> dict[str, Any]:
    """Return the contents of the index; CheckpointError unless all its fields are right."""
    try:
        index = parse_json(content)
        fields = Fields(index)
        if (found := fields.integer("format")) != FORMAT:
            raise CheckpointError(
                f"{path}: found format {found}, expected format {FORMAT}; "
                "resume with the version that wrote it, or use a new run directory"
            )
        _check(fields, index)
    except (ValueError, InvalidField) as error:
        raise CheckpointError(
            f"{path}: found no index of a checkpoint of format {FORMAT} ({error})"
        ) from None
    return index


def _check(fields: Fields, index: dict[str, Any]) -> None:
    """Raise InvalidField unless the fields are of their types, and the ranks' lanes add up."""
    fields.text("run")
    for name in ("step", "tokens_seen", "optimizer_steps"):
        fields.integer(name)
    fields.object("config")
    if type(index.get("validation_loss", ...)) not in (int, float, NoneType):  # it may be NaN
        raise InvalidField("validation_loss is not a number")
    if "loss_scale" not in index:
        raise InvalidField("loss_scale is missing")
    if index["loss_scale"] is not None:
        scale = fields.object("loss_scale")
        scale.number("scale")
        scale.integer("updates")
    for name in fields.tree("files"):
        for part in fields.object("files").items(name):
            part.only(("bytes", "sha256")).integer("bytes")
            part.sha256("sha256")
    reports, next_lane = fields.items("ranks"), 0
    if fields.integer("world_size", least=1) != len(reports):
        raise InvalidField(f"world_size is {index['world_size']}, ranks has {len(reports)}")
    pieces.parsed(fields, len(reports))
    # Of a cursor, its reader checks what is in it; None before the first batch.
    if not all(isinstance(each.get("cursor", ...), (dict, NoneType)) for each in index["ranks"]):
        raise InvalidField("a rank has no cursor")
    for report in reports:
        report.integer("first_lane", next_lane, next_lane)
        next_lane += report.integer("num_lanes")
    if not next_lane:
        raise InvalidField("ranks have no lanes")
    _check_files(index["files"], [report.text("state") for report in reports])


def _check_files(files: dict[str, Any], states: list[str]) -> None:
    """Raise InvalidField unless each rank has its part in two of the files: its engine's, and the
    one of `states`.

    Whatever is listed is opened, so nothing but these names may be.
    """
    engines, possible = ([rank_file(kind, n) for n in range(len(states))] for kind in KINDS)
    parts = Counter([*engines, *states])
    for name, count in parts.items():
        if (found := len(files.get(name, ()))) != count:
            raise InvalidField(f"{shown(name)} has {counted(found, 'part')}, expected {count}")
    unknown = (files.keys() - parts.keys()) | (set(states) - set(possible))
    if unknown:
        raise InvalidField(f"found the file {shown(min(unknown))}, expected those of ranks only")


logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 10.0


class Part(NamedTuple):
    """What one rank has written of a file: the bytes from `start` on. `engine_rank`: of pieces."""

    name: str
    start: int
    bytes: int
    sha256: str
    engine_rank: int | None = None


def parts_in(index: Mapping[str, Any]) -> list[Part]:
    """Return all parts that an index lists, those of each rank together; IndexError or KeyError
    if a rank has none."""
    found = []
    ends: dict[str, tuple[int, int]] = {}
    for rank, report in enumerate(index["ranks"]):
        for kind, name in ("engine", rank_file("engine", rank)), ("state", report["state"]):
            number, start = ends.get(name, (0, 0))
            part = index["files"][name][number]
            engine_rank = rank if kind == "engine" else None
            found.append(Part(name, start, part["bytes"], part["sha256"], engine_rank))
            ends[name] = (number + 1, start + part["bytes"])
    return found


def share_of_rank(parts: Sequence[Part], rank: int, world_size: int) -> list[Part]:
    """Return the parts that a rank hashes: those of consecutive ranks, of equal bytes.

    With as many ranks as saved it, a rank hashes about what it will read, so that its node has that
    in memory by then. A part is hashed by one rank: with more ranks than parts, some have nothing.
    """
    total = sum(part.bytes for part in parts) or 1
    share, before = [], 0
    for part in parts:
        middle = min(before + part.bytes / 2, total - 0.5)
        if int(middle * world_size / total) == rank:
            share.append(part)
        before += part.bytes
    return share


class Progress:
    """How much of a rank's share is hashed; a line at most every few seconds if it `is_shown`.

    The rank hashes `own_bytes` of the checkpoint's `num_bytes`.
    """

    def __init__(
        self, step: int, num_bytes: int, world_size: int, own_bytes: int, is_shown: bool
    ) -> None:
        self._what = f"{num_bytes / 2**30:,.1f} GiB by {counted(world_size, 'rank')}"
        self._step, self._is_shown = step, is_shown
        self._own_bytes, self._done = own_bytes, 0
        self._started = self._shown = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Note that so many bytes more are hashed."""
        self._done += num_bytes
        now = time.monotonic()
        if not self._is_shown or now < self._shown + SECONDS_BETWEEN_LINES:
            return
        self._shown = now
        part = self._done / max(self._own_bytes, self._done)
        left = (now - self._started) * (1 - part) / part
        what = "verifying step %d: %.0f%% of %s, about %.0f s left"
        logger.info(what, self._step, 100 * part, self._what, left)


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint that passed `verify`."""

    directory: Path
    index: dict[str, Any]
    is_local: bool = False  # only this rank's part, as `local_tier.py` wrote it

    @property
    def step(self) -> int:
        return int(self.index["step"])

    @property
    def rank_reports(self) -> list[dict[str, Any]]:
        """The lanes and cursor of each rank, in rank order."""
        return self.index["ranks"]

    @property
    def num_bytes(self) -> int:
        """The size of all files that the index lists."""
        return sum(map(_bytes_of, self.index["files"].values()))

    @cached_property
    def pieces(self) -> Pieces:
        """Which rank's file has which elements."""
        return parsed(Fields(self.index), self.index["world_size"])


def publish(
    partial: Path,
    final: Path,
    index: dict[str, Any],
    reports: Sequence[Mapping[str, Any]],
    before_rename: Callable[[], None] = lambda: None,
) -> None:
    """Write index and marker from the reports of all ranks, rename to `final` (rank 0 only).

    `before_rename` is called once, at the last moment at which the checkpoint can still be
    withheld.
    """
    lists = {
        "files": _files_of(reports),
        "pieces": merged(each["pieces"] for each in reports),
        "ranks": [
            {name: value for name, value in each.items() if name not in ("files", "pieces")}
            | {"state": next(name for name in each["files"] if name.startswith("state"))}
            for each in reports
        ],
    }
    _check_sizes(partial, lists["files"])  # a rank may have written into a directory of its own
    # A line per field: indented, those of thousands of ranks take a second to write, in Python.
    whole = {**index, "format": FORMAT, **lists}
    lines = sorted(f"{json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in whole.items())
    write_text(partial / INDEX, "{\n" + ",\n".join(lines) + "\n}\n")
    write_text(partial / MARKER, sha256_of(partial / INDEX) + "\n")
    before_rename()
    if final.exists():  # an invalid one that resuming skipped, or one from before a rewind
        remove(final)
    partial.rename(final)
    fsync_directory(final.parent)


def _files_of(reports: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the index's `files` from what each rank has written of which file."""
    parts: dict[str, list[Mapping[str, Any]]] = {}
    for each in reports:
        for name, part in each["files"].items():
            parts.setdefault(name, []).append(part)
    files = {}
    for name, written in parts.items():
        end = 0
        for part in written:
            assert part["start"] == end, f"{name}: parts of ranks in another order"
            end += part["bytes"]
        files[name] = [{"bytes": each["bytes"], "sha256": each["sha256"]} for each in written]
    return files


def verify(directory: Path, run_id: str = "") -> Checkpoint:
    """Read and check a checkpoint of the run; CheckpointError names the first file that is wrong.

    Whatever keeps a file from being read is an error of that kind, too.
    """
    found = read_index(directory, run_id)
    check_share(found)
    return found


def check_share(
    found: Checkpoint, rank: int = 0, world_size: int = 1, is_shown: bool = False
) -> None:
    """Read and check a rank's share of the files that the index lists; CheckpointError as above.

    Ranks that verify together call it after one of them has read the index for all.
    """
    parts = parts_in(found.index)
    share = share_of_rank(parts, rank, world_size)
    own_bytes = sum(part.bytes for part in share)
    progress = Progress(found.step, found.num_bytes, world_size, own_bytes, is_shown)
    for part in share:
        _check_part(found, part, parts, progress.add)
        if part.engine_rank is not None:
            expected = elements_of_rank(found.pieces, part.engine_rank)
            require_pieces(found.directory / part.name, expected)


def read_index(directory: Path, run_id: str = "") -> Checkpoint:
    """Read the index and check it against marker and directory; CheckpointError as in `verify`."""
    if directory.is_symlink():
        raise CheckpointError(
            f"{directory}: found a link, expected a directory; move what it leads to into its place"
        )
    path = directory / INDEX
    marker, content = _contents(directory / MARKER), _contents(path)
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


def counts(directory: Path) -> bool:
    """Whether marker, index and sizes are right and no start has refused the checkpoint."""
    try:
        _check_sizes(directory, read_index(directory).index["files"])
        return not (directory / REFUSED).exists()
    except (CheckpointError, OSError):
        return False


def steps_that_count(root: Path) -> list[int]:
    """Return the steps of the checkpoints that `counts`, oldest first."""
    return [step for step in steps_on_disk(root) if counts(step_directory(root, step))]


def latest_step(root: Path, before: int | None = None) -> int:
    """Return how far a run is: the step of its latest checkpoint that `counts`; 0 if none does."""
    steps = reversed([each for each in steps_on_disk(root) if before is None or each < before])
    return next((step for step in steps if counts(step_directory(root, step))), 0)


def latest_valid(root: Path, say: Callable[[str], None], run_id: str = "") -> Checkpoint | None:
    """Return the latest checkpoint that verifies and belongs to the run; None if there are none.

    `say` gets a line for each checkpoint that is skipped. Raises CheckpointError if there are
    checkpoints and none is valid: to start from scratch would throw the run away.
    """
    steps = steps_on_disk(root)
    found, refused = newest_valid(steps, lambda step: verify(step_directory(root, step), run_id))
    for _, error in refused:
        say(refusal(str(error), step_of(found)))
    if steps and found is None:
        raise none_valid(root, refused)
    return found


Refused = list[tuple[int, CheckpointError]]


def newest_valid(
    steps: Sequence[int], get: Callable[[int], Checkpoint]
) -> tuple[Checkpoint | None, Refused]:
    """Return the last of the steps that `get` accepts, and why it did not accept later ones."""
    refused: Refused = []
    for step in reversed(steps):
        try:
            return get(step), refused
        except CheckpointError as error:
            refused.append((step, error))
    return None, refused


def none_valid(root: Path, refused: Refused) -> CheckpointError:
    """What to raise where all checkpoints were refused; UnreadableError if storage failed once."""
    may_pass = any(isinstance(error, UnreadableError) for _, error in refused)
    return (UnreadableError if may_pass else CheckpointError)(
        f"{root}: none of its {len(refused)} checkpoints is valid; repair or remove them, or use "
        "a new run directory"
    )


def refusal(reason: str, used: str = "") -> str:
    """The line about a checkpoint that is skipped, and what is `used` instead."""
    return f"checkpoint rejected: {reason}" + (f"; using {used}" if used else "")


def step_of(found: Checkpoint | None) -> str:
    """`step 100`, or '' for none."""
    return f"step {found.step}" if found else ""


@contextlib.contextmanager
def reading(directory: Path, *also: type[Exception]) -> Iterator[None]:
    """Turn errors in reading files of a checkpoint that was good into UnreadableError."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, *also) as error:
        raise UnreadableError(f"{directory}: cannot be read any more: {error}") from error


def remember(directory: Path, refused: str) -> None:
    """Note in the checkpoint why it was refused, for `counts`; '' removes the note."""
    # A disk that cannot be written does not matter: the next start reads everything again.
    with contextlib.suppress(OSError):
        if refused:
            write_text(directory / REFUSED, refused + "\n")
        else:
            (directory / REFUSED).unlink(missing_ok=True)


def _bytes_of(parts: Sequence[Mapping[str, Any]]) -> int:
    return sum(part["bytes"] for part in parts)


def _check_part(
    found: Checkpoint, part: Part, parts: Sequence[Part], on_bytes: Callable[[int], None]
) -> None:
    path = found.directory / part.name
    file_bytes = _bytes_of(found.index["files"][part.name])
    _check_size(path, file_bytes)
    is_last = part.start + part.bytes == file_bytes
    with _refusing(path):  # the last part to the end, wherever that is by now
        sha256 = sha256_of(path, on_bytes, part.start, None if is_last else part.bytes)
    if sha256 == part.sha256:
        return
    # A common accident is a copy of a directory that mixed up the ranks: say so.
    owner = next((each.name for each in parts if each.sha256 == sha256), part.name)
    raise CheckpointError(
        f"{path}: contains the data of {owner}"
        if owner != part.name
        else f"{path}: its contents changed since it was written"
    )


def _check_sizes(directory: Path, listed: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Raise CheckpointError unless all files that an index lists are there, with their sizes."""
    sizes = {directory / name: _bytes_of(parts) for name, parts in listed.items()}
    read_together(lambda path: _check_size(path, sizes[path]), list(sizes))


def _check_size(path: Path, expected: int) -> None:
    if (size := _size(path)) != expected:
        raise CheckpointError(f"{path}: found {size} bytes, expected {expected}")


def _contents(path: Path) -> bytes:
    with _refusing(path):
        return read_regular(path)


def _size(path: Path) -> int:
    with _refusing(path):
        found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path}: not a file")
    return found.st_size


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
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
