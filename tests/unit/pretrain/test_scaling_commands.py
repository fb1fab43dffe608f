"""`pretrain scale` from the plan to the report, on runs whose losses follow a known law."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.config_loader import load_config
from data_pipeline.files import write_text
from pretrain import scaling
from pretrain.commands import scale
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.training_events import Resumed, Started
from pretrain.scaling.collect import read_curves
from pretrain.scaling.sweep_file import config_of, read_sweep
from tests.helpers.metrics import train_line
from tests.helpers.scaling import HOFFMANN, PUBLISHED_DATA

EXPERIMENT = """
name: books
model: {vocab_size: 512, num_layers: 4, d_model: 128, num_heads: 8, memory_length: 64}
data: {segment_length: 64, lanes: 16, path: absent}
"""


def command(*arguments: object) -> int:
    return scale.PROGRAM.main([str(item) for item in arguments])


def train_by_the_law(
    directory, config: RunConfig, until: float = 1.0, loss: float | None = None
) -> None:
    """A run directory as training leaves it, with the losses that the law gives; `until` is the
    part that was done.
    """
    run_dir, cost = RunDir.create(directory, config), cost_of(config)
    last = round(until * config.optim.steps)
    lines = []
    for step in sorted({*range(1, last, max(1, last // 40)), last}):
        tokens = step * cost.tokens_per_step
        value = float(HOFFMANN.loss(cost.parameters, tokens))
        lines.append(train_line(step, value, tokens=tokens, seconds=2.0))
    if until == 1.0:
        final = lines[-1]["loss"] if loss is None else loss
        more = {"loss/code": final + 1, "tasks/quiz/acc": 0.5, "bits_per_byte": 0.4 * final}
        lines.append({"kind": "evaluation", "step": last, "loss": final, **more})
    write_text(run_dir.metrics, "".join(json.dumps(line) + "\n" for line in lines))
    run_dir.ledger.append(Started(step=0, world_size=1, code="v1-7-gabc"))


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A planned sweep whose cells have all run."""
    directory = tmp_path_factory.mktemp("sweep")
    write_text(directory / "books.yaml", EXPERIMENT)
    sweep_path = directory / "sweep.yaml"
    budgets = ("--budgets", "1e14", "1e15", "1e16", "--holdout-budgets", "1e17")
    assert (
        command("plan", directory / "books.yaml", *budgets, "--sizes", 6, "--out", sweep_path) == 0
    )
    for cell in read_sweep(sweep_path).cells:
        train_by_the_law(directory / "runs" / cell.name, config_of(cell, sweep_path))
    return directory


@pytest.fixture(scope="module")
def collected(swept):
    outputs = ("--out", swept / "runs.csv", "--curves-out", swept / "curves.csv")
    assert command("collect", swept / "sweep.yaml", "--runs-dir", swept / "runs", *outputs) == 0
    return swept


def test_tables_and_pages_are_beside_the_sweeps_runs_unless_told_otherwise(
    collected, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(collected / "runs", tmp_path / "mine")
    assert command("collect", collected / "sweep.yaml", "--runs-dir", "mine") == 0
    said = capsys.readouterr().out
    assert re.search(r"^cell +N +D +C +loss\nc1e14-", said, re.M)
    table = Path("mine/runs.csv")
    assert f"next: pretrain scale fit {table}, then pretrain scale report {table}\n" in said
    assert command("report", table) == 0
    said = capsys.readouterr().out
    assert re.search(r"^approach +a: N\* ~ C\^a", said, re.M)
    assert said.endswith("report: mine/scaling-report/report.html\n")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_plan_prints_shapes_costs_and_the_total(swept, capsys):
    arguments = ("--budgets", "1e14", "1e15", "--out", swept / "other.yaml", "--speed", "1e12")
    assert command("plan", swept / "books.yaml", *arguments) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"total: 10 runs, 5\.\d+e\+15 FLOPs .* 1\.5\d hours at 1e\+12 FLOPs per second", said
    )
    assert "note: no corpus at absent" in said
    assert re.search(
        r"^every run: optim\.schedule\.warmup_steps is 5% of its steps .*, ", said, re.M
    )
    assert "learning rate and lanes of the Step Law; --rule base keeps those\n" in said
    assert re.search(r"c1e15-d\d+-l\d+ .* [+-]0\.\d\d%", said)


