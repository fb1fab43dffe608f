"""Flags with values that no command can use: one line, status 2, no file written or replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.cli import main

EXPERIMENT = """name: tiny
model: {num_layers: 1, d_model: 16, num_heads: 2, memory_length: 8, vocab_size: 320}
data: {path: absent, lanes: 4, segment_length: 8}
engine: {kind: torch}
"""
RATES = ("--rates", "1e-3", "2e-3", "4e-3")
TUNE = ("scale", "plan", "x.yaml", *RATES)
PLAN = ("scale", "plan", "x.yaml", "--budgets", "1e12", "--output", "sweep.yaml")


def files_in(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate", "r", "--tokens=0"), "--tokens=0 must be 1 or more"),
        (("generate", "r", "--memory-length=-1"), "--memory-length=-1 must be 0 or more"),
        (("evaluate", "r", "--lanes=-2"), "--lanes=-2 must be 0 or more"),
        (("evaluate", "r", "--memory-length", "3", "-2"), "--memory-length=-2 must be 0 or more"),
        (
            ("evaluate", "r", "--probe=needle", "--longest-distance=10T"),
            "--longest-distance=10000000000000 must be at most 1,048,576",
        ),
        (("evaluate", "r", "--probe=needle", "--output=x.yaml"), "--output x.yaml is a file"),
        (("evaluate", "r", "--probe", "foo"), "'recl'); see pretrain evaluate --help"),
        (("report", "r", "--output=x.yaml"), "--output x.yaml is a file; name a directory"),
        (("checkpoint", "verify", "r", "--step=9"), "unrecognized arguments: --step"),
        (("verify-resume", "x.yaml", "--ranks=0"), "--ranks=0 must be 1 or more"),
        (("verify-resume", "x.yaml", "--resume-ranks=0"), "--resume-ranks=0 must be 1 or more"),
        (("verify-resume", "x.yaml", "--work-dir=x.yaml"), "--work-dir x.yaml is a file"),
        (("import-original", "folder", "--config=x.yaml", "--output=o"), "folder is a directory"),
        (("describe", "x.yaml", "data.path="), "data.path: found no value, expected a path"),
        (("new", "x.yaml/y.yaml", "--corpus=CORPUS", "--parameters=1M"), "choose another path, or"),
        ((*TUNE, "--output=x.yaml"), "--output x.yaml exists and is no planned sweep; choose"),
        ((*TUNE, "--output=folder/table.csv"), "table.csv exists and is no planned sweep; choose"),
        ((*TUNE, "--name=../x"), "--name: found '../x', expected 1 to 100 letters"),
        ((*TUNE, "--steps=99999999999999"), "optim.schedule.warmup_steps=5000000000000 must be"),
        ((*PLAN, "--sizes=99999999"), "found 99999999 sizes 1.6x apart, expected 1 to 1000"),
        ((*PLAN, "--spread=nan"), "found 5 sizes nanx apart, expected 1 to 1000 and a spread"),
        ((*PLAN, "--steps=9"), "--steps has no meaning in a plan that varies sizes; leave it out"),
        ((*TUNE, "--sizes=9"), "--sizes has no meaning in a plan that varies rates; leave it out"),
        ((*PLAN[:3], "--seeds=1"), "found nothing to vary; give --budgets, --rates, or --segments"),
        (
            ("scale", "predict", "t", "--flops=1", "--experiment=x.yaml", "--write=x.yaml"),
            "x.yaml exists already; choose another name",
        ),
    ],
)
def test_a_value_that_cannot_be_used_is_one_line_and_writes_nothing(
    corpus, tmp_path, monkeypatch, capsys, arguments, said
):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(EXPERIMENT)
    Path("folder").mkdir()
    Path("folder/table.csv").write_text("name,loss\na,1\n")
    before = files_in(tmp_path)
    words = [each.replace("CORPUS", str(corpus.directory.parent)) for each in arguments]
    assert main(words) == 2
    output = capsys.readouterr()
    assert said in output.err
    assert output.err.startswith("error: ")
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert files_in(tmp_path) == before


def test_a_planned_sweep_may_be_planned_again_and_a_number_given_twice_counts_once(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(EXPERIMENT)
    assert main([*TUNE, "--output=sweep.yaml"]) == 0
    assert main([*PLAN, "--budgets", "1e12", "1e12", "--sizes=2", "--seeds", "1", "1"]) == 0
    assert main([*TUNE, "--output=sweep.yaml", "optim.steps=90"]) == 0
    assert "optim.steps=90" in Path("sweep.yaml").read_text()


def test_a_folder_of_other_files_gets_no_lock_of_a_run_that_is_refused(corpus, tmp_path, caplog):
    (tmp_path / "x.yaml").write_text(EXPERIMENT)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    train = ["train", str(tmp_path / "x.yaml"), f"data.path={corpus.directory.parent}"]
    assert main([*train, "--run-dir", str(folder)]) == 2
    assert "holds other files and no run (notes.txt)" in caplog.text
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
