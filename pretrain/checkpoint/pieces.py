"""Which rank's file has which elements of each parameter. Torch-free.

A key in a file is PARAMETER|START|KIND: the tensor has the elements of the flat parameter from
START on. The index lists these pieces, so that a reader opens only the files it needs:

    "pieces": {"w": {"kinds": ["exp_avg", "weight"], "runs": [[0, 0, 6, 2], [2, 12, 1, 1]]}}

A run [RANK, START, ELEMENTS, RANKS] stands for RANKS pieces of ELEMENTS each, one after the other
from START on, in the files of consecutive ranks from RANK on. Here ranks 0 and 1 hold 6 elements
each, rank 2 the last one. Slices of any ZeRO stage are a few runs per parameter, whatever the
number of ranks.
"""

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from foundation.errors import shown
from foundation.typed_values import LARGEST_INTEGER, Count, Positive, from_tree
from pretrain.errors import CheckpointError, UnreadableError

_KEY = re.compile(r"([^|]+)\|([0-9]{1,15})\|([^|]+)")
HOLE = "a piece of {} starts at element {}, expected {}"


class PieceRun(NamedTuple):
    """`ranks` pieces of `elements` each, from element `start` on, in files from `rank` on."""

    rank: Count
    start: Count
    elements: Positive
    ranks: Positive

    @property
    def end(self) -> int:
        return self.start + self.elements * self.ranks


class Piece(NamedTuple):
    """The elements [start, end) of a parameter, in the file of `rank`."""

    rank: int
    start: int
    end: int


@dataclass(frozen=True)
class ParameterPieces:
    """The pieces of a parameter, the same for each of its kinds (weight, moments, EMA)."""

    kinds: tuple[str, ...]
    runs: tuple[PieceRun, ...]

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


Pieces = dict[str, ParameterPieces]  # by the parameter's name


def piece_key(parameter: str, start: int, kind: str) -> str:
    """Return the key of a piece in its file."""
    return f"{parameter}|{start}|{kind}"


def piece_report(elements: Mapping[str, int], rank: int) -> dict[str, Any]:
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
        (pieces,) = {tuple(sorted(of_kind)) for of_kind in by_kind.values()}
        report[parameter] = {"kinds": sorted(by_kind), "pieces": [list(piece) for piece in pieces]}
    return report


def merged_pieces(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the index's `pieces` from the ranks' reports, in rank order."""
    kinds: dict[str, list[str]] = {}
    runs: dict[str, list[PieceRun]] = {}
    rank = 0
    for report, equal in itertools.groupby(reports):
        ranks = len(list(equal))
        for parameter, held in report.items():
            assert kinds.setdefault(parameter, held["kinds"]) == held["kinds"], parameter
            runs.setdefault(parameter, []).extend(
                PieceRun(rank, rank * elements + offset, elements, ranks)
                for offset, elements in held["pieces"]
            )
        rank += ranks
    return {
        name: {"kinds": kinds[name], "runs": [list(run) for run in _joined(unjoined)]}
        for name, unjoined in runs.items()
    }


def _joined(runs: list[PieceRun]) -> list[PieceRun]:
    """Return the runs in order of their starts, joined where they continue each other."""
    joined: list[PieceRun] = []
    for run in sorted(runs, key=lambda run: run.start):
        last = joined[-1] if joined else None
        if last and (last.rank + last.ranks, last.end, last.elements) == run[:3]:
            joined[-1] = last._replace(ranks=last.ranks + run.ranks)
        else:
            joined.append(run)
    return joined


def parsed_pieces(index: Mapping[str, Any], world_size: int) -> Pieces:
    """Return an index's pieces; ValueError if a field is wrong, or pieces leave a gap or overlap.

    A gap and an overlap could add up to the right number of elements. Loading would then leave in
    the gap whatever was in memory.
    """
    pieces = from_tree(Pieces, index.get("pieces"))
    for name, held in pieces.items():
        if not held.kinds or not held.runs:
            raise ValueError(f"pieces.{shown(name)} is empty, expected kinds and runs")
        end = 0
        for run in held.runs:
            if run.rank + run.ranks > world_size or run.end > LARGEST_INTEGER:
                raise ValueError(f"pieces has the run {shown([*run])}, expected pieces of ranks")
            if run.start != end:
                raise ValueError(HOLE.format(shown(name), run.start, end))
            end = run.end
    return pieces


def rank_elements(pieces: Pieces, rank: int) -> dict[str, int]:
    """Return the keys that are in the file of a rank, and their numbers of elements."""
    return {
        piece_key(name, run.start + (rank - run.rank) * run.elements, kind): run.elements
        for name, held in pieces.items()
        for run in held.runs
        if run.rank <= rank < run.rank + run.ranks
        for kind in held.kinds
    }


def require_pieces(path: Path, expected: Mapping[str, int]) -> None:
    """Raise CheckpointError unless the file has these pieces with their numbers of elements.

    The rest of the file, memories and random-number state, is checked when it is read.
    """
    with open_tensors(path, framework="numpy") as handle:
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
def open_tensors(path: Path, framework: str = "pt") -> Iterator[Any]:
    """Open a file of tensors; CheckpointError unless it has what the block reads.

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
