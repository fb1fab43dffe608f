"""The table of static costs: what engines read and send and what compiling saves is not worse."""

from pathlib import Path

import pytest

from benchmarks.reductions import RANKS, cell, computed_reductions, measured_reductions
from benchmarks.static import PAGE, TABLE, compiled_layer, differences, with_table
from foundation.files import read_json
from tests.helpers.host_reads import measured_reads

COMMITTED = read_json(TABLE)


@pytest.mark.slow
def test_engines_wait_for_the_device_no_more_often_than_the_table_has(tmp_path: Path) -> None:
    """What they send is compared in test_zero_memory.py."""
    rows = COMMITTED["engines"].items()
    table = {name: {key: row[key] for key in row if key != "sent"} for name, row in rows}
    assert differences(table, measured_reads(tmp_path)) == []


@pytest.mark.slow
def test_ranks_sum_gradients_as_the_table_has_it_and_as_the_partition_rule_says(tmp_path: Path):
    counted = measured_reductions(tmp_path)
    assert differences(COMMITTED["reductions"], counted) == []
    for ranks in RANKS:
        computed = computed_reductions(cell(2), ranks)
        assert counted["zero2"][f"{ranks}"] == computed["all-reduce"]
        assert counted["zero2-reduce"][f"{ranks}"] == computed["reduce"]


@pytest.mark.slow
def test_a_compiled_layer_runs_no_more_operations_than_the_table_has() -> None:
    assert differences(COMMITTED["compiled_layer"], compiled_layer()) == []


def test_the_page_shows_the_table() -> None:
    page = PAGE.read_text()
    assert with_table(page, COMMITTED) == page


@pytest.mark.parametrize(
    ("committed", "counted", "expected"),
    [
        ({"operations": {"forward": 9}}, {"operations": {"forward": 8}}, []),
        ({"operations": {"forward": 9}}, {"operations": {"forward": 10}}, ["operations forward"]),
        ({"utilization": {"8": 0.9}}, {"utilization": {"8": 0.8}}, ["utilization 8"]),
        ({"registers": 2}, {}, ["registers"]),
    ],
)
def test_a_number_that_is_worse_or_missing_is_named(committed, counted, expected):
    assert [each.partition(":")[0] for each in differences(committed, counted)] == expected
