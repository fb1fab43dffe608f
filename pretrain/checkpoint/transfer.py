"""Transfers of a checkpoint to a destination: each rank puts its files there, rank 0 publishes.

A save and an upload are each a `Transfer`. A rank puts its files into the destination and then
posts a report; rank 0 collects all reports and writes the index and the marker, which make the
checkpoint valid. Transfers run in threads, so they use no collectives: each rank would interleave
them with the loop's in another order. Reports go through the store of the ranks' rendezvous. To
poll for the files of thousands of ranks would be slow, because a network file system may cache for
a minute that a name does not exist.
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
    is_transient: bool = True  # storage or host memory failed, so a later save may succeed
    remedy: str = "free disk space"

    @classmethod
    def of(cls, error: Exception) -> SaveProblem:
        if isinstance(error, RankFailed):
            return error.problem
        if isinstance(error, OSError):
            return cls(os_error_text(error), remedy=remedy_of(error))
        # Rank 0 does not find a file that a rank has reported as written.
        if isinstance(error, CheckpointError):
            return cls(str(error), remedy="check the disk or file server")
        if is_out_of_memory(error):
            return cls(f"out of host memory ({error!r})"[:300], remedy="free host memory")
        text = (str(error) if isinstance(error, UserError) else "") or repr(error)
        return cls(text, is_transient=False, remedy="")


class RankFailed(Exception):
    """Raised on rank 0: another rank has failed, so its files will not come."""

    def __init__(self, problem: SaveProblem) -> None:
        self.problem = problem


class RankReports:
    """The ranks' reports of one transfer, whose unique `name` is the same on all ranks.

    By default they go through the process group's store, or, with one rank, its own store.
    """

    def __init__(self, name: str, rank: int, num_ranks: int, store: Store | None = None) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        if store is None:
            store = distributed_c10d._get_default_store() if num_ranks > 1 else HashStore()
        self._store = PrefixStore(f"save/{name}", store)

    def post(self, report: Mapping[str, Any], pieces: Mapping[str, Any]) -> None:
        """Report what this rank has written; does not wait for rank 0."""
        content = encoded(report, pieces)
        # Declared for str; bytes work too.
        self._store.set(str(self.rank), cast("str", content))
        self._store.add("count", 1)

    def post_failure(self, problem: SaveProblem) -> None:
        """Report that this rank has failed. On rank 0, which would read it, do nothing."""
        if self.rank:
            problem = replace(problem, text=f"rank {self.rank}: {problem.text}")
            # A RuntimeError means that rank 0 is gone, which the next collective reports.
            with contextlib.suppress(RuntimeError):
                self._store.set(FAILURE, json_text(asdict(problem)))

    def collect(self, while_waiting: Callable[[], None]) -> list[Report]:
        """Wait for all reports and return them in rank order. For rank 0 alone.

        Raises RankFailed as soon as a rank posts a failure, and what `while_waiting` raises.
        """
        while self._store.add("count", 0) < self.num_ranks:
            while_waiting()
            if self._store.check([FAILURE]):
                raise RankFailed(from_json(SaveProblem, self._store.get(FAILURE)))
            time.sleep(REPORTS_POLL_SECONDS)
        return decoded(self._store.multi_get([str(rank) for rank in range(self.num_ranks)]))

    def clear(self) -> None:
        """Remove the reports from the store, with one request for each. For rank 0 alone."""
        for name in (*map(str, range(self.num_ranks)), "count"):
            self._store.delete_key(name)


def encoded(report: Mapping[str, Any], pieces: Mapping[str, Any]) -> bytes:
    """Return a rank's message: compressed JSON of report and pieces, after the report's length."""
    head, tail = (
        zlib.compress(json_text(tree, sort_keys=True).encode(), level=1)
        for tree in (report, pieces)
    )
    return len(head).to_bytes(_LENGTH_BYTES, "little") + head + tail


def decoded(contents: Sequence[bytes]) -> list[Report]:
    """Return the reports with their `pieces`; equal pieces are parsed once and shared."""
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
    """A rank's part of a transfer, which `run` does in a thread.

    `_put` brings the rank's files to the destination and returns the report and its pieces. Rank 0
    then makes the checkpoint valid there by `_publish`.
    """

    def __init__(self, step: int, reports: RankReports) -> None:
        self.step, self._reports = step, reports
        self._written, self._ended = threading.Event(), threading.Event()
        self._canceled = threading.Event()
        # Set on rank 0 alone; other ranks learn the result by the loop's exchanges.
        self.is_published = False
        self._problem: SaveProblem | None = None

    @abstractmethod
    def _put(self) -> tuple[Report, Mapping[str, Any]]: ...

    @abstractmethod
    def _publish(self, reports: list[Report]) -> None: ...

    def run(self) -> None:
        try:
            # Post only when all files are there: rank 0 publishes once it has all reports.
            self._reports.post(*self._put())
            self._written.set()
            if self._reports.rank == 0:
                self._publish(self._reports.collect(self.check))
                self.is_published = True
                self._reports.clear()
        # Do not raise in the thread. The loop reads `problem` and tells it to all ranks, which then
        # give up the save together.
        except Exception as error:
            self._problem = SaveProblem.of(error)
            self._reports.post_failure(self._problem)
        finally:
            self._end()

    def _end(self) -> None:
        """Wake the threads that wait, also after an error."""
        self._written.set()
        self._ended.set()

    @property
    def is_ended(self) -> bool:
        return self._ended.is_set()

    @property
    def problem(self) -> SaveProblem | None:
        """Why this rank has failed so far, or, on rank 0, any rank; None if none has."""
        return self._problem

    def wait(self) -> SaveProblem | None:
        """Wait until this rank's files are written, on rank 0 published; return any problem."""
        (self._written if self._reports.rank else self._ended).wait()
        return None if self.is_published else self._problem

    def stop(self) -> None:
        """Request the end of the transfer: it writes and publishes nothing more."""
        self._canceled.set()

    def cancel(self) -> None:
        """Request the end of the transfer and wait for it."""
        self.stop()
        self._ended.wait()

    def check(self) -> None:
        """Raise SaveCanceled if the end was requested."""
        if self._canceled.is_set():
            raise SaveCanceled
