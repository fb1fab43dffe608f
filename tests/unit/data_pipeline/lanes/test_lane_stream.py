import itertools
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes import lane_stream
from data_pipeline.lanes.lane_stream import LaneStream
from data_pipeline.lanes.prefetcher import Prefetcher
from data_pipeline.lanes.segment_batch import LaneCursor
from foundation.errors import ConfigError, DataError
from tests.helpers.corpora import write_numbered_corpus
from tests.helpers.jobs import until

SEED = 5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    lengths = np.random.default_rng(0).integers(1, 40, (6, 30))
    return write_numbered_corpus(tmp_path_factory.mktemp("corpus"), lengths.tolist())


def test_the_cursor_belongs_to_its_batch_although_more_was_read(corpus):
    stream = LaneStream(corpus, 4, SEED, 8, range(4))
    batches = [next(stream) for _ in range(200)]
    for step in (0, 62, 63, 64, 65, 198):
        resumed = LaneStream(corpus, 4, SEED, 8, range(4), batches[step].cursor)
        assert np.array_equal(next(resumed).tokens_BL, batches[step + 1].tokens_BL)


def test_the_length_of_a_block_changes_no_batch_and_no_cursor(corpus, monkeypatch):
    def read() -> list[tuple[bytes, bytes, dict[str, object]]]:
        batches = itertools.islice(LaneStream(corpus, 3, SEED, 16, range(3)), 150)
        return [(b.tokens_BL.tobytes(), b.starts_BL.tobytes(), b.cursor.to_tree()) for b in batches]

    expected = read()
    assert expected[-1][2]["epochs"] != [0, 0, 0]
    for block_tokens in (16, 80):
        monkeypatch.setattr(lane_stream, "BLOCK_TOKENS", block_tokens)
        assert read() == expected


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"seed": 6}, "seed=6, .*5"),
        ({"num_lanes": 16}, "num_lanes=16, .*4"),
        ({"manifest_hash": "f00"}, "manifest_hash=f00"),
        ({"positions_B": np.array([8, 8, 9, 8])}, "lane 2 at epoch 0, position 9"),
        ({"checks_B": np.array([1, 2, 3, 4], np.uint64)}, "lane 0 .* 0000000000000001"),
        ({"positions_B": np.array([8, 8, 8, 10**6])}, "position 1000000|position 999992"),
    ],
)
def test_a_cursor_of_other_data_is_rejected_with_both_values(corpus, change, values):
    cursor = replace(next(LaneStream(corpus, 4, SEED, 8, range(4))).cursor, **change)
    with pytest.raises(DataError, match=values):
        LaneStream(corpus, 4, SEED, 8, range(4), cursor)


def test_changed_tokens_with_the_same_manifest_hash_are_detected_on_resume(corpus, tmp_path):
    cursor = next(LaneStream(corpus, 4, SEED, 8, range(4))).cursor
    lengths = [corpus.document_lengths(unit).tolist() for unit in range(6)]
    other = write_numbered_corpus(tmp_path, [lengths[1], lengths[0], *lengths[2:]])
    with pytest.raises(DataError, match="check"):
        LaneStream(other, 4, SEED, 8, range(4), replace(cursor, manifest_hash=other.manifest.hash))


def test_cursors_join_in_any_order_and_reject_gaps_and_other_runs(corpus):
    whole = next(LaneStream(corpus, 4, SEED, 8, range(4))).cursor
    parts = [next(LaneStream(corpus, 4, SEED, 8, range(i, i + 1))).cursor for i in (2, 0, 3, 1)]
    assert LaneCursor.join(parts) == whole
    assert whole.take(range(1, 3)) == LaneCursor.join([parts[0], parts[3]])
    with pytest.raises(DataError, match="0-0 and 2-2"):
        LaneCursor.join(parts[:2])
    with pytest.raises(DataError):
        LaneCursor.join([parts[1], replace(parts[3], seed=9)])
    with pytest.raises(DataError, match=r"2-2, .* 2-3"):
        parts[0].take(range(2, 4))


@pytest.mark.parametrize(
    "damage", [{"format": 99}, {"checks": ["zz"] * 4}, {"epochs": [0]}, {"positions": None}]
)
def test_a_corrupted_cursor_is_rejected(corpus, damage):
    tree = next(LaneStream(corpus, 4, SEED, 8, range(4))).cursor.to_tree()
    with pytest.raises(DataError, match="cursor"):
        LaneCursor.from_tree({**tree, **damage})


def test_lanes_outside_the_run_and_more_lanes_than_documents_are_rejected(corpus):
    with pytest.raises(ConfigError):
        LaneStream(corpus, 4, SEED, 8, range(4, 5))
    with pytest.raises(DataError, match="500"):
        LaneStream(corpus, 500, SEED, 8, range(500))


def test_host_memory_for_reading_does_not_grow_with_the_corpus(tmp_path):
    import tracemalloc

    peaks = []
    for number, num_shards in enumerate((4, 40)):
        corpus = write_numbered_corpus(tmp_path / str(number), [[500] * 40] * num_shards)
        tracemalloc.start()
        stream = LaneStream(corpus, 2, SEED, 64, range(2))
        for _ in range(20000 * 4 // 128):
            next(stream)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 40 * 1000, "a shard's entry in the plan takes far less"


def test_at_the_end_of_its_epoch_a_lane_still_checks_its_last_segment(tmp_path):
    corpus = write_numbered_corpus(tmp_path, [[8] * 4])
    stream = LaneStream(corpus, 1, SEED, 8, range(1))
    cursor = [next(stream) for _ in range(4)][-1].cursor
    assert (cursor.epochs_B.tolist(), cursor.positions_B.tolist()) == ([0], [32])
    wrong = replace(cursor, checks_B=cursor.checks_B + np.uint64(1))
    with pytest.raises(DataError, match="check"):
        LaneStream(corpus, 1, SEED, 8, range(1), wrong)
    resumed = next(LaneStream(corpus, 1, SEED, 8, range(1), cursor))
    assert np.array_equal(resumed.tokens_BL, next(stream).tokens_BL)
    assert resumed.cursor.epochs_B.tolist() == [1]


def test_an_error_of_the_reader_reaches_the_consumer_in_order_and_again():
    def failing():
        yield 1
        raise DataError("shard x is corrupted")

    with Prefetcher(failing()) as prefetcher:
        assert next(prefetcher) == 1
        for _ in range(2):
            with pytest.raises(DataError, match="shard x"):
                next(prefetcher)


def test_it_prefetches_no_more_than_its_depth():
    read = []

    def counting():
        for number in range(100):
            read.append(number)
            yield number

    with Prefetcher(counting(), depth=2) as prefetcher:
        until(prefetcher._ready.full)
        time.sleep(0.02)
        assert len(read) == 3  # two ready, one in hand


def test_waiting_is_measured_and_closing_stops_a_waiting_reader():
    def slow():
        while True:
            time.sleep(0.02)
            yield 0

    before = threading.active_count()
    prefetcher = Prefetcher(slow())
    next(prefetcher)
    assert 0.01 < prefetcher.wait_seconds < 5
    prefetcher.close()
    assert threading.active_count() == before
    with pytest.raises(StopIteration):
        next(prefetcher)


def test_closing_does_not_wait_for_a_reader_that_a_store_blocks(monkeypatch):
    monkeypatch.setattr("data_pipeline.lanes.prefetcher.CLOSE_SECONDS", 0.05)
    never = threading.Event()

    def stuck():
        never.wait(600)
        yield 1

    began = time.monotonic()
    with Prefetcher(stuck()):
        pass
    assert time.monotonic() - began < 300
    never.set()
