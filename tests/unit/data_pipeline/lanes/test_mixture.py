import shutil
import tempfile
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from data_pipeline.cli import main
from data_pipeline.config import CacheConfig, MixturePart
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.corpus_identity import corpus_hash
from data_pipeline.lanes.lane_stream import LaneStream
from data_pipeline.lanes.mixture import Mixture, open_mixture, open_training_data, plan_of
from foundation.errors import ConfigError, DataError
from pretrain.config.run import DataConfig
from tests.helpers.corpora import make_tiny_corpus, write_numbered_corpus
from tests.unit.data_pipeline.lanes.test_lane_properties import Session, read_in_sessions

NUM_LANES = 4
SEED = 5
SHARDS = st.lists(st.lists(st.integers(1, 25), min_size=2, max_size=12), min_size=2, max_size=6)


def mixture_in(directory: str, drawn: list[tuple[list[list[int]], Fraction]]) -> Mixture:
    """Corpora whose tokens are 0, 1, 2, ... each; documents differ in length between them."""
    root = Path(directory)
    corpora = [write_numbered_corpus(root / str(n), shards) for n, (shards, _) in enumerate(drawn)]
    return Mixture(corpora, [repeat for _, repeat in drawn])


def epoch_documents(mixture: Mixture, epoch: int) -> Counter:
    """(unit, document) -> how often it is read in an epoch, from the units alone."""
    sizes = ((u, len(mixture.document_lengths(u))) for u in mixture.units_at(epoch, SEED).tolist())
    return Counter((unit, index) for unit, size in sizes for index in range(size))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    drawn=st.lists(
        st.tuples(
            SHARDS, st.sampled_from([Fraction(1, 2), Fraction(1), Fraction(5, 2), Fraction(3)])
        ),
        min_size=1,
        max_size=3,
    ),
    segment_length=st.integers(1, 17),
    sessions=st.lists(
        st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 60)), min_size=2, max_size=4
    ),
)
def test_interrupted_mixtures_read_each_copy_once_in_its_lane(drawn, segment_length, sessions):
    with tempfile.TemporaryDirectory() as directory:
        mixture = mixture_in(directory, drawn)
        plan = plan_of(mixture, NUM_LANES, SEED)
        assume(plan.num_tokens // NUM_LANES >= mixture.manifest.longest_whole)
        parts = [Session(ranks, steps, 2, segment_length, False) for ranks, steps in sessions]
        read, cursor = read_in_sessions(mixture, NUM_LANES, SEED, parts)
        again = LaneStream(mixture, NUM_LANES, SEED, segment_length, range(NUM_LANES), cursor)
        assert sum(again.tokens_read(cursor).values()) == sum(map(len, read))
        for lane in range(NUM_LANES):
            assert read[lane] == expected_lane(mixture, lane, len(read[lane]))


def expected_lane(mixture: Mixture, lane: int, count: int) -> list[int]:
    """The lane's first tokens, by document; checks that an epoch's lanes hold all documents."""
    tokens: list[int] = []
    for epoch in range(1000):
        if len(tokens) >= count:
            return tokens[:count]
        plan = plan_of(mixture, NUM_LANES, SEED)
        documents = Counter()
        for other in range(NUM_LANES):
            length = plan.lane_length(epoch, other)
            for run in plan.walk(other, epoch).take(length) if length else []:
                assert run.epoch == epoch
                reader = mixture.shard(run.unit)
                assert not run.offsets.any()
                assert (run.lengths == reader.lengths[run.documents]).all(), "documents are whole"
                documents.update((run.unit, index) for index in run.documents.tolist())
                if other == lane:
                    for index in run.documents.tolist():
                        tokens += reader.tokens(index).tolist()
        assert documents == epoch_documents(mixture, epoch)
    raise AssertionError("the lane is empty")


@given(
    drawn=st.lists(
        st.tuples(st.integers(1, 9), st.fractions(Fraction(1, 9), 4, max_denominator=9)),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=20, deadline=None)
def test_after_some_epochs_a_shard_was_read_repeat_times_up_to_rounding(drawn):
    with tempfile.TemporaryDirectory() as directory:
        mixture = mixture_in(directory, [([[3]] * shards, repeat) for shards, repeat in drawn])
        counts = np.zeros(mixture.first_units[-1], int)
        for epochs in range(1, 12):
            counts += np.bincount(mixture.units_at(epochs - 1, SEED), minlength=len(counts))
            for part, (_, repeat) in enumerate(drawn):
                of_part = counts[mixture.first_units[part] : mixture.first_units[part + 1]]
                assert (abs(of_part - repeat * epochs) < 1).all()


def test_the_mixture_of_one_corpus_read_once_is_that_corpus(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 40, (6, 30))
    corpus = write_numbered_corpus(tmp_path, lengths.tolist())
    alone = LaneStream(corpus, 4, SEED, 16, range(4))
    mixed = LaneStream(Mixture([corpus], [Fraction(1)]), 4, SEED, 16, range(4))
    for _ in range(100):
        assert np.array_equal(next(alone).tokens_BL, next(mixed).tokens_BL)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("corpora")
    return make_tiny_corpus(root / "a", seed=1), make_tiny_corpus(root / "b", seed=2, documents=20)


def test_weights_are_proportions_of_the_tokens(corpora):
    a, b = corpora
    mixture = open_mixture([MixturePart(path=a, weight=3), MixturePart(path=b, weight=1)])
    stream = LaneStream(mixture, 4, SEED, 16, range(4))
    batch = next(stream)
    for _ in range(6 * Corpus.open(a / "train").num_tokens // 64):
        batch = next(stream)
    first, second = stream.tokens_read(batch.cursor).values()
    assert first / (first + second) == pytest.approx(0.75, abs=0.03)


def test_a_changed_part_is_rejected_with_both_hashes(corpora, tmp_path):
    parts = [MixturePart(path=corpora[0]), MixturePart(path=corpora[1], repeat=2.5)]
    cursor = next(LaneStream(open_mixture(parts), 4, SEED, 16, range(4))).cursor
    other = make_tiny_corpus(tmp_path / "b", seed=3, documents=20)
    hashes = [Corpus.open(path / "train").manifest.hash for path in (corpora[1], other)]
    changed = open_mixture([parts[0], MixturePart(path=other, repeat=2.5)])
    with pytest.raises(DataError, match=f"{hashes[0]}, .*{hashes[1]}"):
        LaneStream(changed, 4, SEED, 16, range(4), cursor)


def test_a_pinned_corpus_with_another_validation_split_is_refused(corpora, tmp_path, capsys):
    """The same training split, tokenizer and sizes: everything is consistent, but not ours."""
    first, other = corpora
    assert main(["inspect", str(first)]) == 0
    pin = capsys.readouterr().out.split("manifest_hash")[1].split()[0]
    assert pin == corpus_hash(first)
    forged = tmp_path / "forged"
    shutil.copytree(first, forged)
    shutil.rmtree(forged / "validation")
    shutil.copytree(other / "validation", forged / "validation")
    cache = CacheConfig(directory=tmp_path / "cache")
    for path, is_ours in ((first, True), (forged, False)):
        for open_it in (
            lambda path=path: open_training_data(path, (), cache, [pin]),
            lambda path=path: open_training_data(first, [MixturePart(path=path)], cache, [pin]),
            lambda path=path: DataConfig(path=path, manifest_hashes=(pin,)).directory(),
        ):
            if is_ours:
                assert open_it()
                continue
            with pytest.raises(DataError):
                open_it()
    with pytest.raises(ConfigError, match="manifest_hashes"):
        DataConfig(path=first, manifest_hashes=("abc",))


def test_corpora_that_cannot_be_mixed_are_rejected(corpora, tmp_path):
    a, b = corpora
    unigram = make_tiny_corpus(tmp_path / "u", vocabulary="unigram")
    for error, mix in (
        (ConfigError, lambda: MixturePart(path=a, repeat=1, weight=1)),
        (ConfigError, lambda: open_mixture([MixturePart(path=a, weight=1), MixturePart(path=b)])),
        (ConfigError, lambda: open_mixture([MixturePart(path=a, repeat=1e-9)])),
        (DataError, lambda: open_mixture([MixturePart(path=a), MixturePart(path=unigram)])),
        (DataError, lambda: open_training_data(unigram, [MixturePart(path=a)])),
    ):
        with pytest.raises(error):
            mix()
