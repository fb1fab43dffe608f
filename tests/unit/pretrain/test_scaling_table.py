"""Files of runs: what is read, what is refused, what is left out and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foundation.errors import ConfigError, DataError
from pretrain.scaling.collect import Row, read_rows, write_rows
from pretrain.scaling.fit import fit_all
from pretrain.scaling.table import Columns, read_points, units_of, usable
from tests.helpers.scaling import make_points


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_columns_of_any_name_are_read_and_flops_default_to_6nd(tmp_path):
    path = written(tmp_path / "runs.csv", "size,tokens,nll\n1e4,2e5,3.5\n3e4,4e5,3.25\n")
    points = read_points(path, Columns(parameters="size", tokens="tokens", loss="nll"))
    assert points.parameters_P.tolist() == [1e4, 3e4]
    assert points.flops_P.tolist() == [6 * 1e4 * 2e5, 6 * 3e4 * 4e5]
    assert points.names == ("row 2", "row 3")
    assert points.notes == ("no column 'C': C = 6ND",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "N,D,final\n1,2,3\n",
            "no column 'loss' (found: N, D, final); name it with --column",
        ),
        ("N,D,loss\n1,2,3\n1,3,nan\n2,2,\n", "row 3: loss='nan' (and 1 more such row), expected"),
        ("N,D,loss\n1,2,3\n1,3,-2.5\n", "row 3: loss='-2.5', expected a number from 1e-09"),
        ("N,D,loss\n0,2,3\n", "row 2: N='0', expected a number from 1e-09"),
        ("N,loss\n1,2\n", "no column 'D' (found: N, loss); name it with --column tokens=NAME"),
        ("N,D,loss,progress\n1,2,3,half\n", "row 2: progress='half', expected a fraction of the"),
        ("N,D,loss,progress\n1,2,3,1\n1,3,3,40\n", "row 3: progress='40', expected a fraction"),
        ("N,D,loss,holdout\n1,2,3,ja\n1,3,3,2\n", "row 2: holdout='ja' (and 1 more such row)"),
        ("N,D,loss\n", "contains no runs"),
    ],
)
def test_each_kind_of_bad_file_gets_one_line_that_says_what_to_do(tmp_path, text, said):
    path = written(tmp_path / "runs.csv", text)
    with pytest.raises(DataError) as caught:
        read_points(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_hold_outs_are_marked_by_any_spelling_of_yes_and_no(tmp_path):
    marks = ("1", "1.0", "true", "True", " YES ", "0", "0.0", "false", "FALSE", "no", "")
    lines = [f"1,{index + 2},3,{mark}\n" for index, mark in enumerate(marks)]
    points = read_points(written(tmp_path / "runs.csv", "N,D,loss,holdout\n" + "".join(lines)))
    assert points.holdout_P.tolist() == [True] * 5 + [False] * 6
    values = (True, False, 1, 0, None)
    rows = [
        {"N": 1, "D": index + 2, "loss": 3, "holdout": mark} for index, mark in enumerate(values)
    ]
    found = read_points(written(tmp_path / "runs.json", json.dumps(rows)))
    assert found.holdout_P.tolist() == [True, False, True, False, False]


def test_a_run_that_the_file_says_is_not_excluded_is_not(tmp_path):
    text = "name,N,D,loss,excluded\na,1,2,3,no\nb,1,3,3,False\nc,1,4,3,\nd,1,5,3,yes\ne,1,6,3,diverged\n"  # noqa: E501
    points = read_points(written(tmp_path / "runs.csv", text))
    assert points.names == ("a", "b", "c")
    assert {item.name: item.reason for item in points.excluded} == {
        "d": "excluded in the file",
        "e": "diverged",
    }


def test_a_column_that_was_named_by_hand_must_be_there(tmp_path):
    path = written(tmp_path / "runs.csv", "N,D,loss,held\n1,2,3,1\n")
    assert read_points(path, Columns(holdout="held")).holdout_P.tolist() == [True]
    for columns in (
        Columns(holdout="heldd"),
        Columns(progress="heldd"),
        Columns(budget="heldd"),
        Columns(flops="heldd"),
    ):
        with pytest.raises(
            DataError, match=r"no column 'heldd' for --column \w+=heldd; did you mean 'held'"
        ):
            read_points(path, columns)


def test_one_budget_only_is_refused_and_so_are_too_few_points():
    one_budget = make_points(
        [1e6, 2e6, 4e6, 8e6], [8e8, 4e8, 2e8, 1e8], [4, 3.8, 3.9, 4.1], source="runs.csv"
    )
    with pytest.raises(
        DataError, match=r"runs\.csv: all 4 usable runs share one budget \(4\.8e\+15 FLOPs\)"
    ):
        fit_all(one_budget)
    few = make_points([1e6, 2e6, 4e6], [1e8, 2e8, 1e9], [4, 3.8, 3.5], source="runs.csv")
    with pytest.raises(DataError, match="3 usable points, a law of N and D needs at least 6"):
        fit_all(few)


def test_runs_are_left_out_only_with_a_reason(tmp_path):
    text = (
        "name,N,D,loss,progress,holdout\n"
        "a,1,2,3,1,\nb,1,3,2.9,0.4,\nc,1,4,2.8,,yes\nd,1,5,2.7,1,no\na2,1,2,3,1,\ne,1,6,nan,1,\n"
    )
    points = usable(read_points(written(tmp_path / "runs.csv", text), exclude=["name=e: diverged"]))
    assert points.names == ("a", "d")
    reasons = {item.name: item.reason for item in points.excluded}
    assert reasons == {
        "e": "diverged",
        "a2": "repeats an earlier row with the same N, D and loss",
        "c": "held out: predicted, not fitted",
        "b": "mid-schedule: 40% of its schedule done, learning rate not yet decayed",
    }


def test_conditions_choose_rows_and_unknown_columns_are_refused(tmp_path):
    path = written(tmp_path / "runs.csv", "mode,N,D,loss\ntrain,1,2,3\neval,1,3,nan\n")
    assert len(read_points(path, where=["mode=train"])) == 1
    with pytest.raises(DataError, match="no column 'mod'; did you mean 'mode'"):
        read_points(path, where=["mod=train"])
    with pytest.raises(DataError, match="contains no runs that match mode=test"):
        read_points(path, where=["mode=test"])


def test_parameters_follow_from_flops_and_tokens(tmp_path):
    points = read_points(written(tmp_path / "runs.csv", "D,C,loss\n2e5,1.2e10,3\n4e5,4.8e10,2.9\n"))
    assert points.parameters_P.tolist() == [1e4, 2e4]
    assert points.notes == ("no column 'N': N = C / 6D",)


def test_blanks_around_names_and_values_are_no_part_of_them(tmp_path):
    text = " N , D,  loss , holdout\n 10, 20 , 3.0,  yes \n 30, 40, 2.9,\n"
    points = read_points(written(tmp_path / "runs.csv", text))
    assert points.parameters_P.tolist() == [10, 30]
    assert points.holdout_P.tolist() == [True, False]
    rows = json.dumps([{" N": 1, "D ": 2, "loss": " 3 "}])
    assert read_points(written(tmp_path / "runs.json", rows)).loss_P.tolist() == [3.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("N,D,loss\n1e250,2,3\n", "row 2: N='1e250', expected a number from 1e-09 to 1e+40"),
        ("N,D,loss\n1e9,1e-300,3\n", "row 2: D='1e-300', expected a number from 1e-09 to 1e+40"),
        (
            "N,D,C,loss\n44,1e9,2.7e17,3\n60,1e9,3.6e17,3\n",
            "C is 1.01e+06 times 6ND, a matter of units; if N is in millions, say --unit "
            "parameters=1e6",
        ),
        ("N,D,loss\n1e8,2e9,20.1\n2e8,2e9,18.0\n", "loss is 18 to 20.1, expected losses in nats"),
    ],
)
def test_other_units_are_recognized(tmp_path, text, said):
    with pytest.raises(DataError) as caught:
        read_points(written(tmp_path / "runs.csv", text))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_units_are_converted(tmp_path):
    path = written(tmp_path / "runs.csv", "N,D,C,loss\n44,1e9,2.7e17,4\n60,1e9,3.6e17,4\n")
    points = read_points(path, units={"parameters": 1e6, "loss": 0.5})
    assert points.parameters_P.tolist() == [44e6, 60e6]
    assert points.loss_P.tolist() == [2.0, 2.0]


def test_unusual_flops_and_tokens_per_parameter_are_noted(tmp_path):
    forward = written(tmp_path / "forward.csv", "N,D,C,loss\n1e8,1e9,2e16,3\n2e8,1e9,4e16,2.9\n")
    (note,) = read_points(forward).warnings
    assert note.startswith("C/6ND is 0.0333 to 0.0333: check that C is the training FLOPs")


@pytest.mark.parametrize(
    ("text", "in_plain_units"),
    [
        ("N,D,loss\n44,1e9,3\n", "N,D,loss\n44e6,1e9,3\n"),
        ("N,D,loss\n44,1.2,3\n", "N,D,loss\n44e6,1.2e9,3\n"),
        ("N,D,loss\n44e6,1200,3\n", "N,D,loss\n44e6,1.2e9,3\n"),
        ("N,D,loss\n1e8,2e12,3.5\n", "N,D,loss\n1e8,2e9,3.5\n"),
        ("N,C,loss\n44,1e18,3\n", "N,C,loss\n44e6,1e18,3\n"),
        ("D,C,loss\n1.2,1e18,3\n", "D,C,loss\n1.2e9,1e18,3\n"),
    ],
)
def test_sizes_in_other_units_are_noted_whichever_column_is_missing(tmp_path, text, in_plain_units):
    (note,) = read_points(written(tmp_path / "runs.csv", text)).warnings
    assert "is N, D or C in other units? Say so with --unit" in note
    assert read_points(written(tmp_path / "plain.csv", in_plain_units)).warnings == ()


def test_a_run_is_left_out_by_the_name_that_is_printed_of_it(tmp_path):
    path = written(tmp_path / "runs.csv", "N,D,loss\n1e6,2e8,3\n2e6,2e8,9\n")
    points = read_points(path, exclude=["name=row 3: diverged"])
    assert points.names == ("row 2",)
    assert [(item.name, item.reason) for item in points.excluded] == [("row 3", "diverged")]
    path = written(tmp_path / "runs.csv", "run,id,N,D,loss\na,x,1e6,2e8,3\nb,y,2e6,2e8,9\n")
    assert read_points(path, where=["name=b"]).names == ("b",)
    assert read_points(path, Columns(name="id"), where=["name=y"]).names == ("y",)


def test_a_unit_is_a_role_and_a_positive_factor():
    assert units_of(["parameters=1e6", "loss=0.693"]) == {"parameters": 1e6, "loss": 0.693}
    for item in ("N=1e6", "parameters", "parameters=-1", "parameters=million", "loss=inf"):
        with pytest.raises(ConfigError, match="expected ROLE=FACTOR"):
            units_of([item])


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
    written(tmp_path / name, text)
    points = read_points(tmp_path / name)
    assert points.parameters_P.tolist() == [1e8, 2e8]
    assert points.tokens_P == pytest.approx([1e10, 5e9])
    assert points.loss_P.tolist() == [3.5, 3.4]
    assert points.warnings == ()


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
def test_what_is_no_file_is_named(read, tmp_path: Path) -> None:
    for path, said in ((tmp_path, "is a directory; name"), (tmp_path / "none", "does not exist")):
        with pytest.raises(DataError, match=said):
            read(path)


@pytest.mark.parametrize(("column", "said"), [("loss", "loss='x', expected"), ("D", "no column")])
def test_a_damaged_table_of_runs_is_refused_in_a_line(column, said, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    write_rows(path, [Row(name="a", N=1, D=2, loss=3.0)])
    text = path.read_text()
    path.write_text(text.replace("3.0", "x") if column == "loss" else text.replace("D,", "E,", 1))
    with pytest.raises(DataError, match=said):
        read_rows(path)
