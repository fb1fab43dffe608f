"""A sweep of real runs on this machine: killed cells are tried again, alone, and end with the same
losses.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.cli import main as launcher
from pretrain.cli import main as pretrain
from pretrain.rundir.code_version import code_version
from pretrain.rundir.run_dir import RunDir
from pretrain.scaling.collect import Row, row_of
from pretrain.scaling.sweep_file import read_sweep
from pretrain.scaling.which_runs import cells_of

STEPS = 300
CELLS = ("narrow", "wide", "other-seed")


@pytest.fixture(scope="module")
def sweep(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "tiny.yaml").write_text(
        f"""model: {{num_layers: 2, d_model: 32, num_heads: 2, memory_length: 8}}
data: {{path: {tiny_corpus}, lanes: 4, segment_length: 8}}
optim: {{steps: {STEPS}}}
engine: {{kind: torch}}
checkpoint: {{interval: 50}}
evaluation: {{interval: 0, max_tokens: 200}}
metrics: {{interval: 10, tensorboard: false}}
"""
    )
    overrides = {"narrow": "[model.d_model=16]", "wide": "[]", "other-seed": "[seed=2]"}
    cells = "".join(
        f"- {{name: {name}, experiment: tiny.yaml, overrides: {overrides[name]}}}\n"
        for name in CELLS
    )
    (folder / "sweep.yaml").write_text(f"format: 1\nname: tiny\ncells:\n{cells}")
    return folder / "sweep.yaml"


def submit(sweep: Path, runs: Path) -> subprocess.Popen[str]:
    options = ["--local", "--jobs=2", f"--runs-dir={runs}"]
    command = [sys.executable, "-m", "launcher", "sweep", "submit", str(sweep), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def losses(runs: Path, cell: str) -> list[float]:
    return [line["loss"] for line in RunDir(runs / cell).read_metrics() if line["kind"] == "train"]


def table(sweep: Path, runs: Path) -> list[Row]:
    """What `collect` makes of the runs, but for the time they took."""
    cells = cells_of(read_sweep(sweep), sweep, runs)
    return [replace(row_of(cell), seconds=0.0) for cell in cells]


def test_killed_cells_are_tried_again_alone_and_end_as_if_nothing_had_happened(
    sweep, tmp_path, capsys
):
    first = submit(sweep, tmp_path / "killed")
    assert first.stdout is not None
    lines = [first.stdout.readline() for _ in range(3)]
    pids = {
        match[1]: int(match[2])
        for line in lines
        if (match := re.match(r"(\S+): process (\d+)", line))
    }
    assert set(pids) == {"wide", "other-seed"}, "the cells with most FLOPs begin"
    alive = dict(pids)
    while alive:
        assert first.poll() is None
        for cell in [cell for cell in alive if len(losses(tmp_path / "killed", cell)) >= 60]:
            os.kill(alive.pop(cell), signal.SIGKILL)
    output, _ = first.communicate()
    assert first.returncode == 2, output
    assert "2 cells failed" in output

    second, _ = submit(sweep, tmp_path / "killed").communicate()
    assert "1 of 3 cells are done" in second
    assert set(re.findall(r"(\S+): process", second)) == {"wide", "other-seed"}
    assert "all 3 cells are done" in second

    undisturbed = submit(sweep, tmp_path / "undisturbed")
    output, _ = undisturbed.communicate()
    assert undisturbed.returncode == 0, output
    for cell in CELLS:
        assert len(losses(tmp_path / "killed", cell)) == STEPS
        assert losses(tmp_path / "killed", cell) == losses(tmp_path / "undisturbed", cell)
    assert table(sweep, tmp_path / "killed") == table(sweep, tmp_path / "undisturbed")
    assert {row.code for row in table(sweep, tmp_path / "killed")} == {code_version()}

    _check_that_all_places_show_the_same_losses(sweep, tmp_path / "killed", capsys)


def _check_that_all_places_show_the_same_losses(
    sweep: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Progress, status, report, compare.csv and sweep status, of a cell."""
    cell = "narrow"
    run = runs / cell
    steps = losses(runs, cell)[-10:]
    train = f"{sum(steps) / len(steps):.4f}"
    assert train != f"{steps[-1]:.4f}"
    log = max((run / "logs").glob("attempt-*/rank-*.log")).read_text()
    validation = re.findall(r"validation loss (\d\.\d{4})", log)[-1]
    assert re.findall(r"train loss (\d\.\d{4})", log)[-1] == train
    assert launcher(["status", str(run)]) == 0
    assert re.search(rf"train loss +{train}\s+validation loss +{validation}", printed(capsys))
    assert launcher(["status", str(run), "--json"]) == 0
    tree = json.loads(printed(capsys))
    found = [f"{tree[name]:.4f}" for name in ("train_loss", "validation_loss")]
    assert found == [train, validation]
    assert pretrain(["report", str(run)]) == 0
    assert f"train loss {train}, validation loss {validation}, " in printed(capsys)
    page = (run / "report.html").read_text()
    assert f"<b>{train}</b><span>train loss" in page
    assert f"<b>{validation}</b><span>validation loss" in page
    assert pretrain(["report", str(run), str(runs / "wide")]) == 0
    compared = printed(capsys)
    assert re.search(rf"train loss +{train} +\d\.\d{{4}}\n", compared)
    assert re.search(rf"validation loss +{validation} +\d\.\d{{4}}\n", compared)
    assert launcher(["sweep", "status", str(sweep), f"--runs-dir={runs}"]) == 0
    states = printed(capsys)
    assert re.search(rf"{cell} +{train} +{validation} ", states)
    assert states.count("done") == len(CELLS) + 1
    with open(runs / "compare.csv") as file:
        (row,) = [row for row in csv.DictReader(file) if row["run"] == cell]
    found = [f"{float(row[name]):.4f}" for name in ("train_loss", "validation_loss")]
    assert found == [train, validation]
    printed(capsys)


