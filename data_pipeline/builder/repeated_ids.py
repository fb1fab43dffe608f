"""Documents whose id another one has: how many, and the first.

Ids name documents in audits and where a loss spike has suspects. Equal ones harm no training, so
they are only counted. 8 bytes of host memory for each document, and as many again now and then.
"""

from __future__ import annotations

import hashlib

import numpy as np

BLOCK = 1 << 16  # documents


class RepeatedIds:
    """Counts ids that an earlier document of this build has, by 64 bits of a hash."""

    def __init__(self, block: int = BLOCK) -> None:
        self._block = block
        self._names: list[str] = []
        self._runs: list[np.ndarray] = []  # sorted hashes of earlier blocks, the largest first
        self._count = 0
        self._first = ""

    def add(self, name: str) -> None:
        """Take the next document's id."""
        self._names.append(name)
        if len(self._names) == self._block:
            self._end_block()

    @property
    def counts(self) -> dict[str, int | str]:
        """The number of such documents, and the id of the first: names of a build's result."""
        self._end_block()
        return {"repeated_ids": self._count, "first_repeated_id": self._first}

    def _end_block(self) -> None:
        hashes = np.array([_hash_of(name) for name in self._names], np.uint64)
        is_repeated = self._are_known(hashes)
        fresh, places = np.unique(hashes, return_index=True)  # their first places in the block
        is_repeated[np.setdiff1d(np.arange(len(hashes)), places)] = True
        if is_repeated.any():
            self._count += int(is_repeated.sum())
            self._first = self._first or self._names[int(is_repeated.argmax())]
        self._names = []
        self._runs.append(fresh)
        # Few runs to compare with: each is at least twice as long as the next.
        while len(self._runs) > 1 and len(self._runs[-2]) < 2 * len(self._runs[-1]):
            last = self._runs.pop()
            self._runs[-1] = np.union1d(self._runs[-1], last)

    def _are_known(self, hashes: np.ndarray) -> np.ndarray:
        known = np.zeros(len(hashes), bool)
        for run in filter(len, self._runs):
            places = np.minimum(np.searchsorted(run, hashes), len(run) - 1)
            known |= run[places] == hashes
        return known


def _hash_of(name: str) -> int:
    content = name.encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
