from __future__ import annotations

import pytest

from pretrain.terminal.text import duration, markdown_table, number, text_table

ROWS = [["case", "loss", "verdict"], ["short", "12.5", "ok"], ["a longer one", "3", "-"]]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.25, "0.25 s"),
        (9.97, "10 s"),
        (99, "99 s"),
        (100, "1.7 min"),
        (599, "10 min"),
        (5999, "100 min"),
        (6000, "1.7 h"),
        (86400, "24 h"),
        (2e5, "2.3 days"),
        (1e8, "1,157 days"),
    ],
)
def test_a_duration_has_one_unit_that_fits_it(seconds, text):
    assert duration(seconds) == text


def test_a_missing_number_is_a_dash():
    assert number(None, ",.0f") == "-"
    assert number(1234.5678, ",.1f") == "1,234.6"


def test_columns_are_flush_right_except_those_named():
    assert text_table(ROWS, left=(0, -1)).splitlines() == [
        "case          loss  verdict",
        "short         12.5  ok",
        "a longer one     3  -",
    ]
    assert text_table(ROWS, left=()).splitlines()[1] == "       short  12.5       ok"


def test_a_markdown_table_is_aligned_as_text_too():
    assert markdown_table(ROWS).splitlines() == [
        "| case         | loss | verdict |",
        "|--------------|------|---------|",
        "| short        | 12.5 | ok      |",
        "| a longer one | 3    | -       |",
    ]
