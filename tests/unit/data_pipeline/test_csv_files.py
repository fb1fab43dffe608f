"""Tables that spreadsheets open: text from others is no formula, and comes back as it was."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from foundation.csv_files import check_table_path, read_csv, write_csv
from foundation.errors import ConfigError, DataError
from pretrain.scaling.collect import Row, write_rows
from pretrain.scaling.table import csv_rows

FORMULAS = ["=cmd|'/c calc'!A1", "+1+1", "-2+3+cmd", "@SUM(A1)", " =1", "\t=1", "\uff1d1", "'=1"]
FORMULAS += ["a;=cmd|'/c calc'!A1", 'a; "=1;b;;-x', "a\n=1", "\ufeff=1+1", "\u200b\u2060@SUM(A1)"]


def test_a_table_of_other_rows_is_not_replaced_silently(tmp_path, caplog):
    path = tmp_path / "runs.csv"
    check_table_path(path, ["a"])
    write_csv(path, ["name", "loss"], [{"name": name, "loss": 1} for name in "abcde"])
    check_table_path(path, "abcdefg")
    assert not caplog.records
    check_table_path(path, ["a"])
    assert caplog.messages == [f"{path}: replaced a table that also had b, c, d and 1 more"]
    with pytest.raises(ConfigError, match=r"x.yaml has the name of a YAML file, expected that of"):
        check_table_path(tmp_path / "x.yaml", ["a"])
    with pytest.raises(ConfigError, match=r"x.json has the name of a JSON file, expected that of"):
        check_table_path(tmp_path / "x.json", ["a"])


@pytest.mark.parametrize("text", FORMULAS)
def test_text_of_others_is_no_formula_in_any_table_and_is_read_back(text, tmp_path: Path):
    write_rows(tmp_path / "runs.csv", [Row(name="a", code=text, excluded="two\nlines")])
    with open(tmp_path / "runs.csv", newline="") as file:
        (shown,) = csv.DictReader(file)
    assert shown["code"] != text
    for cell in re.split("[;\t\r\n]", shown["code"]):  # a locale may separate by semicolons
        assert not re.match('[\\s"\ufeff\u200b\u2060]*[-=+@\uff1d]', cell)
    ((number, row),) = csv_rows(tmp_path / "runs.csv", "")
    assert (number, row["code"], row["excluded"]) == (2, text, "two\nlines")


def test_numbers_and_names_stay_as_they_are(tmp_path: Path):
    row = {"a": -1.5, "b": "-1e-3", "c": "it's", "d": None, "e": "a=b", "=f": "x"}
    write_csv(tmp_path / "x.csv", [*row, "g"], [row])
    text = (tmp_path / "x.csv").read_text()
    assert text == "a,b,c,d,e,'=f,g\n-1.5,-1e-3,it's,,a=b,x,\n"
    (found,) = read_csv(text)
    assert found == {**{key: str(value) for key, value in row.items()}, "d": "", "g": ""}


def test_a_file_that_is_no_table_is_one_line(tmp_path: Path):
    (tmp_path / "x.csv").write_text("N,loss\n" + "9" * 200_000 + ",1\n")
    with pytest.raises(DataError, match="is not a CSV file") as error:
        csv_rows(tmp_path / "x.csv", "write another")
    assert "\n" not in str(error.value)


def test_only_line_breaks_outside_quotes_end_a_row(tmp_path: Path):
    (tmp_path / "x.csv").write_text('name,N\na\u2028b,1\n"c\nd",2\n')
    found = [row for _, row in csv_rows(tmp_path / "x.csv", "")]
    assert found == [{"name": "a\u2028b", "N": "1"}, {"name": "c\nd", "N": "2"}]
