from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from data_pipeline.lanes.lane_stream import LaneStream, Prefetcher
from foundation.errors import DataError
from tests.helpers.corpora import write_numbered_corpus


def wait_until(condition, seconds=300.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.001)


def test_the_cursor_belongs_to_the_returned_batch_although_others_were_prefetched(tmp_path):
    corpus = write_numbered_corpus(tmp_path, [[30] * 20] * 4)
    plain = LaneStream(corpus, 2, 1, 8, range(2))
    with Prefetcher(LaneStream(corpus, 2, 1, 8, range(2)), depth=4) as prefetcher:
        for _ in range(3):
            expected, batch = next(plain), next(prefetcher)
            wait_until(lambda: prefetcher._ready.full())
            assert np.array_equal(batch.tokens_BL, expected.tokens_BL)
            assert batch.cursor == expected.cursor
        resumed = LaneStream(corpus, 2, 1, 8, range(2), batch.cursor)
        assert np.array_equal(next(resumed).tokens_BL, next(plain).tokens_BL)


def test_an_error_of_the_reader_reaches_the_consumer_in_order_and_again():
    def failing():
        yield 1
        raise DataError("shard x is corrupted")

    with Prefetcher(failing()) as prefetcher:
        assert next(prefetcher) == 1
        for _ in range(2):
            with pytest.raises(DataError, match="shard x"):
                next(prefetcher)


def test_a_finite_stream_ends():
    with Prefetcher(range(5)) as prefetcher:
        assert list(prefetcher) == [0, 1, 2, 3, 4]


def test_it_prefetches_no_more_than_its_depth():
    read = []

    def counting():
        for number in range(100):
            read.append(number)
            yield number

    with Prefetcher(counting(), depth=2) as prefetcher:
        wait_until(lambda: prefetcher._ready.full())
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
    monkeypatch.setattr("data_pipeline.lanes.lane_stream.CLOSE_SECONDS", 0.05)
    never = threading.Event()

    def stuck():
        never.wait(600)
        yield 1

    began = time.monotonic()
    with Prefetcher(stuck()):
        pass
    assert time.monotonic() - began < 300
    never.set()
