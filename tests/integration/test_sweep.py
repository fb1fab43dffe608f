"""A sweep of real runs on this machine: a killed cell is tried again, alone, and ends with the same
losses; runs of other settings are nobody's cells; a trunk's branches equal runs trained alone.
"""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from foundation.files import write_text
from launcher.cli import main as launcher
from pretrain.cli import main as pretrain
from pretrain.rundir.code_version import code_version
from pretrain.rundir.run_dir import RunDir
from pretrain.scaling.collect import row_of
from pretrain.sweeps.cell_runs import cells_of, config_of
from pretrain.sweeps.sweep_file import read_sweep

STEPS = 160
CELLS = {"narrow": "model.d_model=16", "wide": "seed=1", "wide-again": "seed=1"}
RUNS = Path("runs/tiny")


@dataclass(frozen=True)
class Trained:
    """The folder of a sweep whose cell `wide` was killed once, and what both submissions said."""

    folder: Path
    first: str
    second: str


def sweep_text(optimizer: str) -> str:
    cells = "".join(
        f"- {{name: {name}, experiment: tiny.yaml, overrides: [{override}, {optimizer}]}}\n"
        for name, override in CELLS.items()
    )
    return f"format: 1\nname: tiny\ncells:\n{cells}"


def submit() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "launcher", "sweep", "submit", "sweep.yaml", "--local", "-j2"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def losses(cell: str) -> list[float]:
    metrics = RunDir(RUNS / cell).read_metrics()
    return [line["loss"] for line in metrics if line["kind"] == "train"]


@pytest.fixture(scope="module")
def trained(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("sweep")
    write_text(
        folder / "tiny.yaml",
        f"""model: {{num_layers: 2, d_model: 32, num_heads: 2, memory_length: 8}}
data: {{path: {tiny_corpus}, lanes: 4, segment_length: 8}}
optim: {{steps: {STEPS}}}
engine: {{kind: torch}}
checkpoint: {{interval: 20}}
evaluation: {{interval: 0, max_tokens: 200}}
metrics: {{interval: 10, tensorboard: false}}
""",
    )
    write_text(folder / "sweep.yaml", sweep_text("optim.name=adamw"))
    write_text(folder / "muon.yaml", sweep_text("optim.name=muon"))
    with pytest.MonkeyPatch.context() as here:
        here.chdir(folder)
        process = submit()
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        pids = dict(re.findall(r"(\S+): process (\d+)", "".join(lines)))
        assert pids.keys() == {"wide", "wide-again"}, "the cells with most FLOPs begin"
        while len(losses("wide")) < 30:
            assert process.poll() is None
        os.kill(int(pids["wide"]), signal.SIGKILL)
        first, _ = process.communicate()
        assert process.returncode == 2, first
        second, _ = submit().communicate()
    return Trained(folder, first, second)


def test_a_killed_cell_is_tried_again_alone_and_ends_as_if_undisturbed(trained, monkeypatch):
    monkeypatch.chdir(trained.folder)
    assert re.search(r"\b1 \w+ failed: wide\b", trained.first)
    assert "2 of 3 " in trained.second
    assert re.findall(r"(\S+): process", trained.second) == ["wide"]
    assert "all 3 cells" in trained.second
    assert len(losses("wide")) == STEPS
    assert losses("wide") == losses("wide-again")
    cells = cells_of(read_sweep(Path("sweep.yaml")), Path("sweep.yaml"), RUNS)
    _, wide, again = (replace(row_of(cell), seconds=0.0, name="") for cell in cells)
    assert wide == again
    assert wide.code == code_version()


def test_all_places_show_the_same_losses(trained, monkeypatch, capsys):
    """Progress, status, report, compare.csv and sweep status, of a cell."""
    monkeypatch.chdir(trained.folder)
    run = str(RUNS / "narrow")
    steps = losses("narrow")[-10:]
    train = f"{sum(steps) / len(steps):.4f}"
    assert train != f"{steps[-1]:.4f}"
    log = max((RUNS / "narrow" / "logs").glob("attempt-*/rank-*.log")).read_text()
    validation = re.findall(r"validation loss (\d\.\d{4})", log)[-1]
    assert re.findall(r"train loss (\d\.\d{4})", log)[-1] == train
    assert launcher(["status", run]) == 0
    assert re.search(rf"train loss +{train}\s+validation loss +{validation}", printed(capsys))
    assert launcher(["status", run, "--json"]) == 0
    tree = json.loads(printed(capsys))
    assert f"{tree['train_loss']:.4f} {tree['validation_loss']:.4f}" == f"{train} {validation}"
    assert pretrain(["report", run]) == 0
    assert f"train loss {train}, validation loss {validation}, " in printed(capsys)
    page = (RUNS / "narrow" / "report.html").read_text()
    for name, value in (("train", train), ("validation", validation)):
        assert f"<b>{value}</b><span>{name} loss" in page
    assert pretrain(["report", run, str(RUNS / "wide")]) == 0
    compared = printed(capsys)
    assert re.search(rf"^narrow .* {train} +{validation} ", compared, re.MULTILINE)
    with open(RUNS / "compare.csv") as file:
        (row,) = [row for row in csv.DictReader(file) if row["run"] == "narrow"]
    found = [f"{float(row[name]):.4f}" for name in ("train_loss", "validation_loss")]
    assert found == [train, validation]
    assert launcher(["sweep", "status", "sweep.yaml"]) == 0
    states = printed(capsys)
    assert re.search(rf"narrow +{train} +{validation} ", states)
    assert states.count("done") == len(CELLS) + 1


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (launcher, ["sweep", "submit", "muon.yaml", "--local"]),
        (pretrain, ["scale", "collect", "muon.yaml"]),
        (pretrain, ["report", "muon.yaml"]),
    ],
    ids=["submit", "collect", "report"],
)
def test_runs_of_another_optimizer_are_no_cells(trained, monkeypatch, capsys, program, words):
    monkeypatch.chdir(trained.folder)
    assert program(words) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert re.search(r"cell narrow: .* adamw -> muon \D*2 ", captured.err)
    assert not re.search(r"\d\.\d{4}|done", captured.out), "nothing of theirs is shown"


