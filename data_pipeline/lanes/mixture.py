"""Several corpora read as one: the shards of all are the units of one lane plan, each so many times per epoch.

P corpora (parts), U units: the shards of the first part, then those of the second, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np

from data_pipeline.corpora.cache_config import CacheConfig
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.manifest import TOKENIZER_DIRECTORY, Manifest
from data_pipeline.corpora.remote_corpus import local_corpus_directory
from data_pipeline.errors import ConfigError, DataError
from data_pipeline.lanes.lane_plan import LanePlan
from data_pipeline.lanes.mixture_part import MixturePart
from data_pipeline.lanes.permutation import key_of, permutation
from data_pipeline.lanes.segment_batch import LaneCursor
from data_pipeline.shards.shards import ShardReader
from data_pipeline.tokenizer import Tokenizer

FINEST_REPEAT = 10_000  # repeats are rounded to multiples of 1/10,000 at the finest


class Mixture:
    """The training splits of several corpora, in the place of one `Corpus` wherever lanes are planned and read."""

    def __init__(self, corpora: Sequence[Corpus], repeats: Sequence[Fraction]) -> None:
        """ConfigError or DataError when the corpora cannot be mixed."""
        assert len(corpora) == len(repeats) > 0
        _check_tokenizers(corpora)
        self.corpora = list(corpora)
        self.repeats = list(repeats)
        self.first_units = np.cumsum(
            [0] + [len(corpus.manifest.shards) for corpus in corpora]
        )  # [P + 1]
        shards = tuple(
            replace(shard, path=str(corpus.directory / shard.path))
            for corpus in corpora
            for shard in corpus.manifest.shards
        )
        self.manifest: Manifest = replace(corpora[0].manifest, shards=shards)

    @property
    def identity(self) -> str:
        """Changes with the tokens of any part and with its repeats; not with the place where a part lies."""
        parts = zip(self.repeats, self.corpora, strict=True)
        return " + ".join(f"{repeat} x {corpus.identity}" for repeat, corpus in parts)

    @property
    def tokenizer_directory(self) -> Path:
        return self.corpora[0].tokenizer_directory

    def shard(self, unit: int) -> ShardReader:
        """Unit `unit`, opened and checked by the corpus it belongs to."""
        part = self.part_of(unit)
        return self.corpora[part].shard(unit - int(self.first_units[part]))

    def document_lengths(self, unit: int) -> np.ndarray:
        """Tokens of each document of a unit, in the order in which they are stored."""
        return self.shard(unit).lengths

    def prefetch(self, units: Iterable[int]) -> None:
        """Say which units are read soon, so that remote ones are there in time."""
        for unit in units:
            part = self.part_of(unit)
            self.corpora[part].prefetch([unit - int(self.first_units[part])])

    def check_room(self, num_shards: int) -> None:
        """DataError unless so many shards can be open at once."""
        for corpus in self.corpora:
            corpus.check_room(num_shards)

    def part_of(self, unit: int) -> int:
        """The corpus that a unit belongs to."""
        return int(np.searchsorted(self.first_units, unit, "right")) - 1

    def units_at(self, epoch: int, seed: int) -> np.ndarray:
        """The units of an epoch, each as often as it is read there, in the order of storage."""
        copies = [
            _copies_at(epoch, repeat, len(corpus.manifest.shards), key_of(seed, "repeats", part))
            for part, (repeat, corpus) in enumerate(zip(self.repeats, self.corpora, strict=True))
        ]
        return np.repeat(np.arange(self.first_units[-1]), np.concatenate(copies))


def open_mixture(
    parts: Sequence[MixturePart], split: str = "train", cache: CacheConfig | None = None
) -> Mixture:
    """The mixture of the corpora that `parts` name; weights become repeats, the least of which is one."""
    if len({bool(part.weight) for part in parts}) > 1:
        raise ConfigError(
            "some parts of the mixture have a weight and some have none; give all of them one, or none"
        )
    corpora = [
        Corpus.open(local_corpus_directory(part.path, cache or CacheConfig()) / split)
        for part in parts
    ]
    if not parts[0].weight:
        return Mixture(corpora, exact_repeats([part.repeat or 1.0 for part in parts]))
    return Mixture(corpora, repeats_of_weights(corpora, [part.weight for part in parts]))


def open_training_data(
    path: Path, parts: Sequence[MixturePart], cache: CacheConfig | None = None
) -> Corpus | Mixture:
    """What a run trains on: the corpus at `path`, or the mixture, which must share the tokenizer of `path`."""
    path = local_corpus_directory(path, cache or CacheConfig())
    if not parts:
        return Corpus.open(path / "train")
    mixture = open_mixture(parts, cache=cache)
    directory = path / TOKENIZER_DIRECTORY
    if (found := Tokenizer.load(directory).fingerprint) != mixture.manifest.tokenizer:
        raise DataError(
            f"the mixture was made with the tokenizer {mixture.manifest.tokenizer[:16]}, {directory} is {found[:16]}; "
            "let data.path be the corpus whose tokenizer the mixture has: validation and generation use it"
        )
    return mixture


def tokens_of_parts(data: Corpus | Mixture, plan: LanePlan, cursor: LaneCursor) -> list[int]:
    """How many tokens of each part the cursor's lanes have read since the run began: arithmetic, nothing is read."""
    first_units = (
        data.first_units if isinstance(data, Mixture) else np.array([0, len(data.manifest.shards)])
    )
    totals = np.zeros(len(first_units) - 1, np.int64)
    for epoch in range(int(cursor.epochs_B.max()) + 1):
        units, begins = plan.epoch_order(epoch)
        lengths_U, parts_U = np.diff(begins), np.searchsorted(first_units, units, "right") - 1
        for lane, last, position in zip(
            cursor.lanes, cursor.epochs_B, cursor.positions_B, strict=True
        ):
            if last < epoch:
                continue
            begin = plan.lane_begin(epoch, lane)
            end = begin + int(position) if last == epoch else plan.lane_begin(epoch, lane + 1)
            read_U = np.clip(
                np.minimum(begins[1:], end) - np.maximum(begins[:-1], begin), 0, lengths_U
            )
            totals += np.bincount(parts_U, weights=read_U, minlength=len(totals)).astype(np.int64)
    return totals.tolist()


