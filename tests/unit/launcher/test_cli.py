"""The command lines of the launcher: what is wrong gets one line, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest

from foundation.settings import load_config
from launcher.cli import COMMANDS, main
from pretrain.config.run import RunConfig
from pretrain.rundir.run_dir import AttemptFiles, RunDir


def test_starting_the_launcher_imports_no_torch():
    code = (
        "import sys, launcher.cli, launcher.commands.local, launcher.commands.submit\n"
        "found = {'torch', 'deepspeed', 'streaming', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {found}' if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("command", [*([name] for name in COMMANDS if name != "sweep"), []])
def test_help_fits_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):  # argparse ends so
        assert main([*command, "--help"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


CLUSTER = ["--cluster=cluster.yaml"]
SUBMIT = ["submit", "x.yaml", *CLUSTER]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["locla"], "expected one of: local, status"),
        (["local", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["local", "x.yaml", "--ranks=3"], "data.lanes=8 does not divide over 3 ranks"),
        (["local", "x.yaml", "--ranks=0"], "--ranks=0 must be 1 or more"),
        (["local", "x.yaml", "optim.stps=3"], "did you mean 'steps'"),
        (["local", "x.yaml", "--run-dir=x.yaml"], "x.yaml is a file, expected a directory"),
        (["local", "x.yaml", "--run-dir=."], "holds other files and no run (cluster.yaml, runs,"),
        ([*SUBMIT, "--nodes=3"], "does not divide over 6 ranks"),
        ([*SUBMIT, "--nodes=many"], "--nodes=many"),
        ([*SUBMIT, "--run-dir=/runs/not-utf-8-\udcff"], "found a control character"),
        ([*SUBMIT, "--attempts-without-progress=0"], "must be 1 or more"),
        (SUBMIT, "found no Slurm cluster on this host"),
        (["submit", "x.yaml", "--cluster=nowhere.yaml"], "nowhere.yaml does not exist"),
        (["new-cluster", "cluster.yaml"], "cluster.yaml exists already"),
        (["new-cluster", "d"], "d does not end in .yaml; name it d.yaml"),
        (["new-cluster", "d.yaml", "--partition=main"], "found no Slurm cluster on this host"),
        (["preflight", "--local", "--ranks=0"], "--ranks=0 must be 1 or more"),
        (["preflight", "--local", "--directory=/proc"], "/proc: No such file or directory"),
        (["preflight", *CLUSTER, "--nodes=2:4"], "--nodes=2:4: found a range"),
        (["preflight", *CLUSTER, "--nodes=99999999999"], "expected a number from 1 to 65,536"),
        (["preflight", *CLUSTER, "--nodes=2+1"], "found no Slurm cluster on this host"),
        (["status", "nowhere"], "holds no run"),
        (["status", "--runs-dir=nowhere"], "contains no runs; name one"),
        (["logs", "x", "--rank=7"], "attempt 10 has the ranks 0 to 1"),
        (["logs", "x", "--attempt=3"], "--attempt=3: the run has the attempts 10 to 10"),
        (["logs", "x", "--lines=-1"], "--lines=-1 must be 0 or more"),
        (["logs", "x", "--errors", "--follow"], "contradict each other"),
        (["cancel", "x"], "is not running (new: no attempt yet)"),
    ],
)
def test_a_mistake_gets_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "x.yaml").write_text("model: {vocab_size: 300}\ndata: {lanes: 8}\n")
    (tmp_path / "cluster.yaml").write_text("ranks_per_node: 2\n")
    run_dir = RunDir.create(tmp_path / "runs" / "x", load_config(RunConfig, tmp_path / "x.yaml"))
    attempt = AttemptFiles(run_dir.logs, 10)
    attempt.create()
    for rank in range(2):
        attempt.rank_log(rank).touch()
    before = set(tmp_path.rglob("*"))
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert set(tmp_path.rglob("*")) == before
