"""`pretrain scale` from the plan to the report, on runs whose losses follow a known law."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from foundation.files import write_text
from foundation.settings import load_config
from pretrain import scaling
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of
from pretrain.scaling.sweep_file import read_sweep
from tests.helpers.scaling import HOFFMANN, PUBLISHED_DATA, simulated
from tests.helpers.scaling_runs import command


def test_plan_prints_shapes_costs_and_the_total(swept, capsys):
    arguments = ("--budgets", "1e14", "1e15", "--output", swept / "other.yaml")
    arguments += ("--no-checks",)
    assert command("plan", swept / "books.yaml", *arguments) == 0
    said = capsys.readouterr().out
    assert re.search(r"total: 10 runs, 5\.\d+e\+15 FLOPs ", said)
    assert "note: no corpus at absent" in said
    assert re.search(
        r"^every run: optim\.schedule\.warmup_steps is 5% of its steps .*, ", said, re.M
    )
    assert "rate and lanes are those of the Step Law; --rule base keeps the experiment's" in said


def test_fit_of_the_collected_table_finds_the_law_and_predicts_the_hold_out(collected, capsys):
    assert command("fit", collected / "runs.csv", "--json", collected / "fit.json") == 0
    text = (collected / "fit.json").read_text()
    tree = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert tree["rely_on"] == "parametric"
    assert tree["laws"]["lowest"]["optima"][0]["a"]["low"] is None
    numbers = tree["laws"]["parametric"]["numbers"]
    assert numbers["alpha"]["value"] == pytest.approx(HOFFMANN.alpha, rel=1e-3)
    assert numbers["E"]["value"] == pytest.approx(HOFFMANN.E, rel=1e-3)
    assert abs(tree["holdouts"][0]["error"]) < 1e-4
    said = capsys.readouterr().out
    assert "18 runs at 3 budgets" in said
    assert "rely on 3 parametric: fitted without 1e+16 FLOPs, it predicts those losses" in said
    assert "at 1e+17 FLOPs, 10 times the largest budget" in said
    assert command("fit", collected / "runs.csv", "--verbose", "--flops", "3e16") == 0
    said = capsys.readouterr().out
    assert "at 3e+16 FLOPs, 3 times the largest budget" in said
    assert re.search(r"left out: c1e17-\S+-holdout: held out: predicted, not fitted", said)


def test_predict_writes_an_experiment_that_is_the_optimum(collected, capsys):
    written = collected / "best.yaml"
    question = ("predict", collected / "runs.csv", "--flops", "1e17")
    assert command(*question, "--experiment", collected / "books.yaml", "--write", written) == 0
    said = capsys.readouterr().out
    assert "near-optimal at 1e+17 FLOPs: N from" in said
    run = load_config(RunConfig, written)
    cost = cost_of(run)
    assert cost.flops == pytest.approx(1e17, rel=0.01)
    best = float(re.search(r"3 parametric +\S+ +([\d.]+)M", said)[1]) * 1e6
    assert cost.parameters == pytest.approx(best, rel=0.1)
    assert written.read_text().startswith("# The optimum at 1e+17 FLOPs by 3 parametric: loss ")


def test_a_plan_can_be_centered_on_earlier_runs(collected):
    out = collected / "next.yaml"
    around = (
        "--budgets",
        "1e17",
        "--no-checks",
        "--around",
        collected / "runs.csv",
        "--output",
        out,
        "--sizes",
        3,
    )
    assert command("plan", collected / "books.yaml", *around) == 0
    sweep = read_sweep(out)
    assert any("centered on 3 parametric of runs.csv" in note for note in sweep.notes)
    losses = [
        float(HOFFMANN.loss(cell.facts["parameters"], cell.facts["tokens"])) for cell in sweep.cells
    ]
    assert losses[1] == min(losses)


def test_predict_answers_for_one_run_and_refuses_wild_questions(collected, capsys):
    assert command("predict", collected / "runs.csv", "--params", "1e7", "--tokens", "1e9") == 0
    assert re.search(r"loss of N = 10M over D = 1G .*: 4\.\d+\n", capsys.readouterr().out)
    assert command("predict", collected / "runs.csv", "--flops", "1e22") == 2
    assert re.fullmatch(
        r"error: prediction rejected as extrapolation: 1e\+22 FLOPs are .* --force\n",
        capsys.readouterr().err,
    )
    assert command("predict", collected / "runs.csv", "--flops", "1e22", "--force") == 0
    assert "doubt: 1e+22 FLOPs are" in capsys.readouterr().out


def test_no_part_of_it_needs_torch_and_reading_a_sweep_needs_no_numpy():
    modules = [f"pretrain.scaling.{path.stem}" for path in Path(scaling.__path__[0]).glob("*.py")]
    for heavy, names in (
        ("torch", modules),
        ("numpy", ["pretrain.scaling.sweep_file", "pretrain.commands.scale"]),
    ):
        code = f"import sys, {', '.join(names)}\nassert {heavy!r} not in sys.modules"
        subprocess.run(
            [sys.executable, "-c", code], check=True, cwd=Path(scaling.__path__[0]).parents[1]
        )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("N,D,final\n1,2,3\n", "no column 'loss'"),
        ("N,D,loss\n1,2,nan\n", "expected a finite number"),
        ("N,D,loss\n1,2,-3\n", "expected a positive number"),
        (
            "N,D,loss\n" + "".join(f"{n},{10**9 // n},3\n" for n in range(100, 110)),
            "share one budget",
        ),
        ("N,D,loss\n100,200,3\n100,900,2.9\n", "no law fits these runs"),
    ],
)
def test_bad_tables_take_one_clear_line_and_status_2(tmp_path, capsys, text, said):
    write_text(tmp_path / "runs.csv", text)
    assert command("fit", tmp_path / "runs.csv") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert said in error


def test_wrong_questions_take_one_line(collected, capsys):
    runs = collected / "runs.csv"
    for arguments, said in (
        (("predict", runs), "give a positive --flops, --tokens or --params"),
        (("predict", runs, "--flops", "1e16", "--write", "x.yaml"), "--write needs --experiment"),
        (
            ("predict", runs, "--flops", "1e16", "--experiment", collected),
            "is a directory; give a YAML file",
        ),
        (
            ("predict", runs, "--params", "1e6", "--tokens", "1e8", "--law", "isoflop"),
            "--law has no effect with both --tokens and --params",
        ),
        (("fit", collected), "is a directory; name a file: expected a CSV or JSON file"),
        (
            ("fit", runs, "--column", "size=N"),
            "expected ROLE=NAME with one of the roles parameters, tokens",
        ),
        (
            ("collect", collected / "sweep.yaml", "--runs-dir", collected / "nowhere"),
            "is not a directory",
        ),
    ):
        assert command(*arguments) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def test_a_place_that_cannot_hold_the_result_is_refused_before_the_work(
    collected, tmp_path, capsys
):
    runs, sweep, books = (collected / name for name in ("runs.csv", "sweep.yaml", "books.yaml"))
    file = tmp_path / "file"
    write_text(file, "kept")
    for arguments, said in (
        (
            ("fit", runs, "--json", tmp_path),
            f"--json {tmp_path} is a directory; name a file, such as",
        ),
        (
            ("fit", runs, "--json", file / "fit.json"),
            f"{file} is a file, not a directory",
        ),
        (("report", runs, "--output", file), f"--output {file} is a file; name a directory"),
        (
            ("report", runs, "--output", file / "report"),
            f"{file} is a file, not a directory",
        ),
        (
            ("collect", sweep, "--runs-dir", collected / "runs", "--output", tmp_path),
            "is a directory; name a file",
        ),
        (
            ("plan", books, "--budgets", "1e15", "--output", tmp_path),
            f"--output {tmp_path} is a directory",
        ),
        (
            ("predict", runs, "--flops", "1e16", "--experiment", books, "--write", tmp_path),
            "--write",
        ),
    ):
        assert command(*arguments) == 2
        printed = capsys.readouterr()
        assert said in printed.err
        assert printed.err.count("\n") == 1
        assert not printed.out
    assert file.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "question", [("--flops", "1e15"), ("--tokens", "1e8"), ("--params", "5e6")]
)
def test_predict_gives_the_optimum_by_each_law_with_intervals(tmp_path, capsys, question):
    points = simulated(budgets=(1e14, 1e16, 5), num_sizes=6, noise=0.03, seed=1)
    columns = points.parameters_P, points.tokens_P, points.flops_P, points.loss_P
    rows = "".join(",".join(map(repr, row)) + "\n" for row in np.stack(columns, 1).tolist())
    write_text(tmp_path / "runs.csv", "N,D,C,loss\n" + rows)
    assert command("predict", tmp_path / "runs.csv", *question) == 0
    printed = capsys.readouterr().out.splitlines()
    start = next(index for index, line in enumerate(printed) if "by each law" in line)
    _, head, *rows = printed[start : start + 6]
    assert head.split() == ["law", "C", "N*", "D*", "loss"]
    cells = {row[:9]: re.findall(r"(\S+) \[(\S+), (\S+)\]", row) for row in rows}
    assert len(cells["3 paramet"]) == 3
    assert len(cells["2 IsoFLOP"]) == 3
    assert cells["1 lowest "] == []
    assert all(re.fullmatch(r"\d\.\d+", loss) for loss in cells["3 paramet"][-1])


def test_others_data_are_fitted_with_their_own_column_names(capsys):
    roles = ("--column", "loss=c4_loss", "--column", "name=run")
    rows = ("--exclude", "mode=extra: not part of the published fit", "--holdout", "mode=eval")
    assert command("fit", PUBLISHED_DATA / "olmo_ladder.csv", *roles, *rows) == 0
    assert (
        "held out peteish13_eval_final: measured 2.4379, predicted 2.3" in capsys.readouterr().out
    )