def test_collected_table_has_exact_costs_and_the_last_evaluations_loss(collected):
    rows = list(csv.DictReader((collected / "runs.csv").read_text().splitlines()))
    sweep = read_sweep(collected / "sweep.yaml")
    assert [row["name"] for row in rows] == [cell.name for cell in sweep.cells]
    for row, cell in zip(rows, sweep.cells, strict=True):
        cost = cost_of(config_of(cell, collected / "sweep.yaml"))
        assert (int(row["N"]), int(row["N_body"]), int(row["D"])) == (
            cost.parameters,
            cost.body_parameters,
            cost.tokens,
        )
        assert (row["D_effective"], row["tasks/quiz/acc"]) == (row["D"], "0.5")
        assert float(row["loss/code"]) == pytest.approx(float(row["loss"]) + 1)
        assert float(row["bits_per_byte"]) == pytest.approx(0.4 * float(row["loss"]))
        assert float(row["C"]) == pytest.approx(cost.flops)
        assert float(row["C_6ND"]) == pytest.approx(6 * cost.parameters * cost.tokens)
        assert float(row["loss"]) == pytest.approx(
            float(HOFFMANN.loss(cost.parameters, cost.tokens))
        )
        assert (row["schedule"], row["code"], row["progress"]) == ("cosine", "v1-7-gabc", "1.0")
    assert [row["holdout"] for row in rows].count("yes") == 1


def test_fit_of_the_collected_table_finds_the_law_and_predicts_the_hold_out(collected, capsys):
    assert command("fit", collected / "runs.csv", "--json", collected / "fit.json") == 0
    text = (collected / "fit.json").read_text()
    tree = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert tree["approaches"]["envelope"]["a"]["low"] is None
    assert tree["law"]["alpha"]["value"] == pytest.approx(HOFFMANN.alpha, rel=1e-3)
    assert tree["law"]["E"]["value"] == pytest.approx(HOFFMANN.E, rel=1e-3)
    assert abs(tree["holdouts"][0]["error"]) < 1e-4
    said = capsys.readouterr().out
    assert "18 runs at 3 budgets" in said
    assert "1 envelope" in said
    assert (
        "the largest budget (1e+16 FLOPs) as a fit without it predicts it; errors are predicted minus measured"  # noqa: E501
        in said
    )
    assert (
        "at 1e+17 FLOPs, 10 times the largest budget, the largest N* of an approach is 1." in said
    )
    assert re.search(r"left out: c1e17-\S+-holdout: held out: predicted, not fitted", said)


def test_training_curves_feed_approach_1(collected, capsys):
    curves = read_curves(collected / "curves.csv")
    assert len(set(curves["run"])) == 18
    assert command("fit", collected / "runs.csv", "--curves", collected / "curves.csv") == 0
    assert "approach 1 envelope: training curves" in capsys.readouterr().out


def test_cells_without_a_final_loss_are_in_the_table_with_their_reason(collected, tmp_path, capsys):
    sweep_path = collected / "sweep.yaml"
    cells = read_sweep(sweep_path).cells
    runs = tmp_path / "runs"
    shutil.copytree(collected / "runs", runs)
    for cell in cells[:4]:
        shutil.rmtree(runs / cell.name)
    train_by_the_law(runs / cells[1].name, config_of(cells[1], sweep_path), until=0.5)
    train_by_the_law(runs / cells[2].name, config_of(cells[2], sweep_path), loss=float("nan"))
    train_by_the_law(runs / cells[3].name, config_of(cells[3], sweep_path))
    metrics = RunDir(runs / cells[3].name).metrics
    write_text(
        metrics,
        "".join(line for line in metrics.read_text().splitlines(True) if "evaluation" not in line),
    )
    RunDir(runs / cells[4].name).ledger.append(Resumed(step=9, world_size=1, code="v1-8-gdef"))
    assert command("collect", sweep_path, "--runs-dir", runs, "--out", tmp_path / "runs.csv") == 0
    reasons = {
        row["name"]: row["excluded"]
        for row in csv.DictReader((tmp_path / "runs.csv").read_text().splitlines())
    }
    assert "not started" in reasons[cells[0].name]
    assert re.fullmatch(r"stopped at step \d+ of \d+: mid-schedule", reasons[cells[1].name])
    assert reasons[cells[2].name] == "diverged: its last evaluation's loss is NaN or infinite"
    assert reasons[cells[3].name] == "finished without a last evaluation"
    said = capsys.readouterr().out
    assert "15 of 19 cells have a final loss" in said
    assert "note: 2 versions of the code trained these cells" in said
    assert command("fit", tmp_path / "runs.csv") == 0
    said = capsys.readouterr().out
    assert all(
        f"left out: {cells[index].name}: {reasons[cells[index].name]}" in said for index in range(4)
    )


