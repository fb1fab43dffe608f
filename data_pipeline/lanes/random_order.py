"""Random orders that are equal on every machine and with every version of numpy.

numpy guarantees no such thing for its own permutations, and a run may outlive a version.

`permutation` is a Feistel network: integer arithmetic that maps an index one-to-one, so the order
of 61,000 shards takes a few milliseconds and no random-number state. Values that leave the range
are mapped again until they are inside it (cycle walking), which keeps the map one-to-one.
`sort_order` ranks items by a hash, for lists short enough to sort: the documents of a shard.
The hash is the finalizer of SplitMix64 (Steele, Lea and Flood 2014).
"""

import hashlib

import numpy as np

FEISTEL_ROUNDS = 6
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def key_of(*parts: int | str) -> int:
    """Return a 64-bit key for a purpose, such as `key_of(seed, "units", epoch)`."""
    # repr of numpy's integers differs between numpy's versions, so make them plain ones.
    plain = tuple(part if isinstance(part, str) else int(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(repr(plain).encode(), digest_size=8).digest(), "little")


def mix64(values: np.ndarray) -> np.ndarray:
    """Scramble uint64 values one-to-one; every input bit affects every output bit."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def sort_order(count: int, key: int) -> np.ndarray:
    """Return a permutation of range(count), items sorted by their hash: int64 [count]."""
    items = np.arange(count, dtype=np.uint64)
    low_bits = np.uint64((1 << max(count - 1, 1).bit_length()) - 1)
    hashes = mix64(((items + np.uint64(1)) * GOLDEN) ^ np.uint64(key))
    # The item replaces the low bits of its hash. So no two values are equal, every sort gives the
    # same order, and a plain sort of values, several times faster than argsort, is enough.
    return (np.sort((hashes & ~low_bits) | items) & low_bits).astype(np.int64)


def permutation(count: int, key: int) -> np.ndarray:
    """Return a permutation of range(count): int64 [count]."""
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    values = _feistel(np.arange(count, dtype=np.uint64), key, half_bits)
    # The network permutes 2**(2 * half_bits) values, at most 4 * count: map those outside again.
    outside = np.flatnonzero(values >= count)
    while len(outside):
        values[outside] = _feistel(values[outside], key, half_bits)
        outside = outside[values[outside] >= count]
    return values.astype(np.int64)


def _feistel(values: np.ndarray, key: int, half_bits: int) -> np.ndarray:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for round_number in range(FEISTEL_ROUNDS):
        round_key = np.uint64(key_of(key, round_number))
        left, right = right, left ^ (mix64(right ^ round_key) & mask)
    return (left << shift) | right
