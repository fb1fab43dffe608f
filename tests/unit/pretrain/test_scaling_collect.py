"""`pretrain scale collect`: the table of a sweep's runs."""

from __future__ import annotations

import csv
import re
import shutil
from pathlib import Path

import pytest

from foundation.files import write_text
from pretrain.costs.flops import cost_of
from pretrain.rundir.events import TrainingBegan
from pretrain.rundir.run_dir import RunDir
from pretrain.scaling.sweep_file import config_of, read_sweep
from tests.helpers.scaling import HOFFMANN
from tests.helpers.scaling_runs import command, train_by_the_law


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
        lines = (collected / "runs" / cell.name / "metrics.jsonl").read_text().splitlines()
        assert float(row["seconds"]) == 2.0 * (len(lines) - 1), "of steps alone"
        assert (row["schedule"], row["code"], row["progress"]) == ("cosine", "v1-7-gabc", "1.0")
    assert [row["holdout"] for row in rows].count("yes") == 1


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
    RunDir(runs / cells[4].name).ledger.append(
        TrainingBegan(step=9, world_size=1, code="v1-8-gdef")
    )
    assert (
        command("collect", sweep_path, "--runs-dir", runs, "--output", tmp_path / "runs.csv") == 0
    )
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
    assert command("fit", tmp_path / "runs.csv", "--verbose") == 0
    said = capsys.readouterr().out
    assert all(
        f"left out: {cells[index].name}: {reasons[cells[index].name]}" in said for index in range(4)
    )


def test_runs_of_other_settings_than_the_sweeps_are_no_rows_of_its_table(
    collected, tmp_path, capsys
):
    for name in ("books.yaml", "sweep.yaml"):
        shutil.copy(collected / name, tmp_path / name)
    edit = (tmp_path / "books.yaml").read_text().replace("memory_length: 64", "memory_length: 32")
    write_text(tmp_path / "books.yaml", edit)
    table = tmp_path / "runs.csv"
    runs = ("--runs-dir", collected / "runs", "--output", table)
    assert command("collect", tmp_path / "sweep.yaml", *runs) == 2
    error = capsys.readouterr().err
    assert "other settings: model.memory_length 64 -> 32 (and 18 more such cells)" in error
    assert error.count("\n") == 1
    assert not table.exists()


def test_a_run_of_fewer_steps_than_its_cell_has_now_stopped_before_its_end(
    collected, tmp_path, capsys
):
    shutil.copy(collected / "books.yaml", tmp_path)
    text = (collected / "sweep.yaml").read_text()
    longer = re.sub(r"optim.steps=(\d+)", r"optim.steps=\g<1>0", text)
    write_text(tmp_path / "sweep.yaml", longer)
    runs = ("--runs-dir", collected / "runs", "--output", tmp_path / "runs.csv")
    assert command("collect", tmp_path / "sweep.yaml", *runs) == 0
    assert "0 of 19 cells have a final loss" in capsys.readouterr().out
    for row in csv.DictReader((tmp_path / "runs.csv").read_text().splitlines()):
        assert re.fullmatch(r"stopped at step (\d+) of \1{1}0: mid-schedule", row["excluded"])


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
    assert re.search(r"^law +left-out error +N\* at", said, re.M)
    assert said.endswith("report: mine/scaling-report/report.html\n")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
