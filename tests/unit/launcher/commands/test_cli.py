"""The command lines of the launcher: what is wrong gets one line, and leaves nothing behind."""

import pytest

from foundation.settings import load_config
from launcher.cli import main
from pretrain.config.run import RunConfig
from pretrain.rundir.attempt_files import AttemptFiles
from pretrain.rundir.run_dir import RunDir

CLUSTER = ["--cluster=cluster.yaml"]
SUBMIT = ["submit", "x.yaml", *CLUSTER]


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        (["locla"], "local, status"),
        (["stop"], "did you mean 'launcher signal RUN stop'? or one of: local"),
        (["statsu"], "did you mean 'launcher status'?"),
        (["local", "nowhere.yaml"], "nowhere.yaml"),
        (["local", "y.yaml"], "did you mean 'x.yaml'?"),
        (["local", "x.yaml", "data.path=nowhere", "model.vocab_size=0"], "no corpus at "),
        (["local", "x.yaml", "--ranks=3"], "data.lanes=8"),
        (["local", "x.yaml", "--ranks=0"], "--ranks=0"),
        (["local", "x.yaml", "optim.stps=3"], "'optim.steps'"),
        (["local", "x.yaml", "--run-dir=x.yaml"], "x.yaml"),
        (["local", "x.yaml", "--run-dir=."], "cluster.yaml, runs,"),
        ([*SUBMIT, "--nodes=3"], "6 ranks"),
        ([*SUBMIT, "--nodes=many"], "--nodes=many"),
        ([*SUBMIT, "--run-dir=/runs/not-utf-8-\udcff"], "not UTF-8"),
        ([*SUBMIT, "--attempts-without-progress=0"], "--attempts-without-progress=0"),
        (SUBMIT, "Slurm"),
        (["submit", "x.yaml", "--cluster=nowhere.yaml"], "nowhere.yaml"),
        (["new-cluster", "cluster.yaml"], "cluster.yaml"),
        (["new-cluster", "d"], "d.yaml"),
        (["new-cluster", "d.yaml", "--partition=main"], "Slurm"),
        (["preflight", "--local", "--ranks=0"], "--ranks=0"),
        (["preflight", "--local", "--directory=/proc"], "/proc: "),
        (["preflight", *CLUSTER, "--nodes=2:4"], "--nodes=2:4: "),
        (["preflight", *CLUSTER, "--nodes=99999999999"], "65,536"),
        (["preflight", *CLUSTER, "--nodes=2+1"], "Slurm"),
        (["status", "nowhere"], "nowhere"),
        (["status", "--runs-dir=nowhere"], "nowhere"),
        (["logs", "x", "--rank=7"], "0 to 1"),
        (["logs", "x", "--attempt=3"], "--attempt=3"),
        (["logs", "x", "--lines=-1"], "--lines=-1"),
        (["logs", "x", "--errors", "--follow"], "--follow"),
        (["cancel", "x"], "new"),
    ],
)
def test_a_mistake_gets_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, words, culprit):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "x.yaml").write_text("model: {vocab_size: 300}\ndata: {lanes: 8}\n")
    (tmp_path / "cluster.yaml").write_text("ranks_per_node: 2\n")
    (tmp_path / ".y.yaml").touch()
    run_dir = RunDir.create(tmp_path / "runs" / "x", load_config(RunConfig, tmp_path / "x.yaml"))
    attempt = AttemptFiles(run_dir.logs, 10)
    attempt.create()
    for rank in range(2):
        attempt.rank_log(rank).touch()
    before = set(tmp_path.rglob("*"))
    assert main(words) == 2
    error = capsys.readouterr().err
    assert culprit in error
    assert error.count("\n") == 1
    assert set(tmp_path.rglob("*")) == before