def test_the_last_evaluations_are_averaged_where_asked_for(collected, tmp_path, capsys):
    sweep_path = collected / "sweep.yaml"
    cell = read_sweep(sweep_path).cells[0]
    runs = tmp_path / "runs"
    train_by_the_law(runs / cell.name, config_of(cell, sweep_path), loss=3.0)
    metrics = RunDir(runs / cell.name).metrics
    earlier = [{"kind": "evaluation", "step": step, "loss": 3.0 + step} for step in (1, 2)]
    text = "".join(json.dumps(line) + "\n" for line in earlier) + metrics.read_text()
    write_text(metrics, text)
    output = ("--runs-dir", runs, "--out", tmp_path / "runs.csv")
    assert command("collect", sweep_path, *output, "--average-last", 3) == 0
    row = next(csv.DictReader((tmp_path / "runs.csv").read_text().splitlines()))
    assert float(row["loss"]) == pytest.approx(4.0)
    assert float(row["loss_error"]) == pytest.approx(1 / 3**0.5)
    assert float(row["bits_per_byte"]) == pytest.approx(0.4 * 4.0)
    assert "nothing to average" not in capsys.readouterr().out
    write_text(metrics, text.partition("\n")[2].partition("\n")[2])
    assert command("collect", sweep_path, *output, "--average-last", 3) == 0
    assert "note: nothing to average in 1 cell with one evaluation" in capsys.readouterr().out
    assert command("collect", sweep_path, *output) == 0
    row = next(csv.DictReader((tmp_path / "runs.csv").read_text().splitlines()))
    assert (float(row["loss"]), row["loss_error"]) == (3.0, "")
    assert command("collect", sweep_path, *output, "--average-last", 0) == 2
    assert "--average-last 0 must be 1 or more" in capsys.readouterr().err


def test_predict_writes_an_experiment_that_is_the_optimum(collected, capsys):
    written = collected / "best.yaml"
    question = ("predict", collected / "runs.csv", "--flops", "1e17")
    assert command(*question, "--experiment", collected / "books.yaml", "--write", written) == 0
    said = capsys.readouterr().out
    assert "near-optimal at 1e+17 FLOPs: N from" in said
    run = load_config(RunConfig, written)
    cost = cost_of(run)
    assert cost.flops == pytest.approx(1e17, rel=0.01)
    best = float(re.search(r"3 parametric +([\d.]+)M", said)[1]) * 1e6
    assert cost.parameters == pytest.approx(best, rel=0.1)
    assert written.read_text().startswith(
        "# The optimum at 1e+17 FLOPs by approach 3 parametric: loss "
    )


def test_a_plan_can_be_centered_on_earlier_runs(collected):
    out = collected / "next.yaml"
    around = ("--budgets", "1e17", "--around", collected / "runs.csv", "--out", out, "--sizes", 3)
    assert command("plan", collected / "books.yaml", *around) == 0
    sweep = read_sweep(out)
    assert "approach 3 parametric of runs.csv" in sweep.notes[0]
    losses = [
        float(HOFFMANN.loss(cell.facts["parameters"], cell.facts["tokens"])) for cell in sweep.cells
    ]
    assert losses[1] == min(losses)


def test_predict_answers_for_one_run_and_refuses_wild_questions(collected, capsys):
    assert command("predict", collected / "runs.csv", "--params", "1e7", "--tokens", "1e9") == 0
    assert re.search(r"loss of N = 10M over D = 1G .*: 4\.\d+ \[", capsys.readouterr().out)
    assert command("predict", collected / "runs.csv", "--flops", "1e22") == 2
    assert re.fullmatch(
        r"error: prediction rejected as extrapolation: 1e\+22 FLOPs are .* --force\n",
        capsys.readouterr().err,
    )
    assert command("predict", collected / "runs.csv", "--flops", "1e22", "--force") == 0
    assert "doubt: 1e+22 FLOPs are" in capsys.readouterr().out


