"""Random orders that are the same on every machine and with every version of numpy, which numpy's own are not.

Two tools, both keyed: `permutation` is a Feistel network walked until it lands inside the range, so that position and
element are found from each other without a table; `sort_order` ranks items by a hash, for lists short enough to sort.
The hash is the finaliser of SplitMix64 (Steele, Lea and Flood 2014).
"""

from __future__ import annotations

import hashlib

import numpy as np

FEISTEL_ROUNDS = 6
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def key_of(*parts: int | str) -> int:
    """A 64-bit key for a purpose, such as `key_of(seed, "units", epoch)`; other parts give an unrelated key."""
    plain = tuple(
        part if isinstance(part, str) else int(part) for part in parts
    )  # numpy's integers print otherwise
    return int.from_bytes(hashlib.blake2b(repr(plain).encode(), digest_size=8).digest(), "little")


def mix64(values: np.ndarray) -> np.ndarray:
    """A one-to-one scramble of uint64 values in which every input bit moves every output bit."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def sort_order(count: int, key: int) -> np.ndarray:
    """A permutation of range(count), sorted by hashes whose low bits give way to the item: int64 [count]."""
    items = np.arange(count, dtype=np.uint64)
    low_bits = np.uint64((1 << max(count - 1, 1).bit_length()) - 1)
    hashes = mix64(((items + np.uint64(1)) * GOLDEN) ^ np.uint64(key))
    # No two are equal, so every way of sorting gives the same order, and the plain sort is several times the fastest.
    return (np.sort((hashes & ~low_bits) | items) & low_bits).astype(np.int64)


def permutation(count: int, key: int) -> np.ndarray:
    """A permutation of range(count): int64 [count]."""
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    places = _feistel(np.arange(count, dtype=np.uint64), key, half_bits)
    outside = np.flatnonzero(places >= count)
    while len(
        outside
    ):  # the network permutes up to 4 * count values: those that left the range walk on
        places[outside] = _feistel(places[outside], key, half_bits)
        outside = outside[places[outside] >= count]
    return places.astype(np.int64)


def _feistel(values: np.ndarray, key: int, half_bits: int) -> np.ndarray:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for round_number in range(FEISTEL_ROUNDS):
        round_key = np.uint64(key_of(key, round_number))
        left, right = right, left ^ (mix64(right ^ round_key) & mask)
    return (left << shift) | right
