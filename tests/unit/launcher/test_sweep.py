"""`launcher sweep` before anything runs; with real ranks: tests/integration, with real Slurm: tests/slurm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.cells import CellRun, in_words, read_cells
from launcher.cli import main
from launcher.cluster import ClusterConfig
from launcher.sbatch import NodeRange
from launcher.sweep_jobs import array_of, classes
from pretrain.run_dir import RunDir
from pretrain.scaling.sweep_file import read_sweep

CLUSTER = ClusterConfig(ranks_per_node=2)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Three cells; the second one has 3 lanes, the others 8."""
    (tmp_path / "tiny.yaml").write_text("model: {vocab_size: 300}\ndata: {lanes: 8}\noptim: {steps: 10}\n")
    (tmp_path / "cluster.yaml").write_text("ranks_per_node: 2\n")
    cells = "".join(
        f"- {{name: {name}, experiment: tiny.yaml, overrides: [{override}]}}\n"
        for name, override in (("plain", "seed=1"), ("odd", "data.lanes=3"), ("other", "seed=2"))
    )
    (tmp_path / "sweep.yaml").write_text(f"format: 1\nname: three\ncells:\n{cells}")
    return tmp_path / "sweep.yaml"


def cells_of(sweep: Path) -> list[CellRun]:
    return read_cells(read_sweep(sweep), sweep, sweep.parent / "runs")


def make_done(cell: CellRun) -> None:
    run_dir = RunDir.create(cell.path, cell.config)
    run_dir.metrics.write_text(f'{{"kind": "train", "step": {cell.config.optim.steps}, "loss": 1.0}}\n')
    run_dir.append_ledger({"event": "finish", "step": cell.config.optim.steps})


def test_each_cell_gets_the_fewest_nodes_and_cells_with_equally_many_share_an_array(sweep):
    found = classes(cells_of(sweep), replace(CLUSTER, ranks_per_node=1), NodeRange(2, 4))
    names = {count: [cell.cell.name for cell in group] for count, group in found.items()}
    assert names == {2: ["plain", "other"], 3: ["odd"]}


def test_a_cell_that_no_number_of_nodes_holds_is_named(sweep, capsys):
    assert main(["sweep", "submit", str(sweep), f"--cluster={sweep.parent / 'cluster.yaml'}", "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert "cell odd: data.lanes=3 does not divide over 2 ranks" in error
    assert error.count("\n") == 1


def test_an_arrays_name_follows_from_its_cells_and_what_they_were_submitted_as_before(sweep):
    cells = [cells_of(sweep)[index] for index in (0, 2)]
    runs = sweep.parent / "runs"
    first, script = array_of(cells, 1, CLUSTER, "three", runs, at_a_time=None)
    again, _ = array_of(cells, 1, CLUSTER, "three", runs, at_a_time=None)
    cells[0] = replace(cells[0], state=replace(cells[0].state, job="17_0"))
    retried, _ = array_of(cells, 1, CLUSTER, "three", runs, at_a_time=None)
    assert first.name == again.name != retried.name
    assert "#SBATCH --array=0,2\n" in script
    assert f"#SBATCH --job-name={first.name}\n" in script


def test_done_cells_are_skipped_and_a_cell_whose_sweep_asks_for_more_steps_is_not_done(sweep):
    first, *_ = cells_of(sweep)
    make_done(first)
    cells = cells_of(sweep)
    assert [cell.is_done for cell in cells] == [True, False, False]
    assert [cell.is_waiting for cell in cells] == [False, True, True]
    assert in_words(cells) == "1 of 3 cells are done"
    (sweep.parent / "tiny.yaml").write_text("model: {vocab_size: 300}\ndata: {lanes: 8}\noptim: {steps: 20}\n")
    assert cells_of(sweep)[0].is_waiting


def test_cells_on_their_way_are_neither_done_nor_started_again(sweep):
    cell = cells_of(sweep)[2]
    run_dir = RunDir.create(cell.path, cell.config)
    with run_dir.locked("launcher"):
        cells = cells_of(sweep)
    assert [cell.is_waiting for cell in cells] == [True, True, False]
    assert in_words(cells) == "0 of 3 cells are done, 1 on their way"


def test_status_shows_cells_that_have_not_begun_too(sweep, capsys):
    assert main(["sweep", "status", str(sweep), f"--runs-dir={sweep.parent / 'runs'}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:4]] == ["new"] * 3
    assert lines[4] == "0 of 3 cells are done"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "neither --local nor --cluster is given"),
        (["--local", "--jobs=0"], "--jobs=0 must be 1 or more"),
        (["--local", "--ranks=0"], "--ranks=0 must be 1 or more"),
        (["--local", "--dry-run"], "--dry-run prints batch scripts"),
        (["--cluster={folder}/cluster.yaml", "--nodes=x"], "--nodes=x is neither a number nor a range"),
        (["--cluster=nowhere.yaml"], "nowhere.yaml does not exist"),
    ],
)
def test_bad_input_gets_one_line_and_leaves_nothing(sweep, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(sweep.parent)
    assert main(["sweep", "submit", str(sweep), *(text.format(folder=sweep.parent) for text in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (sweep.parent / "runs").exists()


def test_without_slurm_a_submission_says_so_in_one_line(sweep, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    cluster = tmp_path / "one.yaml"
    cluster.write_text("ranks_per_node: 1\n")
    assert main(["sweep", "submit", str(sweep), f"--cluster={cluster}"]) == 2
    error = capsys.readouterr().err
    assert "no Slurm on this host" in error
    assert error.count("\n") == 1
