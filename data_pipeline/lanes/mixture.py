"""Several corpora read as one: their shards are the units of one lane plan, repeated as configured.

P corpora (parts), U units: the shards of the first part, then of the second, and so on.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np

from data_pipeline.config import CacheConfig, MixturePart
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.corpus_identity import pinned_directory, tokenizer_of
from data_pipeline.corpora.manifest import TOKENIZER_DIRECTORY, Manifest
from data_pipeline.lanes.lane_plan import LanePlan
from data_pipeline.lanes.random_order import key_of, permutation
from data_pipeline.lanes.segment_batch import LaneCursor
from data_pipeline.shards.shards import ShardReader
from foundation.errors import ConfigError, DataError, named_setting

FINEST_REPEAT = 10_000  # repeats are rounded to fractions with at most this denominator


class Mixture:
    """The training splits of several corpora, which lanes read like one `Corpus`."""

    def __init__(self, corpora: Sequence[Corpus], repeats: Sequence[Fraction]) -> None:
        """ConfigError or DataError if the corpora cannot be mixed."""
        assert len(corpora) == len(repeats) > 0
        _check_mixable(corpora)
        self.corpora = list(corpora)
        self.repeats = list(repeats)
        num_shards = [len(corpus.manifest.shards) for corpus in corpora]
        self.first_units = np.cumsum([0, *num_shards])  # [P + 1]
        shards = tuple(
            replace(shard, path=f"{corpus.directory}/{shard.path}")
            for corpus in corpora
            for shard in corpus.manifest.shards
        )
        self.manifest: Manifest = replace(corpora[0].manifest, shards=shards)

    @property
    def identity(self) -> str:
        """What a run's state records of its data: the repeats and hashes of all parts."""
        parts = zip(self.repeats, self.corpora, strict=True)
        return " + ".join(f"{repeat} x {corpus.identity}" for repeat, corpus in parts)

    @property
    def tokenizer_directory(self) -> Path:
        return self.corpora[0].tokenizer_directory

    def shard(self, unit: int) -> ShardReader:
        """Open and check a unit."""
        part = self.part_of(unit)
        return self.corpora[part].shard(unit - int(self.first_units[part]))

    def document_lengths(self, unit: int) -> np.ndarray:
        """Return the tokens of each document of a unit, in the order of storage."""
        part = self.part_of(unit)
        return self.corpora[part].document_lengths(unit - int(self.first_units[part]))

    def prefetch_lengths(self, units: Iterable[int]) -> None:
        """Start to fetch the lengths of the documents of remote units."""
        for unit in units:
            part = self.part_of(unit)
            self.corpora[part].prefetch_lengths([unit - int(self.first_units[part])])

    def prefetch(self, units: Iterable[int]) -> None:
        """Start to fetch remote units that are read soon."""
        for unit in units:
            part = self.part_of(unit)
            self.corpora[part].prefetch([unit - int(self.first_units[part])])

    def check_capacity(self, num_shards: int) -> None:
        """Raise DataError unless that many shards can be open at the same time."""
        for corpus in self.corpora:
            corpus.check_capacity(num_shards)

    def part_of(self, unit: int) -> int:
        """Return the index of the corpus that a unit belongs to."""
        return int(np.searchsorted(self.first_units, unit, "right")) - 1

    def units_at(self, epoch: int, seed: int) -> np.ndarray:
        """Return the units of an epoch, each as often as it is read, in the order of storage."""
        copies = [
            _copies_at(epoch, repeat, len(corpus.manifest.shards), key_of(seed, "repeats", part))
            for part, (repeat, corpus) in enumerate(zip(self.repeats, self.corpora, strict=True))
        ]
        return np.repeat(np.arange(self.first_units[-1]), np.concatenate(copies))


def plan_of(data: Corpus | Mixture, num_lanes: int, seed: int) -> LanePlan:
    """Return the lane plan whose units are the shards of a corpus, or of all parts of a mixture."""
    unit_tokens = [shard.tokens for shard in data.manifest.shards]
    units_at = partial(data.units_at, seed=seed) if isinstance(data, Mixture) else None
    is_stream = data.manifest.is_stream
    return LanePlan(unit_tokens, num_lanes, seed, data.document_lengths, units_at, is_stream)


def open_mixture(
    parts: Sequence[MixturePart],
    split: str = "train",
    cache: CacheConfig | None = None,
    hashes: Sequence[str] = (),
    setting: str = "data.mixture",
) -> Mixture:
    """Open the corpora of `parts`. Weights become repeats; the smallest repeat is one.

    DataError if there are `hashes` and a corpus has none of them. Errors name the `setting`.
    """
    if len({bool(part.weight) for part in parts}) > 1:
        raise ConfigError(
            f"{setting}: some parts have a weight and some have none; give all of them one, or none"
        )
    cache = cache or CacheConfig()
    corpora = []
    for number, part in enumerate(parts):
        with named_setting(f"{setting}.{number}.path"):
            directory = pinned_directory(part.path, cache, hashes)
            corpora.append(Corpus.open(directory / split, cache=cache))
    with named_setting(setting):
        if not parts[0].weight:
            return Mixture(corpora, exact_repeats([part.repeat or 1.0 for part in parts]))
        return Mixture(corpora, repeats_of_weights(corpora, [part.weight for part in parts]))