def _copies_at(epoch: int, repeat: Fraction, num_units: int, key: int) -> np.ndarray:
    """How often each unit is read in an epoch. After e epochs each was read e * repeat times, rounded up or down.

    Every unit has a phase of its own, evenly spread, so that the epochs are of one size but for one unit.
    """
    phases = permutation(num_units, key)
    before, after = (
        (repeat.numerator * epochs * num_units + phases * repeat.denominator)
        // (repeat.denominator * num_units)
        for epochs in (epoch, epoch + 1)
    )
    return after - before


def repeats_of_weights(corpora: Sequence[Corpus], weights: Sequence[float]) -> list[Fraction]:
    """Repeats that give the corpora these shares of the tokens; the least is one. ConfigError for a weight of none."""
    if min(weights) <= 0:
        raise ConfigError(f"found a weight of {min(weights):g}, expected positive ones")
    passes = [weight / corpus.num_tokens for weight, corpus in zip(weights, corpora, strict=True)]
    return exact_repeats([count / min(passes) for count in passes])


def exact_repeats(repeats: Sequence[float]) -> list[Fraction]:
    """Repeats as plans use them; ConfigError when one is none."""
    return [_exact(repeat) for repeat in repeats]


def _exact(repeat: float) -> Fraction:
    exact = (
        Fraction(repeat).limit_denominator(FINEST_REPEAT) if math.isfinite(repeat) else Fraction(0)
    )
    if exact <= 0:
        raise ConfigError(
            f"a repeat of {repeat:g} is none or too small; use at least {1 / FINEST_REPEAT:g}"
        )
    return exact


def _check_tokenizers(corpora: Sequence[Corpus]) -> None:
    first = corpora[0]
    for other in corpora[1:]:
        if other.manifest.tokenizer != first.manifest.tokenizer:
            raise DataError(
                f"{other.directory} was made with the tokenizer {other.manifest.tokenizer[:16]}, {first.directory} "
                f"with {first.manifest.tokenizer[:16]}; build one of them again with `--tokenizer` of the other"
            )
