import pytest
from scipy.stats import ttest_rel

from foundation.tables import latex_table
from pretrain.reporting.members import Member, beside, member_names, member_rows, without_shared
from pretrain.rundir.evaluated_text import EvaluatedText

A, B = {1: 2.00, 2: 2.10, 3: 2.05}, {1: 2.11, 2: 2.18, 3: 2.16}


def text(*losses: float) -> EvaluatedText:
    return EvaluatedText(len(losses), tuple((loss, 100) for loss in losses))


def test_a_difference_is_paired_by_seed_with_students_interval():
    texts = [dict.fromkeys(A, text(*losses)) for losses in ((3, 2), (2.9, 1.9))]
    first, second = beside([Member("b", B, texts[0]), Member("a", A, texts[1])])
    assert [(row["member"], row["n"]) for row in (first, second)] == [("a", 3), ("b", 3)]
    assert (first["loss"], second["loss"]) == pytest.approx((2.05, 2.15))
    interval = ttest_rel(list(B.values()), list(A.values())).confidence_interval()
    found = [second[name] for name in ("difference", "interval_low", "interval_high")]
    assert found == pytest.approx([0.1, interval.low, interval.high])
    cells = member_rows([first, second])[2]
    assert cells[4:6] == ["+0.1000", f"{interval.low:+.4f} to {interval.high:+.4f}"]
    (alone,) = beside([Member("one", {1: 2.0}, {})])
    assert member_rows([alone])[1][:6] == ["one", "1", "2.0000", *"---"]


def test_differences_are_from_the_baseline_that_a_comparison_names():
    rows = beside([Member("a", A, {}), Member("b", B, {})], "b")
    assert [row["difference"] for row in rows] == [pytest.approx(-0.1), None]


def test_what_all_rows_share_leaves_the_table():
    rows = [["member", "n", "loss", "needle"], ["a", "3", "2.0", "-"], ["b", "3", "2.1", "-"]]
    shown, words = without_shared(rows, "All")
    assert (shown[1], words) == (["a", "2.0"], ["All: n: 3"])


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (text(2.01, 5.01, 1.01), "+0.0100"),  # every part agrees
        (text(2.30, 4.80, 0.93), "+0.0100?"),  # one does, others do not
        (text(2.01, 5.01), "-"),  # losses on other text are not subtracted
    ],
)
def test_a_difference_that_the_split_cannot_tell_is_marked(other, difference):
    first, second = Member("a", {1: 2.66}, {1: text(2, 5, 1)}), Member("b", {1: 2.67}, {1: other})
    assert member_rows(beside([first, second]))[2][4] == difference


def test_seeds_that_were_scored_on_different_texts_have_no_mean():
    mixed = Member("a", A, {1: text(2, 5), 2: text(2, 5, 1), 3: text(2, 5, 1)})
    other = Member("b", B, dict.fromkeys(B, text(2, 5, 1)))
    rows = member_rows(beside([mixed, other]))
    assert rows[1][:3] == ["b", "3", "2.1500"]
    assert rows[2] == ["a", "3", *"-----"]


@pytest.mark.parametrize(
    ("names", "changed", "expected"),
    [
        (["x-s1", "x-s2", "y-s1"], {"seed": [1, 2, 1], "optim.steps": [5, 5, 6]}, "x x y"),
        (["a", "b"], {"seed": [1, 2]}, "a a"),
        (["p", "q", "r"], {"seed": [1, 2, 1], "optim.steps": [5, 5, 6]}, "steps=5 steps=5 steps=6"),
        (["m-s1", "m-s2"], {"checkpoint.interval": [1, 2], "seed": [1, 2]}, "m m"),
    ],
)
def test_members_are_named_by_their_runs_or_else_by_settings(names, changed, expected):
    assert member_names(names, changed) == expected.split()


def test_a_latex_table_escapes_what_tex_would_read():
    lines = latex_table([("a_b", "50%"), ("c&d", "$1 #2 {x} ~ ^")]).splitlines()
    assert lines[0] == r"% needs \usepackage{booktabs}"
    assert lines[3] == r"a\_b & 50\% \\"
    assert lines[5] == r"c\&d & \$1 \#2 \{x\} \textasciitilde{} \textasciicircum{} \\"
    *_, numbers, _, _ = latex_table([("a-1", "x"), ("-0.5", "[-0.1, +0.2] 1e-05")]).splitlines()
    assert numbers == r"$-$0.5 & [$-$0.1, +0.2] 1e-05 \\"
