"""How the ranks of an attempt ended, from the files that their tasks wrote (task.py)."""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import EXIT_USER_ERROR
from pretrain.rundir.exit_status import EXIT_STOPPED, NEVER_STARTED

_LOST = -signal.SIGKILL  # a rank without a status file was killed together with its task
_NAMED_FIRST = re.compile(r"^srun: error: \S+: tasks? (\d+)", re.MULTILINE)
# How long srun may run on when all ranks have ended, and when one has failed: then srun kills the
# others, which takes Slurm's KillWait (30 s).
_SECONDS_AFTER_ALL = 30.0
_SECONDS_AFTER_FAILURE = 300.0
_LOOK_SECONDS = 2.0


@dataclass(frozen=True)
class RankEnd:
    """What a task wrote about its rank, and when."""

    status: int
    time: float

    @property
    def is_failure(self) -> bool:
        return self.status not in (0, EXIT_STOPPED)


def read_ends(logs: Sequence[Path]) -> dict[int, RankEnd]:
    """The ends of the ranks that have written theirs; `logs` are in rank order."""
    files = {rank: log.with_suffix(".status") for rank, log in enumerate(logs)}
    return {
        rank: RankEnd(int(file.read_text()), file.stat().st_mtime)
        for rank, file in files.items()
        if file.exists()
    }


def statuses(ends: Mapping[int, RankEnd], logs: Sequence[Path]) -> list[int]:
    """Exit statuses in rank order; a rank without a log never started."""
    return [
        ends[rank].status if rank in ends else _LOST if log.exists() else NEVER_STARTED
        for rank, log in enumerate(logs)
    ]


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


def _failed_first_hand(end: RankEnd) -> bool:
    return end.is_failure and end.status != -signal.SIGTERM


def seconds_left_to_srun(ends: Mapping[int, RankEnd], num_ranks: int) -> float:
    """How long srun may still run after the last of these ends."""
    if len(ends) == num_ranks:
        return _SECONDS_AFTER_ALL
    any_failed = any(end.is_failure for end in ends.values())
    return _SECONDS_AFTER_FAILURE if any_failed else math.inf


class SrunPatience:
    """Tells when srun waits in vain: for a node's slurmstepd that was killed, it would forever."""

    def __init__(self, logs: Sequence[Path]) -> None:
        self._logs = logs
        self._num_ends = 0
        self._changed = self._looked = time.monotonic()

    def is_exhausted(self) -> bool:
        """Call this often; it looks at the files every few seconds."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return False
        self._looked = now
        ends = read_ends(self._logs)
        if len(ends) != self._num_ends:
            self._num_ends, self._changed = len(ends), now
        return now - self._changed > seconds_left_to_srun(ends, len(self._logs))
