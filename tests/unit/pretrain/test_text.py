from __future__ import annotations

import pytest

from pretrain.terminal.text import (
    distinguished,
    fitted_table,
    step_time,
    text_table,
)

ROWS = [["case", "loss", "verdict"], ["short", "12.5", "ok"], ["a longer one", "3", "-"]]


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["books-lr0.1", "books-lr0.2"], ["lr0.1", "lr0.2"]),
        (["sweep/c1-d64", "sweep/c1-d128"], ["d64", "d128"]),
        (["small", "smaller"], ["small", "smaller"]),
        (["a-", "a-b"], ["a-", "a-b"]),
        (["a-b", "a-b"], ["b", "b"]),
        (["a-b"], ["a-b"]),
        ([], []),
    ],
)
def test_names_are_shown_without_the_words_that_all_begin_with(names, shown):
    assert distinguished(names) == shown


def test_the_first_column_is_flush_left_and_all_others_are_flush_right():
    assert text_table(ROWS).splitlines() == [
        "case          loss  verdict",
        "short         12.5       ok",
        "a longer one     3        -",
    ]


def test_a_table_wider_than_the_terminal_becomes_several_that_name_their_rows():
    assert fitted_table(ROWS, 0) == text_table(ROWS)
    assert fitted_table(ROWS, 40) == text_table(ROWS)
    narrow = fitted_table(ROWS, 20)
    assert narrow.split("\n\n") == [
        text_table([row[:2] for row in ROWS]),
        text_table([[row[0], row[2]] for row in ROWS]),
    ]
    assert max(map(len, narrow.splitlines())) <= 20 + 2


def test_the_time_of_a_tiny_step_is_not_zero_seconds():
    times = (1234.5678, 0.1, 0.0999, 0.00456, 1.234e-4, 7.89e-6, 3e-9)
    assert [step_time(seconds) for seconds in times] == [
        "1,234.568 s", "0.100 s", "99.9 ms", "4.56 ms", "0.123 ms", "7.89 us", "0.003 us",
    ]  # fmt: skip
