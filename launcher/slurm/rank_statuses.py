"""How the ranks of an attempt ended, from the files that their tasks wrote (task.py)."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import EXIT_USER_ERROR
from data_pipeline.many_files import read_together
from pretrain.rundir.exit_status import EXIT_STOPPED, NEVER_STARTED

_LOST = -signal.SIGKILL  # a rank without a status file was killed together with its task
_NAMED_FIRST = re.compile(r"^srun: error: \S+: tasks? (\d+)", re.MULTILINE)
_FAILED_NODE = re.compile(r"(?:Node failure on|Task launch for \S+ failed on node) ([^\s:]+)")
# How long srun may run on when all ranks have ended, and when one has failed: then srun kills the
# others, which takes Slurm's KillWait (30 s).
_SECONDS_AFTER_ALL = 30.0
_SECONDS_AFTER_FAILURE = 300.0
_SECONDS_AFTER_LOSS = 60.0  # if those that have not ended are on nodes that do not respond
_LOOK_SECONDS = 2.0


@dataclass(frozen=True)
class RankEnd:
    """What a task wrote about its rank, and when."""

    status: int
    time: float

    @property
    def is_failure(self) -> bool:
        return self.status not in (0, EXIT_STOPPED)


class RankEnds:
    """The ends that ranks have written, each read once, while the others still run.

    `logs` are in rank order, all in one directory.
    """

    def __init__(self, logs: Sequence[Path]) -> None:
        self.found: dict[int, RankEnd] = {}
        self._logs = logs

    def look(self) -> None:
        """Read those that are new, which a listing of the directory names."""
        with contextlib.suppress(OSError):  # storage that is away tells of no new end
            names = set(os.listdir(self._logs[0].parent))
            self._read(
                rank for rank in self._missing if _status_file(self._logs[rank]).name in names
            )

    def read_rest(self) -> None:
        """Read those that a network file system may not list yet, too."""
        self._read(self._missing)

    def statuses(self) -> list[int]:
        """Exit statuses in rank order; a rank without a log never started."""
        missing = self._missing
        has_log = read_together(Path.exists, [self._logs[rank] for rank in missing])
        lost = {
            rank: _LOST if started else NEVER_STARTED
            for rank, started in zip(missing, has_log, strict=True)
        }
        known = {rank: end.status for rank, end in self.found.items()}
        return [status for _, status in sorted({**known, **lost}.items())]

    @property
    def _missing(self) -> list[int]:
        return [rank for rank in range(len(self._logs)) if rank not in self.found]

    def _read(self, ranks: Iterable[int]) -> None:
        ranks = list(ranks)
        ends = read_together(_end_in, [_status_file(self._logs[rank]) for rank in ranks])
        self.found |= {rank: end for rank, end in zip(ranks, ends, strict=True) if end}


def _status_file(log: Path) -> Path:
    return log.with_suffix(".status")


def _end_in(file: Path) -> RankEnd | None:
    try:
        with open(file) as opened:
            # The file system's time: clocks of nodes differ.
            return RankEnd(int(opened.read()), os.fstat(opened.fileno()).st_mtime)
    except FileNotFoundError:
        return None


def first_failure(ends: Mapping[int, RankEnd], num_ranks: int, srun_log: str) -> int | None:
    """The rank whose failure made the others fail: one that says what its user has to change, such
    as a store that denies access to it alone, else one that was killed by a signal, else the first.

    Ranks killed by SIGTERM do not count: srun ends the others that way. If no rank left a status,
    because its task could not even start, it is the first rank that srun names.
    """
    failed = [rank for rank, end in ends.items() if _failed_first_hand(end)]
    knows = [rank for rank in failed if ends[rank].status == EXIT_USER_ERROR]
    killed = [rank for rank in failed if ends[rank].status < 0]
    if failed:
        return min(knows or killed or failed, key=lambda rank: ends[rank].time)
    named = _NAMED_FIRST.search(srun_log)
    any_failed = len(ends) < num_ranks or any(end.is_failure for end in ends.values())
    return int(named[1]) if named and any_failed else None


def failed_nodes(log: str) -> list[str]:
    """The nodes that Slurm or srun names as failed in this log, in its order."""
    return _FAILED_NODE.findall(log)


def _failed_first_hand(end: RankEnd) -> bool:
    return end.is_failure and end.status != -signal.SIGTERM


def seconds_left_to_srun(
    ends: Mapping[int, RankEnd], num_ranks: int, are_lost: bool = False
) -> float:
    """How long srun may still run after the last of these ends; `are_lost`: the nodes of all other
    ranks do not respond."""
    if len(ends) == num_ranks:
        return _SECONDS_AFTER_ALL
    if not any(end.is_failure for end in ends.values()):
        return math.inf
    return _SECONDS_AFTER_LOSS if are_lost else _SECONDS_AFTER_FAILURE


class SrunPatience:
    """Tells when srun waits in vain: for a node's slurmstepd that was killed, it would forever; for
    a node that died, until Slurm gives it up. `are_lost`: whether the nodes of these ranks do not
    respond."""

    def __init__(
        self, ends: RankEnds, num_ranks: int, are_lost: Callable[[Sequence[int]], bool]
    ) -> None:
        self._ends = ends
        self._num_ranks = num_ranks
        self._are_lost = are_lost
        self._num_ends = 0
        self._changed = self._looked = time.monotonic()

    def is_exhausted(self) -> bool:
        """Call this often; it looks for new files every few seconds."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return False
        self._looked = now
        self._ends.look()
        ends = self._ends.found
        if len(ends) != self._num_ends:
            self._num_ends, self._changed = len(ends), now
        elapsed = now - self._changed
        if elapsed > seconds_left_to_srun(ends, self._num_ranks):
            return True
        if elapsed <= seconds_left_to_srun(ends, self._num_ranks, are_lost=True):
            return False
        return self._are_lost([rank for rank in range(self._num_ranks) if rank not in ends])
