"""Names of runs, folders and sweep files on a command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cli import main as launcher
from pretrain.cli import main as pretrain
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.run_paths import advice_on, run_path
from pretrain.scaling.which_runs import find_runs, runs_of

CELLS = ["memory_0", "memory_64", "memory_256"]
GRID = """format: 1
name: mem
experiment: tiny.yaml
grid: {model.memory_length: [0, 64, 256]}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a run `first`, and a sweep with what it keeps beside its cells."""
    RunDir.create(tmp_path / "runs" / "first", RunConfig(name="first"))
    for cell in CELLS:
        path = tmp_path / "runs" / "mem" / cell.replace("memory", "memory_length")
        model = ModelConfig(vocab_size=300, memory_length=int(cell.rpartition("_")[2]))
        RunDir.create(path, RunConfig(name=path.name, model=model))
        (tmp_path / "runs" / "mem" / "logs" / path.name).mkdir(parents=True)
    (tmp_path / "runs" / "mem" / "compare.csv").touch()
    (tmp_path / "runs" / "mem" / "sweep.lock").touch()
    (tmp_path / "tiny.yaml").write_text("name: tiny\nmodel: {vocab_size: 300}\n")
    (tmp_path / "mem.yaml").write_text(GRID)
    monkeypatch.chdir(tmp_path)
    return tmp_path


CELL_PATHS = [Path("runs/mem") / cell.replace("memory", "memory_length") for cell in CELLS]


def test_a_name_stands_for_the_run_in_runs_unless_there_is_such_a_path_here(here):
    assert run_path("first") == Path("runs/first")
    assert run_path("runs/first") == Path("runs/first")
    assert run_path("frist") == Path("frist")
    assert run_path(str(here / "first")) == here / "first"
    RunDir.create(here / "first", RunConfig(name="first"))
    assert run_path("first") == Path("first")


def test_the_advice_on_what_is_no_run_does_not_repeat_what_was_typed(here):
    Path("first").touch()
    assert advice_on(Path("first")) == "check the path or start a run"
    assert advice_on(Path("firs")) == "did you mean 'first'?"
    assert advice_on(Path("elsewhere/first")) == "did you mean 'first'?"
    Path("export").mkdir()
    Path("export/model.safetensors").touch()
    assert advice_on(Path("export")).startswith("it is an export, which 'pretrain evaluate'")


def test_a_folder_and_a_sweep_file_stand_for_the_cells_in_their_order(here):
    assert runs_of([Path("mem.yaml")]) == CELL_PATHS
    assert runs_of([Path("runs/mem")]) == CELL_PATHS
    assert runs_of([Path("runs/first"), Path("runs/mem"), Path("mem.yaml")]) == [
        Path("runs/first"),
        *CELL_PATHS,
    ]
    assert list(find_runs(Path("runs"))) == [Path("runs/first"), *CELL_PATHS]


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        (pretrain, ["report", "frist"], "frist holds no run: it has no run.json; did you mean"),
        (
            pretrain,
            ["generate", "mem"],
            "it is a sweep; its runs are runs/mem/memory_length_0, runs",
        ),
        (
            pretrain,
            ["describe", "mem"],
            "it is a sweep; its runs are runs/mem/memory_length_0, runs",
        ),
        (launcher, ["logs", "mem"], "it is a sweep; its runs are runs/mem/memory_length_0, runs"),
        (launcher, ["cancel", "nowhere"], "nowhere holds no run: it has no run.json; check"),
        (launcher, ["status", "tiny.yaml"], "tiny.yaml is not a sweep (it has neither"),
        (pretrain, ["export", "tiny.yaml", "--output=x"], "name the run's directory, by default"),
        (pretrain, ["report", "other.yaml"], "none of its 3 cells has started in runs/other"),
        (pretrain, ["report", "mem.yaml"], "runs/mem/memory_length_0 has no measured step yet"),
    ],
)
def test_what_is_no_run_gets_one_line_that_says_what_to_name(
    here, capsys, program, arguments, message
):
    Path("other.yaml").write_text(GRID.replace("name: mem", "name: other"))
    assert program(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
