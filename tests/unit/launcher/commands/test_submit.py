import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from data_pipeline.config import MixturePart
from foundation.errors import ConfigError, UserError
from foundation.programs import copied_arguments
from foundation.settings import load_config
from launcher.cli import main
from launcher.slurm.client import Slurm
from launcher.slurm.sbatch import (
    Snapshot,
    check_request,
    cluster_here,
    missing_notes,
    render,
    replaced_snapshot,
)
from launcher.slurm.submission import refuse_live_job
from pretrain.config.cluster import ClusterConfig, NodeRange, load_cluster
from pretrain.config.run import DataConfig, RunConfig
from pretrain.rundir.events import Outcome, Submitted, TrainingEnded
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkpoints import publish_step
from tests.helpers.corpora import make_tiny_corpus
from tests.helpers.jobs import fake_commands, job_of, listed, records, scripted
from tests.helpers.metrics import train_line

SETTINGS = ["model.vocab_size=100", "model.d_model=32", "model.num_heads=2"]
SETTINGS += ["model.num_layers=2", "data.lanes=8"]


CPUS = ClusterConfig(ranks_per_node=2)
LONGER = ("optim.steps=20", "optim.schedule.shape=constant")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text("name: tiny\ndata: {path: corpus}\n")
    (tmp_path / "cluster.yaml").write_text("ranks_per_node: 2\n")
    return tmp_path


def submit(files: Path, *more: str) -> int:
    where = [f"--cluster={files / 'cluster.yaml'}", f"--run-dir={files / 'run'}"]
    return main(["submit", str(files / "tiny.yaml"), *where, *more, *SETTINGS])


def test_a_dry_run_prints_the_script_and_touches_nothing(files, capsys):
    assert submit(files, "--nodes=2", "--dry-run") == 0
    found = capsys.readouterr()
    assert found.out.startswith("#!/bin/bash\n")
    assert found.err.split(": ")[:2] == ["warning", "data.path"]
    assert str(Path("corpus").absolute()) in found.err
    assert not (files / "run").exists()


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("torch.sif", "apptainer exec --nv --bind={run} --bind=/corpora --pwd={run}/slurm/code "),
        ("torch.sqsh", "--container-image=torch.sqsh --container-mounts={run}:{run},/corpora"),
    ],
)
def test_a_dry_run_shows_the_command_line_in_the_container(files, capsys, image, said):
    settings = f"container_image: {image}\ncontainer_mounts: [/corpora]\n"
    (files / "cluster.yaml").write_text(f"gpus_per_node: a100:2\ngpu: A100-40GB\n{settings}")
    assert submit(files, "--dry-run") == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("# Its supervisor starts the ranks by: srun --nodes=1 --ntasks=2 ")
    assert said.format(run=files / "run") in line
    assert "python3" in line


def test_a_disk_too_small_is_a_note_of_a_dry_run_and_an_error_of_a_submission(files, capsys):
    kept = "checkpoint.keep_last=1000000000"
    assert submit(files, "--dry-run", kept) == 0
    found = capsys.readouterr()
    assert found.out.startswith("#!/bin/bash\n")
    [note] = [line for line in found.err.splitlines() if "1000000001 checkpoints" in line]
    assert note.startswith(f"note: {files} ")
    assert submit(files, kept) == 2
    assert f"error: {files} " in capsys.readouterr().err
    assert not (files / "run").exists()


def test_a_directory_that_holds_another_run_is_refused(files, capsys):
    other = load_config(RunConfig, files / "tiny.yaml", [*SETTINGS, "seed=7"])
    RunDir.create(files / "run", other)
    assert submit(files) == 2
    assert "seed: 7 -> 1" in capsys.readouterr().err


