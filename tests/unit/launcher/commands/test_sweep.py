"""`launcher sweep` before anything runs; with real ranks: tests/integration, with real Slurm:
tests/slurm.
"""

import csv
import json
import math
import re
import shutil
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from launcher.cli import main
from launcher.slurm.sbatch import Snapshot
from launcher.status_tables import sweep_status
from launcher.sweep import CellRun, array_job, cells_by_nodes, describe, longest_first, read_cells
from pretrain.checkpoint.directory import step_directory
from pretrain.cli import main as pretrain
from pretrain.config.cluster import ClusterConfig, NodeRange
from pretrain.config.run import DataConfig, ModelConfig
from pretrain.costs.flops import run_cost
from pretrain.reporting.results import HEADS
from pretrain.rundir.events import Outcome, Rewind, Spike, Submitted, TrainingBegan, TrainingEnded
from pretrain.rundir.run_dir import RunDir
from pretrain.sweeps.sweep_file import read_sweep
from tests.helpers.checkout import ROOT
from tests.helpers.checkpoints import publish_step
from tests.helpers.metrics import train_line

CLUSTER = ClusterConfig(ranks_per_node=2)


def write_experiment(folder: Path, steps: int) -> None:
    text = f"model: {{vocab_size: 300}}\ndata: {{lanes: 8}}\noptim: {{steps: {steps}}}\n"
    (folder / "tiny.yaml").write_text(text)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Three cells; the second one has 3 lanes, the others 8."""
    write_experiment(tmp_path, steps=10)
    (tmp_path / "cluster.yaml").write_text("ranks_per_node: 2\n")
    cells = "".join(
        f"- {{name: {name}, experiment: tiny.yaml, overrides: [{override}]}}\n"
        for name, override in (("plain", "seed=1"), ("odd", "data.lanes=3"), ("other", "seed=2"))
    )
    (tmp_path / "sweep.yaml").write_text(f"format: 1\nname: three\ncells:\n{cells}")
    return tmp_path / "sweep.yaml"


def cells_of(sweep: Path) -> list[CellRun]:
    runs = sweep.parent / "runs" / ("grid" if sweep.name == "grid.yaml" else "")
    return read_cells(read_sweep(sweep), sweep, runs)


def make_done(cell: CellRun) -> None:
    run_dir = RunDir.create(cell.path, cell.config)
    steps = cell.config.optim.steps
    evaluation = {"kind": "evaluation", "step": steps, "loss": 2, "bits_per_byte": 1.25}
    evaluation |= {"loss_without_memory": 2.5, "perplexity": 7.4}
    interval = train_line(steps, train_loss=0.75, tokens_per_second=10.0, seconds=2.0)
    lines = [json.dumps(line) for line in (interval, evaluation)]
    run_dir.metrics.write_text("\n".join(lines) + "\n")
    run_dir.ledger.append(Rewind(spike=Spike(4, 6, 9.0, 1.0), to_step=2, segments=(2, 9)))
    run_dir.ledger.append(TrainingEnded(outcome=Outcome.FINISHED, step=steps))
    publish_step(run_dir.checkpoints, steps)


def test_each_cell_gets_the_fewest_nodes_and_cells_with_equally_many_share_an_array(sweep):
    found, _ = cells_by_nodes(cells_of(sweep), replace(CLUSTER, ranks_per_node=1), NodeRange(2, 4))
    names = {count: [cell.cell.name for cell in group] for count, group in found.items()}
    assert names == {2: ["plain", "other"], 3: ["odd"]}


@pytest.mark.parametrize(("planned", "given"), [(3, 3), (9, 4), (math.nan, 4)])
def test_a_cell_gets_the_nodes_it_was_planned_for_within_those_allowed(sweep, planned, given):
    cells = [cell for cell in cells_of(sweep) if cell.cell.name == "plain"]
    cells[0] = replace(cells[0], cell=replace(cells[0].cell, facts={"nodes": planned}))
    config = replace(cells[0].config, data=replace(cells[0].config.data, lanes=12))
    cells[0] = replace(cells[0], config=config)
    found, _ = cells_by_nodes(cells, replace(CLUSTER, ranks_per_node=1), NodeRange(2, 4))
    assert list(found) == [given]


def test_a_cell_that_no_number_of_nodes_holds_is_named(sweep, capsys):
    cluster = f"--cluster={sweep.parent / 'cluster.yaml'}"
    assert main(["sweep", "submit", str(sweep), cluster, "--dry-run"]) == 2
    said = capsys.readouterr()
    refused = [line for line in said.err.splitlines() if line.startswith("error: ")]
    assert re.search(r"cell odd: data\.lanes=3 .* 2 ", refused[0])
    assert len(refused) == 1
    assert "#SBATCH --array=0-1\n" in said.out, "the two others"


def test_a_cell_without_its_corpus_keeps_no_other_one_from_running(sweep, capsys):
    cells = cells_of(sweep)[::2]
    lost = replace(cells[0].config, model=replace(cells[0].config.model, vocab_size=0))
    found, num_refused = cells_by_nodes(
        [replace(cells[0], config=lost), cells[1]], CLUSTER, NodeRange(1, 1)
    )
    assert ([len(group) for group in found.values()], num_refused) == ([1], 1)
    assert capsys.readouterr().err.startswith(f"error: cell {cells[0].cell.name}: model.vocab_size")


def test_an_arrays_name_follows_from_its_cells_and_what_they_were_submitted_as_before(sweep):
    cells = [cells_of(sweep)[index] for index in (0, 2)]
    runs = sweep.parent / "runs"
    first, script = array_job(cells, 1, CLUSTER, "three", runs, at_a_time=None)
    again, _ = array_job(cells, 1, CLUSTER, "three", runs, at_a_time=None)
    cells[0] = replace(cells[0], state=replace(cells[0].state, job="17_0"))
    retried, _ = array_job(cells, 1, CLUSTER, "three", runs, at_a_time=None)
    assert first.name == again.name != retried.name
    assert "#SBATCH --array=0-1\n" in script
    assert f" --job-name={first.name}\n" in script


def test_a_limited_array_starts_when_those_of_an_earlier_submission_have_ended(sweep, capsys):
    text = sweep.read_text()
    sweep.write_text(text.replace("data.lanes=3", "data.lanes=2"))
    for index, cell in enumerate(cells_of(sweep)[:2]):
        Snapshot(cell.path).take_settings(cell.config, CLUSTER)
        RunDir(cell.path).ledger.append(Submitted(job=f"17_{index}", job_name="three-1"))
    command = ["sweep", "submit", str(sweep), f"--runs-dir={sweep.parent / 'runs'}", "--dry-run"]
    command += [f"--cluster={sweep.parent / 'cluster.yaml'}"]
    for limit, expected in (["--jobs=1"], "#SBATCH --dependency=afterany:17"), ([], None):
        assert main([*command, *limit]) == 0
        script = capsys.readouterr().out.splitlines()
        assert next((line for line in script if "--dependency" in line), None) == expected


def test_the_name_of_a_cell_with_many_settings_is_cut_and_stays_its_own(sweep):
    grid = sweep.parent / "grid.yaml"
    names = ["engine.watchdog_timeout_seconds", "checkpoint.storage_patience_seconds"]
    names += ["recovery.spike_threshold", "evaluation.interval", "evaluation.max_tokens"]
    settings = ", ".join(f"{name}: [111, 112]" for name in names)
    grid.write_text(f"format: 1\nname: grid\nexperiment: tiny.yaml\ngrid: {{{settings}}}\n")
    cells = cells_of(grid)
    assert len({cell.path for cell in cells}) == 32
    assert max(len(cell.cell.name) for cell in cells) == 100


def test_done_cells_are_skipped_and_a_cell_whose_sweep_asks_for_more_steps_is_not_done(sweep):
    first, *_ = cells_of(sweep)
    make_done(first)
    cells = cells_of(sweep)
    assert [cell.is_done for cell in cells] == [True, False, False]
    assert [cell.is_waiting for cell in cells] == [False, True, True]
    assert describe(cells).startswith("1 of 3 ")
    lost = RunDir.create(cells[1].path, cells[1].config)
    lost.ledger.append(TrainingBegan(step=0, world_size=1))
    assert describe(cells_of(sweep)).endswith(", 1 failed")
    shutil.rmtree(lost.path)
    steps = first.config.optim.steps
    shutil.rmtree(step_directory(RunDir(first.path).checkpoints, steps))
    assert cells_of(sweep)[0].is_waiting, "its last step is not saved"
    publish_step(RunDir(first.path).checkpoints, steps)
    write_experiment(sweep.parent, steps=20)
    assert cells_of(sweep)[0].is_waiting


def test_cells_on_their_way_are_neither_done_nor_started_again(sweep):
    cell = cells_of(sweep)[2]
    run_dir = RunDir.create(cell.path, cell.config)
    with run_dir.locked("launcher"):
        cells = cells_of(sweep)
    assert [cell.is_waiting for cell in cells] == [True, True, False]
    assert describe(cells).endswith(", 1 active")


def test_the_cells_with_most_flops_left_come_first_and_equal_ones_keep_their_order(sweep):
    first, odd, other = cells_of(sweep)  # odd has 3 lanes, so fewer FLOPs
    assert longest_first([odd, first, other]) == [first, other, odd]
    half_done = replace(first, state=replace(first.state, step=5))
    nearly_done = replace(other, state=replace(other.state, step=9))
    assert longest_first([nearly_done, odd, half_done]) == [half_done, odd, nearly_done]
    nowhere = DataConfig(path=sweep.parent / "no")
    unknown = replace(first, config=replace(first.config, model=ModelConfig(), data=nowhere))
    assert longest_first([unknown, odd]) == [odd, unknown]


def test_status_shows_cells_that_have_not_begun_too(sweep, capsys):
    command = ["sweep", "status", str(sweep), f"--runs-dir={sweep.parent / 'runs'}"]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 of 3 ")
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    states = [(each["cell"], each["state"]) for each in found]
    assert states == [("plain", "new"), ("odd", "new"), ("other", "new")]


def test_the_name_of_a_sweep_is_refused_with_its_file(sweep, capsys, monkeypatch):
    monkeypatch.chdir(sweep.parent)
    Path("configs/sweeps").mkdir(parents=True)
    Path("configs/sweeps/usual-0.1.yaml").write_text("")
    for name, hint in (("usual-0.1", " 'configs/sweeps/usual-0.1.yaml'?"), ("nowhere", "")):
        assert main(["sweep", "status", name]) == 2
        assert re.search(f"^error: {name} [^']*{re.escape(hint)}\n$", capsys.readouterr().err)


@pytest.fixture
def grid(sweep: Path) -> Path:
    path = sweep.parent / "grid.yaml"
    path.write_text(
        "format: 1\nname: grid\nexperiment: tiny.yaml\n"
        "grid: {optim.learning_rate: [3e-4, 1e-3], optim.schedule.shape: [cosine], "
        "data.lanes: [4, 8]}\n"
    )
    return path


def test_a_cell_that_waits_with_other_settings_is_not_this_sweeps(sweep, capsys):
    cell = cells_of(sweep)[0]
    Snapshot(cell.path).take_settings(replace(cell.config, seed=7), CLUSTER)
    RunDir(cell.path).ledger.append(Submitted(job="17_0", job_name="three"))
    assert describe(cells_of(sweep)).endswith(", 1 other settings")
    words = ["sweep", "submit", str(sweep), "--local", f"--runs-dir={cell.path.parent}"]
    assert main(words) == 2
    assert re.search("cell plain: .* seed 7 -> 1; ", capsys.readouterr().err)


def test_a_grid_becomes_a_cell_for_each_combination(grid):
    cells = cells_of(grid)
    found = [(cell.config.optim.learning_rate, cell.config.data.lanes) for cell in cells]
    assert found == [(3e-4, 4), (3e-4, 8), (1e-3, 4), (1e-3, 8)]
    names = [f"learning_rate_{rate}-shape_cosine-lanes_{lanes}" for rate, lanes in found]
    assert [cell.cell.name for cell in cells] == names
    assert cells[0].config.name == cells[0].cell.name


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "sweeps").glob("*.yaml")), ids=str)
def test_every_sweep_file_is_valid(path, tmp_path):
    assert all(cell.is_waiting for cell in read_cells(read_sweep(path), path, tmp_path))


CELL = "{name: a, experiment: tiny.yaml}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("experiment: tiny.yaml\ngrid: {seed: 1}", "grid.seed is 1; expected a list"),
        ("experiment: tiny.yaml\ngrid: {seed: [1]}\ncells: []", "has no cells beside it"),
        ("experiment: tiny.yaml\ngrid: {optim.stps: [1]}", "did you mean 'optim.steps'"),
        ("experiment: e.yaml\ngrid: {seed: [1]}\noverrides: []", "overrides: unknown setting"),
        ("cells: {a: {experiment: e.yaml}}", "expected a grid, such as"),
        ("cells: [{name: ../a, experiment: tiny.yaml}]", "expected 1 to 100 letters"),
        (f"cells: [{CELL}, {CELL}]", "the name 'a' is used twice"),
        ("cells: []", "cells is empty"),
        ("cells: [{name: a, experiment: e, overrides: {seed: 1}}]", "on a command line: [seed=1"),
        (
            "experiment: e.yaml\ngrid:\n"
            + "".join(f"  a{n}: [{', '.join('0123456789')}]\n" for n in range(10)),
            "the grid has 10,000,000,000 combinations",
        ),
    ],
)
def test_a_grid_with_a_mistake_is_refused(grid, capsys, text, message):
    grid.write_text(f"format: 1\nname: grid\n{text}\n")
    assert main(["sweep", "status", str(grid)]) == 2
    assert message in capsys.readouterr().err


def test_the_list_of_cells_in_the_docs_runs_as_it_stands(sweep, capsys, monkeypatch):
    monkeypatch.chdir(sweep.parent)
    text = (ROOT / "docs" / "launcher.md").read_text()
    (example,) = re.findall(r"\n\n((?:    .*\n)*    cells:\n(?:    .*\n)+)", text)
    Path("parts.yaml").write_text(textwrap.dedent(example))
    for name in ("paper", "modern"):
        (sweep.parent / f"{name}.yaml").write_text((sweep.parent / "tiny.yaml").read_text())
    assert main(["sweep", "submit", "parts.yaml", "--local", "--dry-run", "-j2"]) == 0
    output = capsys.readouterr().out
    assert " 4 cells, 2 at " in output
    first, second = (output.index(f"modern-{length}") for length in (64, 0))
    assert first < second, "the most expensive cells first, as they would start"
    assert not Path("runs").exists()


def test_a_report_compares_the_cells_that_have_made_a_step(grid, capsys, caplog, monkeypatch):
    monkeypatch.chdir(grid.parent)
    assert pretrain(["report", str(grid)]) == 2
    assert re.search(" 4 cells .* runs/grid", capsys.readouterr().err)
    cells = cells_of(grid)
    make_done(cells[1])
    make_done(cells[3])
    RunDir.create(cells[0].path, cells[0].config)
    assert pretrain(["report", str(grid)]) == 0
    assert cells[0].path.name in caplog.text
    assert "optim.learning_rate" in Path("runs/grid/compare.html").read_text()
    with open("runs/grid/compare.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == [cells[1].path.name, cells[3].path.name]
    cost = run_cost(cells[1].config)
    expected = {
        "optim.learning_rate": "0.0003", "evaluation_perplexity": "7.4", "train_loss": "0.75",
        "validation_loss": "2", "bits_per_byte": "1.25", "memory_gain": "0.5",
        "parameters": str(cost.parameters), "flops": str(cost.flops), "skipped_windows": "1",
    }  # fmt: skip
    assert {name: rows[0][name] for name in expected} == expected


def test_a_validation_loss_of_an_earlier_step_names_that_step(sweep, capsys, monkeypatch):
    monkeypatch.chdir(sweep.parent)
    for cell in read_cells(read_sweep(sweep), sweep, Path("runs/three")):
        make_done(cell)
    metrics = Path("runs/three/plain/metrics.jsonl")
    interval, evaluation = metrics.read_text().splitlines()
    metrics.write_text(f"{evaluation.replace(': 10', ': 5')}\n{interval}\n")
    # The report has a table of members with their means and intervals besides.
    for program, words, times in ((main, ["sweep", "status"], 3), (pretrain, ["report"], 5)):
        assert program([*words, str(sweep)]) == 0
        said = capsys.readouterr().out
        assert said.count("2.0000 (step 5)") == 1
        assert said.count("2.0000") == times
    assert Path("runs/three/compare.html").read_text().count(">2.0000 (step 5)<") == 1
    for program, command in ((main, "status"), (pretrain, "report")):
        assert program([command, "runs/three/plain"]) == 0
        assert "2.0000 (step 5)" in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 200])
def test_sweep_status_shows_every_result_at_any_width(grid, width):
    cell = cells_of(grid)[1]
    make_done(cell)
    screen = Console(width=width)
    with screen.capture() as capture:
        screen.print(sweep_status(cells_of(grid), width))
    output = capture.get()
    for head in HEADS:
        assert head in output
    of_cell = " ".join(line for line in output.splitlines() if cell.cell.name in line).split()
    assert {"0.7500", "2.0000", "1.2500", "+0.5000"} <= {*of_cell}
    assert max(map(len, output.splitlines())) <= width


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "neither --local nor --cluster is given"),
        (["--local", "--jobs=0"], "--jobs=0 must be 1 or more"),
        (["--local", "--ranks=7", "--dry-run"], "does not divide over 7 ranks"),
        (["--cluster={folder}/cluster.yaml", "--nodes=2+1"], "--nodes=2+1: found spare nodes"),
        (["--cluster=nowhere.yaml"], "nowhere.yaml does not exist"),
    ],
)
def test_bad_input_gets_one_line_and_leaves_nothing(sweep, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(sweep.parent)
    words = [text.format(folder=sweep.parent) for text in arguments]
    assert main(["sweep", "submit", str(sweep), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (sweep.parent / "runs").exists()
