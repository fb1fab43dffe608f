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
pieces     parameter -> kinds and runs    which rank's file has which elements, see below
tokens_seen, optimizer_steps, loss_scale

Files are named by rank (`rank_file`), so an index names no path.

A key in a file is PARAMETER|START|KIND: the tensor has the elements of the flat parameter from
START on. The index lists these pieces, so that a reader opens only the files it needs:

    "pieces": {"w": {"kinds": ["exp_avg", "weight"], "runs": [[0, 0, 6, 2], [2, 12, 1, 1]]}}

A run [RANK, START, ELEMENTS, RANKS] stands for RANKS pieces of as many elements each, one after the
other from START on, in the files of consecutive ranks from RANK on. Here ranks 0 and 1 hold 6
elements each, rank 2 the last one. Slices of any ZeRO stage are a few runs per parameter, whatever
the number of ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from foundation.errors import (
    STORAGE_FAILS,
    CheckpointError,
    OtherVersionError,
    PrunedError,
    UnreadableError,
)
from foundation.files import (
    LARGEST_LIST_BYTES,
    SMALL_FILE_BYTES,
    Content,
    move,
    parse_json,
    read_regular,
    read_together,
    sha256_of,
    write_text,
)
from foundation.locks import NoFileLocksError, open_shared
from foundation.records import Fields, InvalidField, json_text, shown
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

_KEY = re.compile(r"([^|]+)\|([0-9]{1,15})\|([^|]+)")
HOLE = "a piece of {} starts at element {}, expected {}"


class Run(NamedTuple):
    """`ranks` pieces of `elements` each, from element `start` on, in files from `rank` on."""

    rank: int
    start: int
    elements: int
    ranks: int

    @property
    def end(self) -> int:
        return self.start + self.elements * self.ranks


class Piece(NamedTuple):
    """The elements [start, end) of a parameter, in the file of `rank`."""

    rank: int
    start: int
    end: int


