"""The table of static costs: what engines read and send and what compiling saves is not worse."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.static import (
    COMPILED,
    PAGE,
    TABLE,
    compiled_layer,
    differences,
    measured_engines,
    with_table,
)
from foundation.files import read_json

COMMITTED = read_json(TABLE)


@pytest.mark.slow
def test_engines_wait_for_and_send_no_more_than_the_table_has() -> None:
    assert differences(COMMITTED["engines"], measured_engines()) == []


@pytest.mark.slow
@pytest.mark.parametrize("model", COMPILED)
def test_a_compiled_layer_runs_no_more_operations_than_the_table_has(model: str) -> None:
    assert differences(COMMITTED["compiled_layers"][model], compiled_layer(model)) == []


def test_the_page_shows_the_table() -> None:
    page = PAGE.read_text()
    assert with_table(page, COMMITTED) == page


@pytest.mark.parametrize(
    ("committed", "counted", "expected"),
    [
        ({"operations": {"forward": 9}}, {"operations": {"forward": 9}}, []),
        ({"operations": {"forward": 9}}, {"operations": {"forward": 8}}, []),
        (
            {"operations": {"forward": 9}},
            {"operations": {"forward": 10}},
            ["operations forward: found 10, the table has 9"],
        ),
        (
            {"utilization": {"8": 0.9}},
            {"utilization": {"8": 0.8}},
            ["utilization 8: found 0.8, the table has 0.9"],
        ),
        ({"programs": 2}, {"programs": 3}, []),
        (
            {"registers": 2},
            {},
            ["registers: expected in both tables; run 'python -m benchmarks static'"],
        ),
    ],
)
def test_a_number_that_is_worse_or_missing_is_named(
    committed: dict[str, Any], counted: dict[str, Any], expected: list[str]
) -> None:
    assert differences(committed, counted) == expected
