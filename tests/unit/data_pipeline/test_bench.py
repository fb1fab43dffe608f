from __future__ import annotations

import pytest

from benchmarks.__main__ import main
from benchmarks.data_measure import Row, medians, table
from benchmarks.data_reading import ReadingSize, reading_rows
from benchmarks.data_scale import ScaleSize, scale_rows
from benchmarks.data_storage import StorageSize, storage_rows


def test_medians_leave_the_first_round_out_and_change_the_order():
    calls, values = [], iter([100.0, 1.0, 5.0, 3.0])

    def counted() -> float:
        calls.append("a")
        return next(values)

    def constant() -> float:
        calls.append("b")
        return 7.0

    assert medians({"a": counted, "b": constant}, rounds=3) == {"a": 3.0, "b": 7.0}
    assert "".join(calls) == "ba" + "ab" + "ba" + "ab"


def test_a_goal_is_missed_when_it_is_exceeded_by_more_than_the_tolerance():
    rows = [
        Row("a", 2.0, 2.0, "x"),
        Row("b", 2.2, 2.0, "x"),
        Row("c", 2.4, 2.0, "x"),
        Row("d", 9.0, 0, "ns"),
    ]
    assert [row.passes for row in rows] == [True, True, False, True]
    assert [line.split("|")[-2].strip() for line in table(rows).splitlines()[2:]] == [
        "ok",
        "close",
        "MISSED",
        "",
    ]


@pytest.mark.filterwarnings("ignore")
def test_reading_is_measured_for_both_formats_and_their_stock_readers(tmp_path):
    rows = reading_rows(
        tmp_path, ReadingSize(shards=2, shard_tokens=40_000, lanes=4, segment_length=64, rounds=1)
    )
    assert len(rows) == 6
    assert all(row.value > 0 for row in rows)


def test_the_simulated_scale_counts_downloads_against_the_shards_that_are_read(tmp_path):
    size = ScaleSize(
        shards=128, tokens=1 << 27, documents=1 << 14, lanes=32, ranks_of_node=2, lanes_of_rank=2
    )
    *_, downloads = scale_rows(tmp_path, size)
    # Four shards a lane: each border between two lanes is a shard that both read, at other times.
    assert 1.0 <= downloads.value <= 1.5


def test_the_wait_for_a_slow_store_is_measured_with_and_without_reading_ahead(tmp_path):
    size = StorageSize(
        lanes=2, shard_segments=40, shards=12, steps=100, step_seconds=0.01, shard_seconds=0.2
    )
    without, with_it = storage_rows(tmp_path, size)
    assert without.value > 0.1
    assert with_it.value < without.value / 2


def test_an_unknown_part_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["data", "--only", "nothing"])
    assert "invalid choice" in capsys.readouterr().err
