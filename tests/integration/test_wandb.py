"""A run on Weights & Biases: the library's own offline back end, across a kill and a resume."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foundation.programs import own_command
from foundation.settings import load_config
from pretrain.cli import main
from pretrain.config.run import RunConfig
from pretrain.metrics.wandb_writer import wandb_copy
from pretrain.processes.local_ranks import train_command
from pretrain.recovery.faults import VARIABLE
from pretrain.rundir.run_dir import RunDir
from tests.helpers.owners import give_away
from tests.helpers.wandb_files import records_of, rows_of

STEPS = 7
KEY = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(scope="module")
def experiment(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wandb") / "tiny.yaml"
    path.write_text(
        f"""name: tiny
model: {{num_layers: 1, d_model: 16, num_heads: 2, memory_length: 8}}
data: {{path: {tiny_corpus}, lanes: 4, segment_length: 8}}
optim: {{steps: {STEPS}}}
engine: {{kind: torch}}
checkpoint: {{interval: 3}}
evaluation: {{interval: 3, max_tokens: 200, lanes: 2}}
metrics: {{interval: 1, tensorboard: false, wandb_project: tests}}
"""
    )
    return path


def sessions_of(run_dir: RunDir) -> list[Path]:
    """The files of the sessions in their order."""
    found = run_dir.wandb.glob("offline-run-*/run-*.wandb")
    return sorted(found, key=lambda path: path.parent.name)


def test_a_resumed_run_is_one_with_what_each_attempt_saw(experiment, tmp_path, monkeypatch, capfd):
    run_dir = RunDir(tmp_path / "run")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith(("WANDB", "NETRC"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_TAGS", "small")
    # Somebody is here, but no server answers.
    fault = {VARIABLE: "sigkill@5", "WANDB_API_KEY": KEY, "WANDB_INIT_TIMEOUT": "1"}
    settings_file(tmp_path / ".config/wandb", "base_url = http://127.0.0.1:9")
    command = train_command(experiment, run_dir.path)
    killed = subprocess.run(command, env={**os.environ, **fault}, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    first = sessions_of(run_dir)
    # Nobody is logged in: the library is offline without having been asked.
    assert main(["train", str(experiment), "--run-dir", str(run_dir.path)]) == 0
    sessions = sessions_of(run_dir)
    assert "`wandb sync`" in capfd.readouterr().err
    assert sessions[:-1] == first
    assert all(path.name == f"run-{run_dir.identity.id}.wandb" for path in sessions)
    expected = expected_of(run_dir)
    rows = rows_of(sessions[-1])
    assert len(rows) >= 6, "from step 4 on, or from step 1 if it was killed before it had saved"
    assert rows == [row | more for row, more in zip(rows, expected[-len(rows) :], strict=True)]
    hosts = {record.run.host for path in sessions for record in records_of(path)
             if record.HasField("run")}  # fmt: skip
    assert hosts == {"-"}
    files = [path for path in run_dir.path.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    text = b"".join(path.read_bytes() for path in sessions)
    assert all(word in text for word in (b"tests", b"small", b"segment_length"))


def expected_of(run_dir: RunDir) -> list[dict[str, Any]]:
    """What the rows have to have: what does not depend on the time."""
    rows = []
    for line in run_dir.read_metrics():
        losses = [name for name in line if "loss" in name and "scale" not in name]
        values = {f"{line['kind']}/{name}": line[name] for name in losses if line[name] is not None}
        rows.append({"step": line["step"], **values})
    return rows


def settings_file(folder: Path, line: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "settings").write_text(f"[default]\n{line}\n")
    return folder / "settings"


def test_a_run_in_the_default_directory_keeps_its_rows_there(experiment):
    environment = {**os.environ, "WANDB_MODE": "offline"}
    command = own_command("launcher", "local", str(experiment), "--ranks=1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Weights & Biases" not in done.stderr
    run_dir = RunDir(Path("runs/tiny"))
    (session,) = sessions_of(run_dir)
    expected = expected_of(run_dir)
    rows = rows_of(session)
    assert rows == [row | more for row, more in zip(rows, expected, strict=True)]


@pytest.mark.parametrize("name", ["wandb", ".wandb"])
def test_settings_of_another_user_in_the_working_directory_are_not_obeyed(
    name, experiment, monkeypatch, caplog
):
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        line = f"base_url = http://127.0.0.1:{foreign.getsockname()[1]}"
        settings = settings_file(Path(name), line).absolute()
        give_away(settings, monkeypatch)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        with wandb_copy(RunDir.create(Path("run"), load_config(RunConfig, experiment)), "mine"):
            pass
        foreign.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody has called
            foreign.accept()
    assert f"{settings} belongs to " in caplog.text


def test_training_goes_on_where_the_library_fails(experiment, tmp_path, caplog, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("WANDB_MODE", "no such mode")
    assert main(["train", str(experiment), "--run-dir", str(tmp_path / "run")]) == 0
    assert caplog.text.count("Weights & Biases ") == 1


def test_a_run_without_the_library_names_the_extra(experiment, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["train", str(experiment), "--run-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "'xl-pretrain[wandb]'" in said
    assert not (tmp_path / "run").exists()