def test_sweep_status_marks_runs_of_other_settings_without_numbers(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained.folder)
    assert launcher(["sweep", "status", "muon.yaml"]) == 0
    marked = printed(capsys)
    assert marked.count("adamw -> muon") == 3
    assert re.search("0 of 3 .*, 3 other", marked)
    assert not re.search(r"\d\.\d{4}", marked)


def test_an_edit_counts_unless_a_resume_may_make_it(trained, tmp_path, monkeypatch, capsys):
    shutil.copytree(trained.folder, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    experiment = Path("tiny.yaml")
    text = experiment.read_text()
    experiment.write_text(text.replace("interval: 20", "interval: 20, keep_last: 7"))
    assert launcher(["sweep", "submit", "sweep.yaml", "--local"]) == 0
    assert "all 3 cells" in printed(capsys)
    experiment.write_text(text.replace("memory_length: 8", "memory_length: 4"))
    assert launcher(["sweep", "submit", "sweep.yaml", "--local"]) == 2
    assert "memory_length 8 -> 4" in capsys.readouterr().err


def test_a_cell_is_not_resumed_with_settings_that_are_not_its_own(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained.folder)
    changes = ("optim.steps=99", "optim.learning_rate=1e-4")
    assert launcher(["resume", str(RUNS / "wide"), *changes]) == 2
    refused = capsys.readouterr().err
    assert f"optim.steps {STEPS} -> 99" in refused
    assert f"'pretrain branch {RUNS / 'wide'}@last NEW {' '.join(changes)}'" in refused
    assert launcher(["resume", str(RUNS / "wide"), "checkpoint.keep_last=7"]) == 2
    assert "is done after step" in capsys.readouterr().err
    assert f"curves: pretrain report {RUNS}\n" in trained.second
    assert "scale collect" not in trained.second, "its cells are not planned"


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def trunks(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with trunks.yaml, whose cells are trained in runs/trunks."""
    folder = tmp_path_factory.mktemp("trunks")
    write_text(
        folder / "tiny.yaml",
        f"""name: tiny
model: {{num_layers: 2, d_model: 16, num_heads: 4, memory_length: 8, dropout: 0.1}}
data: {{path: {tiny_corpus}, lanes: 4, segment_length: 8}}
optim: {{learning_rate: 4e-3}}
engine: {{kind: torch}}
evaluation: {{max_tokens: 200}}
metrics: {{interval: 1, tensorboard: false}}
""",
    )
    with pytest.MonkeyPatch.context() as here:
        here.chdir(folder)
        plan = ["scale", "plan", "tiny.yaml", "--budgets", "3e8", "4.5e8", "--sizes", "1"]
        plan += ["--spread", "2", "--tokens-per-parameter", "0.6", "--rule", "base"]
        flags = ["--trunks", "--no-checks"]
        assert pretrain([*plan, *flags, "--output", "trunks.yaml"]) == 0
        assert launcher(["sweep", "submit", "trunks.yaml", "--local", "-j2"]) == 0
    return folder


def state(run: RunDir, step: int) -> dict[str, torch.Tensor]:
    files = run.checkpoints.glob(f"step-{step:08}/*.safetensors")
    return {key: value for file in files for key, value in load_file(file).items()}


def test_branches_equal_runs_that_were_trained_alone_with_their_schedule(trunks, monkeypatch):
    monkeypatch.chdir(trunks)
    cells = read_sweep(Path("trunks.yaml")).cells
    branches = [cell for cell in cells if cell.starts_from]
    assert branches
    for cell in branches:
        steps = config_of(cell, Path("trunks.yaml")).optim.steps
        assert 0 < cell.starts_at < steps
        branch, alone = RunDir(Path("runs/trunks") / cell.name), RunDir(Path("alone") / cell.name)
        train = ["train", "tiny.yaml", *cell.overrides, "--run-dir", str(alone.path)]
        assert pretrain(train) == 0
        torch.set_flush_denormal(False)  # training sets it for its process
        names = ("kind", "step", "loss")
        lines, others = (
            [[line[name] for name in names] for line in run.read_metrics()]
            for run in (branch, alone)
        )
        assert lines == others
        assert len(lines) > steps
        found, expected = state(branch, steps), state(alone, steps)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key], value), key


def test_runs_of_one_shape_share_a_start_and_the_plan_has_the_saving(trunks, monkeypatch, capsys):
    monkeypatch.chdir(trunks)
    sweep = read_sweep(Path("trunks.yaml"))
    (note,) = (note for note in sweep.notes if note.startswith("trunks: "))
    saved = re.search(r", (\d+)% saved", note)
    assert saved
    assert int(saved[1]) > 10
    by_name = {cell.name: cell for cell in sweep.cells}
    for cell in sweep.cells:
        run = config_of(cell, Path("trunks.yaml"))
        assert run.optim.schedule.shape == "wsd"
        if cell.starts_from:
            shorter = config_of(by_name[cell.starts_from], Path("trunks.yaml"))
            assert cell.starts_at == shorter.optim.steps - shorter.optim.decay_steps
            assert shorter.checkpoint.keep_every == cell.starts_at
            assert shorter.model == run.model
    assert pretrain(["scale", "collect", "trunks.yaml"]) == 0
    assert f"{len(by_name)} of {len(by_name)} " in capsys.readouterr().out
