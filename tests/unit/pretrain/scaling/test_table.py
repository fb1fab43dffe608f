"""Files of runs: what is read, what is refused, what is left out and why."""

import json
from pathlib import Path

import pytest

from foundation.errors import DataError
from pretrain.scaling.collect import Row, read_rows, write_rows
from pretrain.scaling.fit import fit_all
from pretrain.scaling.table import Columns, Points, read_points, usable
from tests.helpers.scaling import make_points


def read(path: Path, text: str | bytes, columns: Columns | None = None) -> Points:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_points(path, columns)


def test_columns_of_any_name_are_read_and_flops_default_to_6nd(tmp_path):
    names = Columns(parameters="size", tokens="tokens", loss="nll")
    points = read(tmp_path / "runs.csv", "size,tokens,nll\n1e4,2e5,3.5\n3e4,4e5,3.25\n", names)
    assert points.parameters_P.tolist() == [1e4, 3e4]
    assert points.flops_P.tolist() == [6 * 1e4 * 2e5, 6 * 3e4 * 4e5]
    assert points.names == ("row 2", "row 3")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("N,D,final\n1,2,3\n", "no column 'loss' (found: N, D, final)"),
        ("N,D,loss\n1,2,3\n1,3,nan\n2,2,\n", "row 3: loss='nan' (and 1 more such row)"),
        ("N,D,loss\n1,2,3\n1,3,-2.5\n", "row 3: loss='-2.5'"),
        ("N,D,loss\n0,2,3\n", "row 2: N='0'"),
        ("N,loss\n1,2\n", "no column 'D' (found: N, loss)"),
        ("N,D,loss,progress\n1,2,3,half\n", "row 2: progress='half'"),
        ("N,D,loss,progress\n1,2,3,1\n1,3,3,40\n", "row 3: progress='40'"),
        ("N,D,loss,holdout\n1,2,3,ja\n1,3,3,2\n", "row 2: holdout='ja' (and 1 more such row)"),
        ("N,D,loss\n", "contains no runs"),
        ("N,D,loss\n1e250,2,3\n", "row 2: N='1e250'"),
        ("N,D,loss\n1e9,1e-300,3\n", "row 2: D='1e-300'"),
        ("N,D,C,loss\n44,1e9,2.7e17,3\n60,1e9,3.6e17,3\n", "multiply its column by 1e6"),
        ("N,D,loss\n1e8,2e9,20.1\n2e8,2e9,18.0\n", "take the logarithm of perplexities"),
    ],
)
def test_each_kind_of_bad_file_gets_one_line_that_says_what_to_do(tmp_path, text, said):
    with pytest.raises(DataError) as caught:
        read(path := tmp_path / "runs.csv", text)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_hold_outs_are_marked_by_any_spelling_of_yes_and_no(tmp_path):
    marks = ("1", "1.0", "true", "True", " YES ", "0", "0.0", "false", "FALSE", "no", "")
    lines = [f"1,{index + 2},3,{mark}\n" for index, mark in enumerate(marks)]
    points = read(tmp_path / "runs.csv", "N,D,loss,holdout\n" + "".join(lines))
    assert points.holdout_P.tolist() == [True] * 5 + [False] * 6
    marks = enumerate((True, False, 1, 0, None), start=2)
    rows = [{"N": 1, "D": size, "loss": 3, "holdout": mark} for size, mark in marks]
    points = read(tmp_path / "runs.json", json.dumps(rows))
    assert points.holdout_P.tolist() == [True, False, True, False, False]


def test_runs_are_left_out_only_with_a_reason(tmp_path):
    text = (
        "name,N,D,loss,progress,holdout,excluded\n"
        "a,1,2,3,1,,no\nb,1,3,2.9,0.4,,\nc,1,4,2.8,,yes,False\nd,1,5,2.7,1,no,\na2,1,2,3,1,,\n"
        "e,1,6,nan,1,,x\nf,1,7,3,1,,yes\ng,1,8,3,1,,diverged\n,1,9,-3,1,,1\n"
    )
    points = usable(read(tmp_path / "runs.csv", text))
    assert points.names == ("a", "d")
    reasons = {item.name: item.reason for item in points.excluded}
    words = {"b": "40%", "e": "x", "row 10": "file", "f": "file", "g": "diverged"}
    words |= {"a2": "repeats", "c": "held out"}
    assert reasons.keys() == words.keys()
    assert all(words[name] in reasons[name] for name in words)


@pytest.mark.parametrize("role", ["holdout", "progress", "budget", "flops"])
def test_a_column_that_was_named_by_hand_must_be_there(tmp_path, role):
    text = "N,D,loss,held\n1,2,3,1\n"
    found = read(tmp_path / "runs.csv", text, Columns(holdout="held"))
    assert found.holdout_P.tolist() == [True]
    with pytest.raises(DataError, match=rf"{role}=heldd; .* 'held'"):
        read(tmp_path / "runs.csv", text, Columns(**{role: "heldd"}))