@pytest.fixture(scope="module")
def tuned(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two plans of equally named cells in one directory: adamw.yaml, trained, and muon.yaml."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "tiny.yaml").write_text(
        f"""name: tiny
model: {{num_layers: 1, d_model: 16, num_heads: 2, memory_length: 8}}
data: {{path: {tiny_corpus}, lanes: 4, segment_length: 8}}
optim: {{steps: 6}}
engine: {{kind: torch}}
evaluation: {{max_tokens: 200}}
metrics: {{interval: 2, tensorboard: false}}
"""
    )
    with pytest.MonkeyPatch.context() as here:
        here.chdir(folder)
        for name in ("adamw", "muon"):
            plan = ["scale", "plan", "tiny.yaml", "--rates", "1e-3", "2e-3", "4e-3"]
            options = ["--name", "rates", "--output", f"{name}.yaml"]
            assert pretrain([*plan, *options, f"optim.name={name}"]) == 0
        assert launcher(["sweep", "submit", "adamw.yaml", "--local"]) == 0
    return folder


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (launcher, ["sweep", "submit", "SWEEP", "--local"]),
        (pretrain, ["scale", "collect", "SWEEP"]),
        (pretrain, ["report", "SWEEP"]),
    ],
    ids=lambda value: "-".join(value[:3]) if isinstance(value, list) else value.__module__,
)
def test_no_reader_takes_the_runs_of_one_optimizer_for_cells_of_another(
    tuned, monkeypatch, capsys, program, words
):
    monkeypatch.chdir(tuned)
    assert program([word.replace("SWEEP", "muon.yaml") for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "cell lr0.001: the run in runs/rates/lr0.001 has" in captured.err
    assert "has other settings: optim.name adamw -> muon (and 2 more such cells)" in captured.err
    assert not re.search(r"\d\.\d{4}|done", captured.out), "nothing of theirs is shown"


def test_the_status_of_a_sweep_marks_runs_of_other_settings_and_shows_none_of_their_numbers(
    tuned, monkeypatch, capsys
):
    monkeypatch.chdir(tuned)
    assert launcher(["sweep", "status", "adamw.yaml"]) == 0
    own = printed(capsys)
    assert own.count("done") == 4
    losses = set(re.findall(r"\d\.\d{4}", own))
    assert len(losses) > 3
    assert launcher(["sweep", "status", "muon.yaml"]) == 0
    marked = printed(capsys)
    assert marked.count("optim.name adamw -> muon") == 3
    assert "0 of 3 cells are done, 3 other settings" in marked
    assert not losses & set(re.findall(r"\d\.\d{4}", marked))


def test_an_edit_of_the_experiment_counts_unless_a_resume_may_make_it(
    tuned, tmp_path, monkeypatch, capsys
):
    shutil.copytree(tuned, tmp_path / "tuned")
    monkeypatch.chdir(tmp_path / "tuned")
    experiment = Path("tiny.yaml")
    text = experiment.read_text()
    experiment.write_text(text + "checkpoint: {keep_last: 7}\n")
    assert launcher(["sweep", "submit", "adamw.yaml", "--local"]) == 0
    assert "all 3 cells are done" in printed(capsys)
    experiment.write_text(text.replace("d_model: 16", "d_model: 32"))
    assert launcher(["sweep", "submit", "adamw.yaml", "--local"]) == 2
    assert "has other settings: model.d_model 16 -> 32" in capsys.readouterr().err


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out
