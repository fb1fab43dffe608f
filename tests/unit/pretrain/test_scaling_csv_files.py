"""Every table of the scaling commands is read by one reader, which names what is wrong with the
file.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from foundation.errors import DataError
from pretrain.scaling.collect import Row, read_rows, write_rows
from pretrain.scaling.table import read_points

READERS = [read_points, read_rows]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("raw", "said"),
    [(b"N,loss\n1,\xe9\n", "is not UTF-8 text"), (b"N,loss\n1,2,3\n", "row 2 has more cells")],
)
def test_every_table_is_refused_alike(read, raw: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_bytes(raw)
    with pytest.raises(DataError, match=said):
        read(tmp_path / "table.csv")


@pytest.mark.parametrize("read", READERS)
def test_a_directory_is_said_to_be_one(read, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a directory; name a file"):
        read(tmp_path)


@pytest.mark.parametrize("read", READERS)
def test_an_absent_table_is_named(read, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.csv does not exist"):
        read(tmp_path / "none.csv")


@pytest.mark.parametrize(("column", "said"), [("loss", "loss='x', expected"), ("D", "no column")])
def test_a_damaged_table_of_runs_is_refused_in_a_line(column, said, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    write_rows(path, [Row(name="a", N=1, D=2, loss=3.0)])
    text = path.read_text()
    path.write_text(text.replace("3.0", "x") if column == "loss" else text.replace("D,", "E,", 1))
    with pytest.raises(DataError, match=said):
        read_rows(path)