def test_one_budget_only_is_refused_and_so_are_too_few_points():
    one_budget = make_points([1e6, 2e6, 4e6, 8e6], [8e8, 4e8, 2e8, 1e8], [4, 3.8, 3.9, 4.1])
    with pytest.raises(DataError, match="one budget"):
        fit_all(one_budget)
    with pytest.raises(DataError, match="3 usable points"):
        fit_all(make_points([1e6, 2e6, 4e6], [1e8, 2e8, 1e9], [4, 3.8, 3.5]))


def test_parameters_follow_from_flops_and_tokens(tmp_path):
    points = read(tmp_path / "runs.csv", "D,C,loss\n2e5,1.2e10,3\n4e5,4.8e10,2.9\n")
    assert points.parameters_P.tolist() == [1e4, 2e4]
    assert points.notes == ("no column 'N': N = C / 6D",)


def test_blanks_around_names_and_values_are_no_part_of_them(tmp_path):
    text = " N , D,  loss , holdout\n 10, 20 , 3.0,  yes \n 30, 40, 2.9,\n"
    points = read(tmp_path / "runs.csv", text)
    assert points.parameters_P.tolist() == [10, 30]
    assert points.holdout_P.tolist() == [True, False]
    rows = json.dumps([{" N": 1, "D ": 2, "loss": " 3 "}])
    assert read(tmp_path / "runs.json", rows).loss_P.tolist() == [3.0]


@pytest.mark.parametrize(
    ("text", "in_plain_units"),
    [
        ("N,D,C,loss\n1e8,1e9,2e16,3\n2e8,1e9,4e16,2.9\n", "N,D,C,loss\n1e8,1e9,6e17,3\n"),
        ("N,D,loss\n44,1e9,3\n", "N,D,loss\n44e6,1e9,3\n"),
        ("N,D,loss\n44,1.2,3\n", "N,D,loss\n44e6,1.2e9,3\n"),
        ("N,D,loss\n44e6,1200,3\n", "N,D,loss\n44e6,1.2e9,3\n"),
        ("N,D,loss\n1e8,2e12,3.5\n", "N,D,loss\n1e8,2e9,3.5\n"),
        ("N,C,loss\n44,1e18,3\n", "N,C,loss\n44e6,1e18,3\n"),
        ("D,C,loss\n1.2,1e18,3\n", "D,C,loss\n1.2e9,1e18,3\n"),
    ],
)
def test_sizes_in_other_units_are_warned_of(tmp_path, text, in_plain_units):
    """Tokens a thousand times too many without FLOPs to tell are among them."""
    assert len(read(tmp_path / "runs.csv", text).warnings) == 1
    assert read(tmp_path / "runs.csv", in_plain_units).warnings == ()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "Model Size,Training FLOP,loss\n1e8,6e18,3.5\n2e8,6e18,3.4\n"),
        ("a.csv", "params;tokens;final_loss\n1e8;1e10;3.5\n2e8;5e9;3.4\n"),
        ("a.tsv", "N\tD\tloss\n1e8\t1e10\t3.5\n2e8\t5e9\t3.4\n"),
        ("a.jsonl", '{"N": 1e8, "D": 1e10, "loss": 3.5}\n{"N": 2e8, "D": 5e9, "loss": 3.4}\n'),
    ],
)
def test_tables_are_read_as_they_are_published(tmp_path, name, text):
    points = read(tmp_path / name, text)
    assert points.parameters_P.tolist() == [1e8, 2e8]
    assert points.tokens_P == pytest.approx([1e10, 5e9])
    assert points.loss_P.tolist() == [3.5, 3.4]
    assert points.warnings == ()


@pytest.mark.parametrize("reader", [read_points, read_rows])
def test_every_table_is_refused_alike(reader, tmp_path: Path) -> None:
    (tmp_path / "latin.csv").write_bytes(b"N,loss\n1,\xe9\n")
    (tmp_path / "long.csv").write_bytes(b"N,loss\n1,2,3\n")
    for name, said in (
        ("latin.csv", "is not UTF-8 text"),
        ("long.csv", "row 2 has more cells"),
        ("", "is a directory"),
        ("none", "does not exist"),
    ):
        with pytest.raises(DataError, match=said):
            reader(tmp_path / name)


@pytest.mark.parametrize(("column", "said"), [("loss", "loss='x', expected"), ("D", "no column")])
def test_a_damaged_table_of_runs_is_refused_in_a_line(column, said, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    write_rows(path, [Row(name="a", N=1, D=2, loss=3.0)])
    text = path.read_text()
    path.write_text(text.replace("3.0", "x") if column == "loss" else text.replace("D,", "E,", 1))
    with pytest.raises(DataError, match=said):
        read_rows(path)
