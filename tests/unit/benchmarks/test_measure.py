"""What all benchmarks share: fair turns, goals that can be missed, one report."""

import argparse
import math
import re

import pytest

from benchmarks.measure import (
    Comparison,
    Measurement,
    Section,
    add_report_arguments,
    in_turns,
    run_benchmarks,
)
from foundation.errors import UserError

FAST = Section("quick case", lambda _: [Measurement("speed", [2.0], at_least=1.0)])
MISSED = Section("slow case", lambda _: [Measurement("cost", [2.0], "ms", at_most=1.0)])


def arguments(*command: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_report_arguments(parser)
    return parser.parse_args(command)


def test_cases_take_turns_and_the_first_round_does_not_count() -> None:
    calls, values = [], iter([100.0, 1.0, 5.0, 3.0])

    def changing() -> float:
        calls.append("a")
        return next(values)

    def constant() -> float:
        calls.append("b")
        return 7.0

    found = in_turns({"a": changing, "b": constant}, rounds=3)
    assert found == {"a": [1.0, 5.0, 3.0], "b": [7.0, 7.0, 7.0]}
    assert "".join(calls) == "ab" + "ba" + "ab" + "ba"


def test_a_comparison_is_the_ratio_of_its_sides_in_each_round() -> None:
    baseline = iter([100.0, 8.0, 12.0])
    more = {"floor_seconds": 0.5, "candidate_work": 3.0}
    comparison = Comparison("case", 2.0, lambda: next(baseline), lambda: 2.0, 2, **more)
    [measurement] = comparison.measure()
    assert measurement.values == [12.0, 18.0]
    assert re.findall(r"\S+ ms", measurement.detail) == ["10,000.0 ms", "2,000.0 ms", "500.0 ms"]


@pytest.mark.parametrize(
    ("bound", "values", "result"),
    [
        ("at_least", [2.0], "ok"),
        ("at_least", [1.71], "close"),
        ("at_least", [1.69], "MISSED"),
        ("at_least", [math.nan], "MISSED"),
        ("at_least", [1.0, 100.0, 2.0], "ok"),
        ("at_most", [2.29], "close"),
        ("at_most", [2.31], "MISSED"),
    ],
)
def test_the_median_of_rounds_may_miss_its_goal_by_fifteen_percent(bound, values, result):
    measurement = Measurement("case", values, **{bound: 2.0})
    assert measurement.result == result
    assert measurement.passes == (result != "MISSED")
    assert not Measurement("case", [2.01], at_most=2.0, tolerance=0.0).passes


def test_the_report_is_printed_and_appended_and_its_goals_decide_the_status(tmp_path, capsys):
    file = tmp_path / "log.md"
    file.write_text("# Log\n")
    command = arguments("--append", str(file))
    assert run_benchmarks(command, "machine", [FAST], notes="a note") == 0
    assert run_benchmarks(command, "machine", [FAST, MISSED]) == 1
    captured = capsys.readouterr()
    assert "cost: 2 ms" in captured.err
    cells = [cell.strip() for cell in captured.out.splitlines()[-1].strip("|").split("|")]
    assert cells[:5] == ["cost", "2 ms", "", "at most 1 ms", "MISSED"]
    assert "a note" in captured.out
    assert file.read_text().startswith("# Log\n\n## 20")
    assert file.read_text().count("| speed") == 2


def test_only_the_named_benchmarks_are_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_benchmarks(arguments("--only", "quick"), "machine", [FAST, MISSED]) == 0
    assert "cost" not in capsys.readouterr().out
    with pytest.raises(UserError, match=r"none: .*quick case; slow"):
        run_benchmarks(arguments("--only", "none"), "machine", [FAST, MISSED])