def test_a_run_that_is_done_is_not_submitted_again_unless_it_gets_more_steps(files, capsys):
    config = load_config(RunConfig, files / "tiny.yaml", [*SETTINGS, "optim.steps=10"])
    run_dir = RunDir.create(files / "run", config)
    run_dir.metrics.write_text(json.dumps(train_line(10)) + "\n")
    run_dir.ledger.append(TrainingEnded(outcome=Outcome.FINISHED, step=10))
    submit(files, "optim.steps=10")
    assert "is done" not in capsys.readouterr().err, "its last checkpoint is lost"
    publish_step(run_dir.checkpoints, 10)
    for more in ([], ["--dry-run"]):
        assert submit(files, "optim.steps=10", *more) == 2
        assert "step 10" in capsys.readouterr().err
    assert submit(files, "optim.steps=20", "--dry-run") == 2
    assert "learning rate of step 11" in capsys.readouterr().err
    assert submit(files, *LONGER, "--dry-run") == 0
    submit(files, *LONGER)
    assert "is done" not in capsys.readouterr().err


@pytest.mark.parametrize(("job", "state", "is_refused"), [
    ("24", "RUNNING", True), ("24", "TIMEOUT", False), ("8", "RUNNING", False),
])  # fmt: skip
def test_a_job_that_the_site_moved_elsewhere_still_has_the_run(tmp_path, job, state, is_refused):
    run_dir = RunDir.create(tmp_path / "run", RunConfig())
    run_dir.ledger.append(Submitted(job="24", work_dir="/home/u"))
    queue = records(f"{job}|{job}|N/A|{state}|None|n1|N/A|/home/u")
    slurm = scripted(queue, queue if job == "24" else records())
    with pytest.raises(ConfigError, match="job 24") if is_refused else nullcontext():
        refuse_live_job(slurm, run_dir)


def test_a_job_that_slurm_refuses_leaves_the_directory_as_it_was(files):
    run_dir, snapshot = RunDir(files / "run"), Snapshot(files / "run")

    def fail_after(script: str, error: UserError) -> None:
        snapshot.take_code(script)
        raise error

    def replace_snapshot(script: str, error: UserError) -> None:
        with pytest.raises(type(error)), replaced_snapshot(run_dir):
            fail_after(script, error)

    replace_snapshot("first\n", ConfigError("sbatch rejected it"))
    assert not run_dir.path.exists()
    snapshot.take_code("before\n")
    replace_snapshot("second\n", ConfigError("sbatch rejected it"))
    assert snapshot.script.read_text() == "before\n"
    assert snapshot.code.exists()
    replace_snapshot("third\n", UserError("no answer: the job may exist"))
    assert snapshot.script.read_text() == "third\n"


def test_a_snapshot_keeps_settings_and_code_that_later_edits_do_not_reach(files):
    config = load_config(RunConfig, files / "tiny.yaml", SETTINGS)
    snapshot = Snapshot(files / "run")
    snapshot.take_settings(config, load_cluster(files / "cluster.yaml"))
    snapshot.take_code("#!/bin/bash\n")
    assert load_config(RunConfig, snapshot.experiment) == config
    assert load_cluster(snapshot.cluster).tasks_per_node == 2
    packages = {"data_pipeline", "foundation", "launcher", "pretrain"}
    entries = {path.name for path in snapshot.code.iterdir()}
    assert entries == {"__main__.py", "__pycache__", *packages}
    assert (snapshot.path / "code.commit").exists()
    assert snapshot.path.stat().st_mode & 0o777 == 0o700
    assert not any(path.stat().st_mode & 0o077 for path in snapshot.path.rglob("*"))


