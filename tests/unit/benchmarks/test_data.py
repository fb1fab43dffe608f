import pytest

from benchmarks.data.reading import ReadingSize, reading_costs
from benchmarks.data.scale import ScaleSize, scale_costs
from benchmarks.data.storage import StorageSize, storage_costs


@pytest.mark.filterwarnings("ignore")
def test_reading_is_measured_for_both_formats_and_their_stock_readers(tmp_path):
    size = ReadingSize(shards=2, shard_tokens=40_000, lanes=4, segment_length=64, rounds=1)
    measurements = list(reading_costs(tmp_path, size))
    assert len(measurements) == 6
    assert all(each.median > 0 for each in measurements)


def test_the_simulated_scale_counts_downloads_against_the_shards_that_are_read(tmp_path):
    text = {"shards": 128, "tokens": 1 << 27, "documents": 1 << 14}
    size = ScaleSize(**text, lanes=32, ranks_of_node=2, lanes_of_rank=2)
    *_, downloads = scale_costs(tmp_path, size)
    # Four shards a lane. Two lanes that share a shard read it at different times.
    assert 1.0 <= downloads.median <= 1.5


def test_the_wait_for_a_slow_store_is_measured_with_and_without_prefetching(tmp_path):
    text = {"lanes": 2, "shard_segments": 40, "shards": 12}
    size = StorageSize(**text, steps=100, step_seconds=0.01, shard_seconds=0.2)
    without, with_it = storage_costs(tmp_path, size)
    assert without.median > 0.1
    assert with_it.median < without.median / 2
