"""The marker of a checkpoint: publishing, verifying, finding the latest valid one. Torch-free.

A save writes into a hidden directory, in this order:

    1. every rank: its safetensors file, hashed while it is written and then fsynced
    2. every rank: its report to rank 0, with size and hash, once the file is on disk
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
ranks      bytes and sha256               of every rank's file, in their order
           first_lane, num_lanes, cursor  of the lanes that it had
pieces     parameter -> kinds and runs    which rank's file has which elements (`pieces.py`)
tokens_seen, optimizer_steps, loss_scale

Files are named by rank (`rank_file`), so an index names no path.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

from foundation.errors import STORAGE_FAILS, CheckpointError, UnreadableError
from foundation.files import (
    Content,
    fsync_directory,
    parse_json,
    read_regular,
    read_together,
    sha256_of,
    write_text,
)
from foundation.records import Fields, InvalidField
from pretrain.checkpoint import pieces
from pretrain.checkpoint.directory import (
    INDEX,
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

FORMAT = 7  # of a checkpoint: file names, keys of tensors and of the index


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
    if "loss_scale" not in index:
        raise InvalidField("loss_scale is missing")
    if index["loss_scale"] is not None:
        scale = fields.object("loss_scale")
        scale.number("scale")
        scale.integer("updates")
    reports, next_lane = fields.items("ranks"), 0
    if fields.integer("world_size", least=1) != len(reports):
        raise InvalidField(f"world_size is {index['world_size']}, ranks has {len(reports)}")
    pieces.parsed(fields, len(reports))
    # Of a cursor, its reader checks what is in it; None before the first batch.
    if not all(isinstance(each.get("cursor", ...), (dict, NoneType)) for each in index["ranks"]):
        raise InvalidField("a rank has no cursor")
    for report in reports:
        report.only(("bytes", "sha256", "first_lane", "num_lanes", "cursor"))
        report.integer("bytes")
        report.sha256("sha256")
        report.integer("first_lane", next_lane, next_lane)
        next_lane += report.integer("num_lanes")
    if not next_lane:
        raise InvalidField("ranks have no lanes")


def share_of_rank(sizes: Sequence[int], rank: int, world_size: int) -> list[int]:
    """Return the numbers of the files that a rank hashes: consecutive ones, of equal bytes.

    With as many ranks as saved it, a rank hashes about what it will read, so that its node has that
    in memory by then. A file is hashed by one rank: with more ranks than files, some have nothing.
    """
    total = sum(sizes) or 1
    share, before = [], 0
    for number, size in enumerate(sizes):
        middle = min(before + size / 2, total - 0.5)
        if int(middle * world_size / total) == rank:
            share.append(number)
        before += size
    return share


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
        "pieces": merged(each["pieces"] for each in reports),
        "ranks": [
            {name: value for name, value in each.items() if name != "pieces"} for each in reports
        ],
    }
    _check_sizes(partial, lists["ranks"])  # a rank may have written into a directory of its own
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


def verify(directory: Path, run_id: str = "") -> Checkpoint:
    """Read and check a checkpoint of the run; CheckpointError names the first file that is wrong.

    Whatever keeps a file from being read is an error of that kind, too.
    """
    found = read_index(directory, run_id)
    check_share(found)
    return found


def check_share(found: Checkpoint, rank: int = 0, world_size: int = 1) -> None:
    """Read and check a rank's share of the files; CheckpointError as above.

    Ranks that verify together call it after one of them has read the index for all.
    """
    sizes = [report["bytes"] for report in found.rank_reports]
    for number in share_of_rank(sizes, rank, world_size):
        path = found.directory / rank_file(number)
        _check_contents(path, found.files)
        require_pieces(path, elements_of_rank(found.pieces, number))


def read_index(directory: Path, run_id: str = "") -> Checkpoint:
    """Read the index and check it against marker and directory; CheckpointError as in `verify`."""
    with _refusing(directory):
        is_link = directory.is_symlink()
    if is_link:
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
        _check_sizes(directory, read_index(directory).rank_reports)
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


def remember(directory: Path, refused: str) -> None:
    """Note in the checkpoint why it was refused, for `counts`; '' removes the note."""
    # A disk that cannot be written does not matter: the next start reads everything again.
    with contextlib.suppress(OSError):
        if refused:
            write_text(directory / REFUSED, refused + "\n")
        else:
            (directory / REFUSED).unlink(missing_ok=True)


def _check_contents(path: Path, files: Mapping[str, Content]) -> None:
    _check_size(path, files[path.name].bytes)
    with _refusing(path):
        sha256 = sha256_of(path)
    if sha256 == files[path.name].sha256:
        return
    raise CheckpointError(f"{path}: its contents changed since it was written")


def _check_sizes(directory: Path, reports: Sequence[Mapping[str, Any]]) -> None:
    """Raise CheckpointError unless all ranks' files are there, with the sizes that they report."""
    sizes = {directory / rank_file(rank): each["bytes"] for rank, each in enumerate(reports)}
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
