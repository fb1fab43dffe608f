"""Tables are read as they were written."""

from pathlib import Path

import pytest

from foundation.errors import ConfigError, DataError
from foundation.tables import check_table_path, read_csv, write_csv
from pretrain.scaling.table import csv_rows


def test_the_name_of_another_kind_of_file_is_rejected(tmp_path):
    check_table_path(tmp_path / "x.csv")
    for name in ("x.yaml", "x.json"):
        with pytest.raises(ConfigError, match=name):
            check_table_path(tmp_path / name)


def test_numbers_and_names_stay_as_they_are(tmp_path: Path):
    row = {"a": -1.5, "b": "-1e-3", "c": "it's", "d": None, "e": "a=b", "=f": "x"}
    write_csv(tmp_path / "x.csv", [*row, "g"], [row])
    text = (tmp_path / "x.csv").read_text()
    assert text == "a,b,c,d,e,=f,g\n-1.5,-1e-3,it's,,a=b,x,\n"
    (found,) = read_csv(text)
    assert found == {**{key: str(value) for key, value in row.items()}, "d": "", "g": ""}


def test_a_file_that_is_no_table_is_one_line(tmp_path: Path):
    (tmp_path / "x.csv").write_text("N,loss\n" + "9" * 200_000 + ",1\n")
    with pytest.raises(DataError, match=r"x\.csv") as error:
        csv_rows(tmp_path / "x.csv", "write another")
    assert "\n" not in str(error.value)


def test_only_line_breaks_outside_quotes_end_a_row(tmp_path: Path):
    (tmp_path / "x.csv").write_text('name,N\na\u2028b,1\n"c\nd",2\n')
    found = [row for _, row in csv_rows(tmp_path / "x.csv", "")]
    assert found == [{"name": "a\u2028b", "N": "1"}, {"name": "c\nd", "N": "2"}]