def open_training_data(
    path: Path,
    parts: Sequence[MixturePart],
    cache: CacheConfig | None = None,
    hashes: Sequence[str] = (),
    setting: str = "data.mixture",
) -> Corpus | Mixture:
    """Open the corpus at `path`, or the mixture, which must share the tokenizer of `path`.

    DataError if there are `hashes` and a corpus has none of them. `setting` names the mixture in
    errors.
    """
    cache = cache or CacheConfig()
    with named_setting("data.path"):
        path = pinned_directory(path, cache, hashes)
        if not parts:
            return Corpus.open(path / "train", cache=cache)
    mixture = open_mixture(parts, cache=cache, hashes=hashes, setting=setting)
    with named_setting("data.path"):
        fingerprint = tokenizer_of(path).fingerprint
    if fingerprint != mixture.manifest.tokenizer:
        raise DataError(
            f"{setting} was made with the tokenizer {mixture.manifest.tokenizer[:16]}, "
            f"{path / TOKENIZER_DIRECTORY} is {fingerprint[:16]}; set data.path to a corpus with "
            "the mixture's tokenizer: validation and generation use it"
        )
    return mixture


def tokens_of_parts(data: Corpus | Mixture, plan: LanePlan, cursor: LaneCursor) -> list[int]:
    """Return the tokens of each part that the cursor's lanes have read since they started.

    They follow from the plan and the cursor, so interruptions cannot make them wrong.
    """
    num_units = len(data.manifest.shards)
    first_units = data.first_units if isinstance(data, Mixture) else np.array([0, num_units])
    totals = np.zeros(len(first_units) - 1, np.int64)
    for epoch in range(int(cursor.epochs_B.max()) + 1):
        units, offsets = plan.epoch_order(epoch)
        lengths_U, parts_U = np.diff(offsets), np.searchsorted(first_units, units, "right") - 1
        for lane, current, position in zip(
            cursor.lanes, cursor.epochs_B, cursor.positions_B, strict=True
        ):
            if current < epoch:
                continue
            start = plan.lane_start(epoch, lane)
            is_current = current == epoch
            end = start + int(position) if is_current else plan.lane_start(epoch, lane + 1)
            overlap_U = np.minimum(offsets[1:], end) - np.maximum(offsets[:-1], start)
            read_U = np.clip(overlap_U, 0, lengths_U)
            totals += np.bincount(parts_U, weights=read_U, minlength=len(totals)).astype(np.int64)
    return totals.tolist()


def _copies_at(epoch: int, repeat: Fraction, num_units: int, key: int) -> np.ndarray:
    """Return how often each unit is read in an epoch: int64 [num_units].

    After e epochs, unit u has been read floor(e * repeat + phase_u) times. The phases are a random
    permutation of 0, 1/n, 2/n, ..., so a different part of the units rounds up in each epoch, and
    the sizes of epochs differ by at most one unit. Integer arithmetic keeps this exact.
    """
    phases = permutation(num_units, key)
    before, after = (
        (repeat.numerator * epochs * num_units + phases * repeat.denominator)
        // (repeat.denominator * num_units)
        for epochs in (epoch, epoch + 1)
    )
    return after - before


def repeats_of_weights(corpora: Sequence[Corpus], weights: Sequence[float]) -> list[Fraction]:
    """Return repeats that give the corpora tokens in these proportions; the smallest is one."""
    if min(weights) <= 0:
        raise ConfigError(f"found a weight of {min(weights):g}, expected positive ones")
    passes = [weight / corpus.num_tokens for weight, corpus in zip(weights, corpora, strict=True)]
    return exact_repeats([count / min(passes) for count in passes])


def exact_repeats(repeats: Sequence[float]) -> list[Fraction]:
    """Return repeats as the fractions of lane plans; ConfigError unless all are positive."""
    exact = []
    for repeat in repeats:
        fraction = Fraction(repeat) if math.isfinite(repeat) else Fraction(0)
        exact.append(fraction.limit_denominator(FINEST_REPEAT))
        if exact[-1] <= 0:
            raise ConfigError(
                f"a repeat of {repeat:g} is not positive or too small; "
                f"use at least {1 / FINEST_REPEAT:g}"
            )
    return exact


def _check_mixable(corpora: Sequence[Corpus]) -> None:
    first = corpora[0]
    for corpus in corpora:
        if corpus.manifest.is_stream:
            raise ConfigError(
                f"{corpus.directory} is a stream, which lanes read in its order; mix corpora of "
                "documents, built with another format"
            )
    for other in corpora[1:]:
        if other.manifest.tokenizer != first.manifest.tokenizer:
            raise DataError(
                f"{other.directory} was made with the tokenizer {other.manifest.tokenizer[:16]}, "
                f"{first.directory} with {first.manifest.tokenizer[:16]}; "
                "build one of them again with tokenizer.path of the other"
            )
