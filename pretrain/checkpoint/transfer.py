"""Bringing a checkpoint to a destination: each rank its files, and rank 0 what makes them count.

A save and an upload are each a `Transfer`: a rank puts its files into the destination, and reports
them once they are there; rank 0 publishes when it has all reports. They go through the store where
the ranks met. The threads use no collectives, which would be interleaved with the loop's in another
order on each rank; and to look for files of thousands of ranks is slow, because a network file
system answers for a minute from its cache that a name does not exist. Rank 0 asks the store how
many reports there are, then takes all at once.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from torch.distributed import HashStore, PrefixStore, Store, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]

from foundation.errors import UserError, os_error_text, remedy_of
from foundation.typed_values import from_json, json_text
from pretrain.engines.engine import is_out_of_memory
from pretrain.errors import CheckpointError

REPORTS_POLL_SECONDS = 0.02
FAILURE = "failure"
_LENGTH_BYTES = 8
Report = dict[str, Any]


class SaveCanceled(Exception):
    """The loop canceled the save."""


@dataclass(frozen=True)
class SaveProblem:
    """Why a rank's part of a save failed."""

    text: str
    may_pass: bool = True  # storage failed, so a later save may succeed
    remedy: str = "free disk space"

    @classmethod
    def of(cls, error: Exception) -> SaveProblem:
        if isinstance(error, RankFailed):
            return error.problem
        if isinstance(error, OSError):
            return cls(os_error_text(error), remedy=remedy_of(error))
        if isinstance(error, CheckpointError):  # rank 0 does not see what a rank has written
            return cls(str(error), remedy="check the disk or file server")
        if is_out_of_memory(error):
            return cls(f"out of host memory ({error!r})"[:300], remedy="free host memory")
        text = (str(error) if isinstance(error, UserError) else "") or repr(error)
        return cls(text, may_pass=False, remedy="")


class RankFailed(Exception):
    """Another rank has failed, so that its files will not come."""

    def __init__(self, problem: SaveProblem) -> None:
        self.problem = problem


class RankReports:
    """The reports of one transfer; its `name` is the same on all ranks, and unique.

    They go through the store of the ranks' process group by default; a single rank has its own.
    """

    def __init__(self, name: str, rank: int, num_ranks: int, store: Store | None = None) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        if store is None:
            store = distributed_c10d._get_default_store() if num_ranks > 1 else HashStore()
        self._store = PrefixStore(f"save/{name}", store)

    def post(self, report: Mapping[str, Any], pieces: Mapping[str, Any]) -> None:
        """Report what this rank has written; does not wait for rank 0."""
        content = encoded(report, pieces)
        self._store.set(str(self.rank), cast("str", content))  # bytes are as good
        self._store.add("count", 1)

    def post_failure(self, problem: SaveProblem) -> None:
        """Report, unless this is rank 0, that there will be no report of this rank."""
        if self.rank:
            problem = replace(problem, text=f"rank {self.rank}: {problem.text}")
            with contextlib.suppress(RuntimeError):  # rank 0 is gone, as every rank will notice
                self._store.set(FAILURE, json_text(asdict(problem)))

    def collect(self, while_waiting: Callable[[], None]) -> list[Report]:
        """Return the reports in rank order (rank 0); RankFailed as soon as a rank posts a failure.

        `while_waiting` may raise.
        """
        while self._store.add("count", 0) < self.num_ranks:
            while_waiting()
            if self._store.check([FAILURE]):
                raise RankFailed(from_json(SaveProblem, self._store.get(FAILURE)))
            time.sleep(REPORTS_POLL_SECONDS)
        return decoded(self._store.multi_get([str(rank) for rank in range(self.num_ranks)]))

    def clear(self) -> None:
        """Remove what has been collected from the store: a request for each rank (rank 0)."""
        for name in (*map(str, range(self.num_ranks)), "count"):
            self._store.delete_key(name)


def encoded(report: Mapping[str, Any], pieces: Mapping[str, Any]) -> bytes:
    """Return a rank's message: report and pieces as JSON, compressed, after the report's length."""
    head, tail = (
        zlib.compress(json_text(tree, sort_keys=True).encode(), level=1)
        for tree in (report, pieces)
    )
    return len(head).to_bytes(_LENGTH_BYTES, "little") + head + tail


def decoded(contents: Sequence[bytes]) -> list[Report]:
    """Return the reports with their `pieces`; equal ones are read once, and the same object."""
    known: dict[bytes, Any] = {}
    reports = []
    for content in contents:
        end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
        if (pieces := content[end:]) not in known:
            known[pieces] = json.loads(zlib.decompress(pieces))
        report = json.loads(zlib.decompress(content[_LENGTH_BYTES:end]))
        reports.append({**report, "pieces": known[pieces]})
    return reports


class Transfer(ABC):
    """A rank's part in bringing a checkpoint to a destination, which `run` does in a thread.

    `_put` brings the rank's files there and returns what it reports; rank 0's then `_publish`es.
    """

    def __init__(self, step: int, reports: RankReports) -> None:
        self.step, self._reports = step, reports
        self._written, self._ended = threading.Event(), threading.Event()
        self._canceled = threading.Event()
        self.is_published = False  # as far as this rank knows: rank 0 knows first
        self._problem: SaveProblem | None = None

    @abstractmethod
    def _put(self) -> tuple[Report, Mapping[str, Any]]: ...

    @abstractmethod
    def _publish(self, reports: list[Report]) -> None: ...

    def run(self) -> None:
        try:
            # Its report tells rank 0 that all this rank's files are there.
            self._reports.post(*self._put())
            self._written.set()
            if self._reports.rank == 0:
                self._publish(self._reports.collect(self.check))
                self.is_published = True
                self._reports.clear()
        except Exception as error:  # the loop asks for it, and every rank then raises it
            self._problem = SaveProblem.of(error)
            self._reports.post_failure(self._problem)
        finally:
            self._end()

    def _end(self) -> None:
        """Wake those that wait, also after an error."""
        self._written.set()
        self._ended.set()

    @property
    def is_ended(self) -> bool:
        return self._ended.is_set()

    @property
    def problem(self) -> SaveProblem | None:
        """Why this rank has failed, if it has; does not wait."""
        return self._problem

    def wait(self) -> SaveProblem | None:
        """Wait until this rank's file is there and, on rank 0, all are published; else why not."""
        (self._written if self._reports.rank else self._ended).wait()
        return None if self.is_published else self._problem

    def stop(self) -> None:
        """Let it put and publish nothing more."""
        self._canceled.set()

    def cancel(self) -> None:
        """Stop it, and wait until it has ended."""
        self.stop()
        self._ended.wait()

    def check(self) -> None:
        """Raise SaveCanceled if it was stopped."""
        if self._canceled.is_set():
            raise SaveCanceled
