from __future__ import annotations

from pretrain.terminal.text import markdown_table, number, text_table

ROWS = [["case", "loss", "verdict"], ["short", "12.5", "ok"], ["a longer one", "3", "-"]]


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