def test_a_snapshot_runs_its_own_modules_wherever_it_is_started(files, tmp_path):
    """On a node that does not see the job's directory, Slurm starts programs in /tmp."""
    snapshot, elsewhere = Snapshot(files / "run"), tmp_path / "tmp"
    snapshot.take_code("")
    bytecode = {path: path.stat().st_mtime_ns for path in snapshot.code.rglob("*.pyc")}
    for name in ("launcher", "runpy", "argparse", "subprocess"):
        (elsewhere / name).mkdir(parents=True)
        (elsewhere / name / "__init__.py").write_text("print('EXECUTED')\n")
    arguments = copied_arguments(snapshot.code, "launcher.slurm.task", str(tmp_path / "no" / "log"))
    variables = {**os.environ, "SLURM_PROCID": "0", "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=elsewhere, env=variables, capture_output=True, text=True)
    assert "EXECUTED" not in done.stdout
    assert str(tmp_path / "no") in done.stderr
    # On a full disk it would be written in part, and never be read again.
    written = {path: path.stat().st_mtime_ns for path in snapshot.code.rglob("*.pyc")}
    assert written == bytecode, "a job writes no bytecode"


def test_nobody_else_may_write_a_run_whatever_the_umask(files):
    before = os.umask(0)
    try:
        Snapshot(files / "submitted").take_code("")
        RunDir.create(files / "run", load_config(RunConfig, files / "tiny.yaml", SETTINGS))
        with RunDir(files / "locked").locked():
            pass
    finally:
        os.umask(before)
    for name in ("submitted", "run", "locked"):
        assert (files / name).stat().st_mode & 0o777 == 0o755
    assert RunDir(files / "run").config_file.stat().st_mode & 0o777 == 0o600


def test_a_run_directory_that_others_can_write_is_not_submitted(files):
    """They could exchange what the job executes."""
    (files / "run").mkdir()
    (files / "run").chmod(0o775)
    with pytest.raises(ConfigError, match="775"), replaced_snapshot(RunDir(files / "run")):
        pass
    assert not (files / "run" / "slurm").exists()


def test_a_corpus_that_is_too_small_is_refused_before_it_queues_unless_parts_are_elsewhere(
    files, capsys
):
    enough, too_small = (
        f"data.path={make_tiny_corpus(files / str(documents), documents=documents)}"
        for documents in (60, 10)
    )
    assert submit(files, "--dry-run", enough) == 0
    assert capsys.readouterr().err == ""
    for more in (["--dry-run"], []):
        assert submit(files, *more, too_small) == 2
        assert "tokens are too few for 8 lanes" in capsys.readouterr().err
    assert not (files / "run").exists()
    elsewhere = f"evaluation.sets.code={files / 'code'}"
    assert submit(files, "--dry-run", too_small, elsewhere) == 0
    assert "evaluation.sets.code" in capsys.readouterr().err


def test_corpora_that_are_not_on_this_host_are_warned_of_and_urls_are_not(tmp_path):
    def finished(directory: Path) -> Path:
        directory.mkdir(parents=True)
        (directory / "manifest.json").touch()
        return directory

    run = RunConfig(data=DataConfig(path=tmp_path / "books"))
    (warning,) = missing_notes(run, CPUS, tmp_path)
    assert re.search(rf"^warning: data\.path: .*{tmp_path}/books ", warning)
    finished(tmp_path / "books" / "train")
    assert missing_notes(run, CPUS, tmp_path) == []
    paths = (tmp_path / "books", Path("s3://bucket/web"))
    parts = tuple(MixturePart(path=path, weight=1.0) for path in paths)
    mixed = replace(run, data=replace(run.data, mixture=parts))
    assert len(missing_notes(mixed, CPUS, tmp_path)) == 1, "the validation split is of data.path"
    finished(tmp_path / "books" / "validation")
    assert missing_notes(mixed, CPUS, tmp_path) == []
    sets = {"books": tmp_path / "books", "code": tmp_path / "code"}
    evaluated = replace(run, evaluation=replace(run.evaluation, sets=sets))
    (warning,) = missing_notes(evaluated, CPUS, tmp_path)
    assert re.search(rf"sets\.code: .*{tmp_path}/code", warning)


@pytest.mark.parametrize(
    ("image", "mounts", "path", "is_seen"),
    [
        ("", (), "/corpora/books", True),
        ("/images/a.sif", ("/other",), "/corpora/books", False),
        ("/images/a.sif", ("/corpora",), "/corpora/books", True),
        ("/images/a.sif", (), "/tmp/books", True),
        ("a.sqsh", (), "/tmp/books", False),
        ("a.sqsh", ("/corpora/boo",), "/corpora/books", False),
        ("a.sqsh", (), "s3://bucket/books", True),
        ("a.sqsh", (), "RUNS/books", True),
    ],
)
def test_what_the_container_does_not_see_is_warned_of(image, mounts, path, is_seen):
    cluster = replace(CPUS, container_image=image, container_mounts=mounts)
    run_dir = Path("/runs/mine")
    run = RunConfig(data=DataConfig(path=Path(path.replace("RUNS", str(run_dir)))))
    notes = [note for note in missing_notes(run, cluster, run_dir) if "container_mounts" in note]
    assert len(notes) == (not is_seen)
    assert all(f"data.path: {path}" in note for note in notes)


@pytest.mark.parametrize(
    ("gpus", "cpus", "limit", "expected"),
    [
        (8, 96, "7-00:00:00", ("--gpus-per-node=8", "--cpus-per-task=12", "--time=24:00:00")),
        (0, 1, "n/a", ("--ntasks-per-node=1", "--cpus-per-task=1", "--partition=main")),
        (0, 8, "0:04:00", ("--ntasks-per-node=2", "--cpus-per-task=4", "--signal=B:USR1@120")),
        (0, 8, "infinite", ("--time=24:00:00", "--partition=main")),
    ],
)
def test_a_partition_accepts_its_new_file(gpus, cpus, limit, expected, tmp_path, monkeypatch):
    answer = f"main*|4|{cpus}|{f'gpu:{gpus}' if gpus else '(null)'}|{limit}"
    fake_commands(tmp_path, monkeypatch, sinfo=listed(answer, fields=5))
    file = tmp_path / "c.yaml"
    assert main(["new-cluster", str(file), "--partition=main"]) == 0
    cluster, nodes = load_cluster(file), NodeRange(2, 2)
    check_request(cluster, nodes, Slurm().partitions())
    script = render(job_of(Path("/runs/x"), cluster, nodes))
    for option in expected:
        assert f"#SBATCH {option}\n" in script


@pytest.mark.parametrize(
    ("settings", "cores"),
    [
        ("gpus_per_node: 4, partition: gpu", 8),
        ("gpus_per_node: 4", 16),
        ("gpus_per_node: 4, partition: 'gpu,main'", 8),
        ("gpus_per_node: 4, cpus_per_rank: 3", 3),
        ("gpus_per_node: 4, partition: cpu", 1),
        ("ranks_per_node: 2", 1),
    ],
)
def test_ranks_of_gpus_share_the_cores_of_their_node(
    tmp_path, monkeypatch, caplog, settings, cores
):
    kinds = (
        "gpu|2|96|gpu:8(S:0)|1:00:00",
        "gpu|2|32|gpu:a100:4|1:00:00",
        "cpu|9|64|(null)|1:00:00",
    )
    sinfo = listed("main*|4|64|gpu:4|1:00:00", *kinds, "main*|4|200|(null)|1:00:00", fields=5)
    fake_commands(tmp_path, monkeypatch, sinfo=sinfo)
    file = tmp_path / "c.yaml"
    file.write_text(f"{{{settings}}}")
    script = render(job_of(Path("/runs/x"), cluster_here(file), NodeRange(2, 2)))
    assert f"#SBATCH --cpus-per-task={cores}\n" in script
    assert ("does not say what nodes have" in caplog.text) == settings.endswith("cpu")


def test_without_slurm_the_file_is_for_nodes_like_this_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["new-cluster", "c.yaml"]) == 0
    (tmp_path / "x.yaml").write_text("model: {vocab_size: 300}\n")
    assert main(["submit", "x.yaml", "--cluster", "c.yaml", "--dry-run"]) == 0
    assert "#SBATCH --time=24:00:00" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"c.yaml", "x.yaml"}