@dataclass(frozen=True)
class Held:
    """Where a parameter is: the same pieces for each of its kinds (weight, moments, EMA)."""

    kinds: tuple[str, ...]
    runs: tuple[Run, ...]

    @property
    def num_elements(self) -> int:
        return self.runs[-1].end

    def between(self, start: int, end: int) -> Iterator[Piece]:
        """Yield the pieces that have some of the elements [start, end), in their order."""
        for run in self.runs:
            first = max(0, (start - run.start) // run.elements)
            last = min(run.ranks, -(-(end - run.start) // run.elements))
            for n in range(first, last):
                at = run.start + n * run.elements
                yield Piece(run.rank + n, at, at + run.elements)


Pieces = dict[str, Held]  # by the parameter's name


def key_of(parameter: str, start: int, kind: str) -> str:
    """Return the key of a piece in its file."""
    return f"{parameter}|{start}|{kind}"


def report_of(elements: Mapping[str, int], rank: int) -> dict[str, Any]:
    """Return what a rank reports of the keys in its file and their numbers of elements.

    A piece is [OFFSET, ELEMENTS], from element rank x ELEMENTS + OFFSET on: so the reports of ranks
    that hold equal slices of every parameter (stage 3) are equal, and rank 0 merges them as one.
    """
    kinds: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for key, count in elements.items():
        match = _KEY.fullmatch(key)
        assert match, key
        pieces = kinds.setdefault(match[1], {}).setdefault(match[3], [])
        pieces.append((int(match[2]) - rank * count, count))
    report = {}
    for parameter, by_kind in kinds.items():
        (pieces,) = {tuple(sorted(each)) for each in by_kind.values()}
        report[parameter] = {"kinds": sorted(by_kind), "pieces": [list(each) for each in pieces]}
    return report


def merged(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the index's `pieces` from the ranks' reports, in rank order."""
    kinds: dict[str, list[str]] = {}
    runs: dict[str, list[Run]] = {}
    rank = 0
    for report, equal in itertools.groupby(reports):
        ranks = len(list(equal))
        for parameter, held in report.items():
            assert kinds.setdefault(parameter, held["kinds"]) == held["kinds"], parameter
            runs.setdefault(parameter, []).extend(
                Run(rank, rank * elements + offset, elements, ranks)
                for offset, elements in held["pieces"]
            )
        rank += ranks
    return {
        name: {"kinds": kinds[name], "runs": [list(run) for run in _joined(each)]}
        for name, each in runs.items()
    }


def _joined(runs: list[Run]) -> list[Run]:
    """Return the runs in order of their starts, those that continue each other as one."""
    found: list[Run] = []
    for run in sorted(runs, key=lambda each: each.start):
        last = found[-1] if found else None
        if last and (last.rank + last.ranks, last.end, last.elements) == run[:3]:
            found[-1] = last._replace(ranks=last.ranks + run.ranks)
        else:
            found.append(run)
    return found


def parsed(index: Mapping[str, Any], world_size: int) -> Pieces:
    """Return the pieces in an index; InvalidField unless all fields are right.

    Also if elements of a parameter are missing or there twice: counts may add up even so, and what
    a piece does not fill is whatever was in memory.
    """
    found: Pieces = {}
    for name, entry in Fields(index).tree("pieces").items():
        if not isinstance(entry, dict) or entry.keys() != {"kinds", "runs"}:
            raise InvalidField(f"pieces.{shown(name)} is {shown(entry)}, expected kinds and runs")
        kinds, runs = entry["kinds"], entry["runs"]
        are_lists = isinstance(kinds, list) and isinstance(runs, list) and kinds and runs
        if not are_lists or not all(isinstance(kind, str) for kind in kinds):
            raise InvalidField(f"pieces.{shown(name)} is {shown(entry)}, expected kinds and runs")
        end, held = 0, Held(tuple(kinds), tuple(_parsed_run(each, world_size) for each in runs))
        for run in held.runs:
            if run.start != end:
                raise InvalidField(HOLE.format(shown(name), run.start, end))
            end = run.end
        found[name] = held
    return found


def _parsed_run(value: object, world_size: int) -> Run:
    if isinstance(value, list) and len(value) == 4 and all(type(n) is int for n in value):
        run = Run(*value)
        fits = run.rank >= 0 and run.ranks >= 1 and run.rank + run.ranks <= world_size
        if fits and run.start >= 0 and run.elements >= 1 and run.end < 1 << 53:
            return run
    raise InvalidField(f"pieces has the run {shown(value)}, expected pieces of ranks")


def elements_of_rank(pieces: Pieces, rank: int) -> dict[str, int]:
    """Return the keys that are in the file of a rank, and their numbers of elements."""
    return {
        key_of(name, run.start + (rank - run.rank) * run.elements, kind): run.elements
        for name, held in pieces.items()
        for run in held.runs
        if run.rank <= rank < run.rank + run.ranks
        for kind in held.kinds
    }


def require_pieces(path: Path, expected: Mapping[str, int]) -> None:
    """Raise CheckpointError unless the file has these pieces, each with so many elements.

    The rest of the file, memories and random-number state, is checked when it is read.
    """
    with opened(path, framework="numpy") as handle:
        keys = [key for key in handle.keys() if "|" in key]  # noqa: SIM118
        shapes = {key: handle.get_slice(key).get_shape() for key in keys}
    wanted = {key: [count] for key, count in expected.items()}
    for key in sorted(shapes.keys() | wanted.keys()):
        if shapes.get(key) != wanted.get(key):
            raise CheckpointError(
                f"{path}: found {shown(key)} of shape {shapes.get(key, 'none')}, the index has "
                f"{wanted.get(key, 'none')}; use another checkpoint"
            )


@contextlib.contextmanager
def opened(path: Path, framework: str = "pt") -> Iterator[Any]:
    """Open a file of tensors; CheckpointError if it is none, or lacks what the block reads.

    UnreadableError if it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework=framework) as handle:
            yield handle
    except OSError as error:
        reason = error.strerror or str(error).partition(": ")[0]
        raise UnreadableError(f"{path}: cannot be read any more: {reason}") from None
    except (SafetensorError, RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path}: not the tensors of a checkpoint ({reason})") from None


FORMAT = 7  # of a checkpoint: file names, keys of tensors and of the index


def parse_index(path: Path, content: bytes) -> dict[str, Any]:
    """Return the contents of the index; CheckpointError unless all its fields are right."""
    try:
        index = parse_json(content)
        fields = Fields(index)
        if (found := fields.integer("format")) != FORMAT:
            raise OtherVersionError(
                f"{path}: found format {found}, expected format {FORMAT}; "
                "use the version that wrote it, or a new run directory"
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
    parsed(index, len(reports))
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


class Lease:
    """A shared lock on the marker, while this object lives: a run that trains prunes the rest."""

    def __init__(self, directory: Path) -> None:
        self._descriptor = -1
        with contextlib.suppress(OSError, NoFileLocksError), open_shared(directory / MARKER) as f:
            self._descriptor = os.dup(f.fileno())

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint that passed `verify`."""

    directory: Path
    index: dict[str, Any]
    is_local: bool = False  # only this rank's part, as `local_tier.py` wrote it
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
        return parsed(self.index, self.index["world_size"])


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
    lines = sorted(f"{json_text(k)}: {json_text(v, sort_keys=True)}" for k, v in whole.items())
    write_text(partial / INDEX, "{\n" + ",\n".join(lines) + "\n}\n")
    write_text(partial / MARKER, sha256_of(partial / INDEX) + "\n")
    before_rename()
    if final.exists():  # an invalid one that resuming skipped, or one from before a rewind
        remove(final)
    move(partial, final)


def verify(directory: Path, run_id: str = "") -> Checkpoint:
    """Read and check a checkpoint of the run; CheckpointError names the first file that is wrong.

    Whatever keeps a file from being read is an error of that kind, too.
    """
    found = read_index(directory, run_id)
    check_share(found)
    return found


def verify_and_keep(directory: Path, run_id: str = "") -> Checkpoint:
    """Verify a checkpoint of a run that may train: it is not pruned as long as the result is there.

    PrunedError if it was before. Where nothing can be locked, it may go at any moment.
    """
    lease = Lease(directory)
    try:
        return replace(verify(directory, run_id), lease=lease)
    except CheckpointError:
        if directory.is_symlink() or directory.exists():
            raise
        raise PrunedError(f"{directory}: pruned while it was read") from None


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
    marker, content = _contents(directory / MARKER), _contents(path, LARGEST_LIST_BYTES)
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
    while True:
        steps = [step for step in steps_on_disk(root) if not _is_undone(step_directory(root, step))]
        found, refused = newest_valid(
            steps, lambda step: verify_and_keep(step_directory(root, step), run_id)
        )
        pruned = [step for step, error in refused if isinstance(error, PrunedError)]
        if found is not None or not pruned:
            break  # else newer ones are there by now
    for step, error in refused:
        if step not in pruned:
            say(refusal(str(error), step_of(found)))
    if steps and found is None:
        raise none_valid(root, refused)
    return found


Refused = list[tuple[int, CheckpointError]]
UNDONE = "from before the run went back"  # starts the note of what is no part of its history


def newest_valid(
    steps: Sequence[int], get: Callable[[int], Checkpoint]
) -> tuple[Checkpoint | None, Refused]:
    """Return the last of the steps that `get` accepts, and why it did not accept later ones.

    One of another version is no damage: OtherVersionError.
    """
    refused: Refused = []
    for step in reversed(steps):
        try:
            return get(step), refused
        except OtherVersionError:
            raise
        except CheckpointError as error:
            refused.append((step, error))
    return None, refused


def none_valid(root: Path, refused: Refused) -> CheckpointError:
    """What to raise where all checkpoints were refused; UnreadableError if storage failed once."""
    may_pass = any(isinstance(error, UnreadableError) for _, error in refused)
    return (UnreadableError if may_pass else CheckpointError)(
        f"{root}: none of its {len(refused)} checkpoints is valid; of the latest, {refused[0][1]}; "
        "put back a copy, or start the run to resume from its mirror"
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


def _is_undone(directory: Path) -> bool:
    with contextlib.suppress(CheckpointError):
        return _contents(directory / REFUSED).startswith(UNDONE.encode())
    return False


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


def _contents(path: Path, limit: int = SMALL_FILE_BYTES) -> bytes:
    with _refusing(path):
        return read_regular(path, limit)


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