def test_report_is_one_file_that_needs_no_network_with_its_pictures_beside_it(collected, capsys):
    out = collected / "report"
    arguments = ("--curves", collected / "curves.csv", "--title", "Books")
    assert command("report", collected / "runs.csv", "--out", out, *arguments) == 0
    page = (out / "report.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"|url\((?!#)', page)
    pictures = {path.stem for path in out.glob("*.png")}
    assert pictures == {
        "isoflop",
        "frontier",
        "sizes",
        "tokens",
        "residuals",
        "contours",
        "exponents",
        "optimum",
        "envelope",
    }
    assert page.count("<svg") == len(pictures)
    for picture in out.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    for words in (
        "<h1>Books</h1>",
        "Three approaches side by side",
        "Cost",
        "Left out",
        "run held out at 1e+17",
    ):
        assert words in page
    numbers = json.loads((out / "fit.json").read_text())
    assert numbers["num_runs"] == 18
    assert numbers["bits_per_byte_of_a_nat"] == pytest.approx(0.4)
    note = "1 nat per token is 0.4 bits per byte (3.61 bytes per token)"
    assert note in page
    assert numbers["notes"] == [note]
    printed = (out / "report.md").read_text()
    assert printed.startswith("# Books\n\n```\n18 runs at 3 budgets")
    assert set(re.findall(r"^!\[.+\]\((\w+)\.png\)$", printed, re.M)) == pictures


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
        ("N,D,loss\n100,200,3\n100,900,2.9\n", "no approach fits these runs"),
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
            ("predict", runs, "--flops", "1e16", "--approach", "bogus"),
            "--approach bogus is not an approach; expected one of: env",
        ),
        (
            ("predict", runs, "--flops", "1e16", "--experiment", collected),
            "is a directory; give a YAML file",
        ),
        (
            ("predict", runs, "--params", "1e6", "--tokens", "1e8", "--approach", "isoflop"),
            "--approach has no effect with both --tokens and --params",
        ),
        (("fit", collected), "is a directory; name a file: expected a CSV or JSON file"),
        (
            ("fit", runs, "--column", "size=N"),
            "expected ROLE=NAME with one of the roles parameters, tokens",
        ),
        (("fit", runs, "--curves", collected / "none.csv"), "none.csv does not exist"),
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
        (("report", runs, "--out", file), f"--output {file} is a file; name a directory"),
        (
            ("report", runs, "--out", file / "report"),
            f"{file} is a file, not a directory",
        ),
        (
            ("context", "report", runs, "--out", file),
            f"--output {file} is a file; name a directory",
        ),
        (
            ("collect", sweep, "--runs-dir", collected / "runs", "--out", tmp_path),
            "is a directory; name a file",
        ),
        (
            ("collect", sweep, "--runs-dir", collected, "--curves-out", tmp_path),
            f"--curves-out {tmp_path} is a dir",
        ),
        (
            ("plan", books, "--budgets", "1e15", "--out", tmp_path),
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
    ("question", "heads"),
    [
        (("--flops", "1e15"), ["approach", "N*", "D*", "loss"]),
        (("--tokens", "1e8"), ["approach", "N*", "C", "loss"]),
        (("--params", "5e6"), ["approach", "D*", "C", "loss"]),
    ],
)
def test_predict_gives_an_interval_to_everything_but_what_was_asked(
    collected, capsys, question, heads
):
    assert command("predict", collected / "runs.csv", *question) == 0
    first, head, *rows = capsys.readouterr().out.splitlines()
    asked = {
        "--flops": "at C = 1e+15 FLOPs",
        "--tokens": "that reads D = 100M tokens",
        "--params": "of N = 5M param",
    }
    assert asked[question[0]] in first
    assert first.endswith("by each approach; 95% intervals")
    assert head.split() == heads
    for row, title in zip(rows, ("1 envelope", "2 IsoFLOP", "3 parametric"), strict=False):
        assert row.startswith(title)
        if title == "1 envelope":
            assert "[" not in row
            continue
        cells = re.findall(r"(\S+) \[(\S+), (\S+)\]", row)
        assert len(cells) == 3
        assert all(re.fullmatch(r"\d\.\d{4}", loss) for loss in cells[-1])


def test_others_data_are_fitted_with_their_own_column_names(capsys):
    roles = ("--column", "loss=c4_loss", "--column", "name=run")
    rows = ("--exclude", "mode=extra: not part of the published fit", "--holdout", "mode=eval")
    assert command("fit", PUBLISHED_DATA / "olmo_ladder.csv", *roles, *rows) == 0
    said = capsys.readouterr().out
    assert "held out peteish13_eval_final: measured 2.4379, predicted 2.3444" in said
    assert "mean absolute error on the fitted runs 0.247%" in said
