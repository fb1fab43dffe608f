"""What each rank reports of its files to rank 0, once they are on disk: over the network.

The threads of a save use no collectives, and to look for files of thousands of ranks is slow: a
network file system answers for a minute from its cache that a name does not exist. So reports go
through the store where the ranks met. Rank 0 asks it how many there are, then takes all at once.
The same store tells the ranks of a node what each of them writes into their file.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]

from pretrain.distributed.world import World

POLL_SECONDS = 0.02
LONGEST_POLL_SECONDS = 1.0  # of a rank among thousands that ask rank 0's store
_LENGTH_BYTES = 8
Report = dict[str, Any]


class RankReports:
    """The reports of one save, which all ranks give the same `name`, unlike that of any other."""

    def __init__(self, name: str, world: World, store: Store | None = None) -> None:
        """`store` is by default that of the ranks' process group."""
        self._world = world
        self._own: bytes | None = None
        self._store: Store | None = None
        if world.world_size > 1:
            assert store is not None or dist.is_initialized()
            store = store or distributed_c10d._get_default_store()
            self._store = PrefixStore(f"save/{name}", store)

    def post(self, report: Mapping[str, Any], pieces: Mapping[str, Any]) -> None:
        """Report what this rank has written; does not wait for rank 0."""
        content = encoded(report, pieces)
        if self._store is None:
            self._own = content
            return
        self._store.set(str(self._world.rank), cast("str", content))  # bytes are as good
        self._store.add("count", 1)

    def post_header(self, header: bytes, ranks: Sequence[int]) -> None:
        """Tell the `ranks`, this one and others, what this one writes into the file of all."""
        assert self._store is not None
        self._store.set(f"header/{self._world.rank}", cast("str", zlib.compress(header, level=1)))
        self._store.add(f"headers/{ranks[0]}", 1)

    def headers(self, ranks: Sequence[int], while_waiting: Callable[[], None]) -> dict[int, bytes]:
        """Return what each of the `ranks` has posted; `while_waiting` may raise."""
        assert self._store is not None
        pause = POLL_SECONDS
        while self._store.add(f"headers/{ranks[0]}", 0) < len(ranks):
            while_waiting()
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_POLL_SECONDS)
        names = [f"header/{rank}" for rank in ranks]
        found = map(zlib.decompress, self._store.multi_get(names))
        if self._store.add(f"read/{ranks[0]}", 1) == len(ranks):
            for name in (*names, f"headers/{ranks[0]}", f"read/{ranks[0]}"):
                self._store.delete_key(name)
        return dict(zip(ranks, found, strict=True))

    def collect(self, while_waiting: Callable[[], None]) -> list[Report]:
        """Return the reports of all ranks, in their order (rank 0); `while_waiting` may raise."""
        if self._store is None:
            assert self._own is not None, "collect() before post()"
            return decoded([self._own])
        num_ranks = self._world.world_size
        while self._store.add("count", 0) < num_ranks:
            while_waiting()
            time.sleep(POLL_SECONDS)
        return decoded(self._store.multi_get([str(rank) for rank in range(num_ranks)]))

    def clear(self) -> None:
        """Remove from the store what has been collected: a request for each rank (rank 0)."""
        if self._store is not None:
            for name in (*map(str, range(self._world.world_size)), "count"):
                self._store.delete_key(name)


def encoded(report: Mapping[str, Any], pieces: Mapping[str, Any]) -> bytes:
    """Return a rank's message: report and pieces as JSON, compressed, after the report's length."""
    own, others = (
        zlib.compress(json.dumps(each, sort_keys=True).encode(), level=1)
        for each in (report, pieces)
    )
    return len(own).to_bytes(_LENGTH_BYTES, "little") + own + others


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
