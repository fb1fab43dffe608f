from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from data_pipeline.errors import ConfigError
from launcher.slurm import stage_node, staging
from launcher.slurm.snapshot import Snapshot
from launcher.slurm.staging import Staged, check_staging, pack
from pretrain.config.run import RunConfig
from pretrain.costs.cluster import ClusterConfig

CLUSTER = ClusterConfig(ranks_per_node=2)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small one, as if this Python ran in it."""
    root = tmp_path / "environment"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "python").symlink_to(sys.executable)
    packages = root / "lib" / "packages"
    (packages / "__pycache__").mkdir(parents=True)
    (packages / "module.py").write_text("NUMBER = 1\n")
    (packages / "__pycache__" / "module.pyc").write_bytes(b"compiled")
    monkeypatch.setattr(sys, "prefix", str(root))
    monkeypatch.setattr(sys, "executable", str(root / "bin" / "python"))
    return root


@pytest.fixture
def staged(environment: Path, tmp_path: Path) -> Staged:
    run_dir = tmp_path / "runs" / "run"
    Snapshot(run_dir).take(RunConfig(), CLUSTER, "script")
    return pack(run_dir, tmp_path / "disk")


def on_node(staged: Staged, may_unpack: bool = True) -> bool:
    return stage_node.stage(json.loads(json.dumps(asdict(staged))), may_unpack)


def test_a_node_gets_all_of_it_once_and_its_python_runs_the_code(staged: Staged, tmp_path: Path):
    assert not on_node(staged, may_unpack=False)
    assert on_node(staged)
    python, code = Path(staged.python), Path(staged.code)
    assert {python.parents[2], code.parent} == {stage_node.local_root(str(tmp_path / "disk"))}
    assert python.readlink().exists()
    packages = python.parents[1] / "lib" / "packages"
    assert (packages / "__pycache__" / "module.pyc").read_bytes() == b"compiled"
    said = subprocess.run(
        [sys.executable, str(code), "launcher.slurm.batch_process", "--help"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert "usage: launcher batch" in said.stdout
    times = [path.stat().st_ctime_ns for path in code.rglob("*.py")]
    (packages / "__pycache__" / "other.pyc").write_bytes(b"of a later start")
    assert on_node(staged, may_unpack=False)
    assert on_node(staged)
    assert [path.stat().st_ctime_ns for path in code.rglob("*.py")] == times, "not again"


def test_a_copy_that_lost_a_file_or_is_of_another_archive_is_made_anew(staged: Staged):
    assert on_node(staged)
    module = Path(staged.python).parents[1] / "lib" / "packages" / "module.py"
    module.unlink()  # as what cleans a node's disk
    assert not on_node(staged, may_unpack=False)
    assert on_node(staged)
    assert module.read_text() == "NUMBER = 1\n"


def test_a_broadcast_that_was_cut_short_is_not_used(staged: Staged, tmp_path: Path):
    root = stage_node.local_root(str(tmp_path / "disk"))
    assert not on_node(staged, may_unpack=False)
    broadcasts = []
    for archive in staged.archives:
        shared = Path(archive.path)
        broadcasts.append(root / shared.name)
        broadcasts[-1].write_bytes(shared.read_bytes()[:-5000])
    assert on_node(staged)
    assert not any(path.exists() for path in broadcasts)
    assert not list(root.glob(".*.tmp"))


def test_no_part_of_a_damaged_archive_is_used(staged: Staged, tmp_path: Path):
    path = Path(staged.archives[1].path)
    content = bytearray(path.read_bytes())
    content[content.index(b"NUMBER")] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"environment-.* has the hash .*, expected "):
        on_node(staged)
    assert not Path(staged.python).parents[1].exists()
    path.write_bytes(content[:700])
    with pytest.raises(ValueError, match=r"damaged|has the hash"):
        on_node(staged)


def test_a_directory_of_another_user_or_for_all_is_refused_in_one_line(
    staged: Staged, tmp_path: Path
):
    root = stage_node.local_root(str(tmp_path / "disk"))
    root.mkdir(parents=True, mode=0o777)
    root.chmod(0o777)
    (description := tmp_path / "staged.json").write_text(json.dumps(asdict(staged)))
    command = [sys.executable, "-I", "-S", stage_node.__file__, "unpack", str(description)]
    said = subprocess.run(command, capture_output=True, text=True, env={"SLURMD_NODENAME": "n7"})
    assert said.returncode == 1
    assert said.stdout == ""
    assert said.stderr.startswith(f"n7: {root} is not a directory that only this user can write")
    assert said.stderr.count("\n") == 1


def test_archives_are_reused_until_code_or_environment_change(
    staged: Staged, environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    other = tmp_path / "runs" / "other"
    Snapshot(other).take(RunConfig(), CLUSTER, "script")
    with monkeypatch.context() as patch:
        patch.setattr(staging, "_write_tar", lambda *_: pytest.fail("packed again"))
        assert pack(other, tmp_path / "disk") == staged
    (Snapshot(other).code / "pretrain" / "new.py").touch()
    (environment / "lib" / "packages" / "module.py").write_text("NUMBER = 2\n")
    again = pack(other, tmp_path / "disk")
    assert {each.name for each in again.archives}.isdisjoint(each.name for each in staged.archives)


def test_what_cannot_be_staged_is_refused(environment, monkeypatch):
    check_staging(CLUSTER, Path("/tmp"))
    contained = replace(CLUSTER, container_image="image.sif", container_runtime="apptainer")
    with pytest.raises(ConfigError, match=r"container_image=image.sif; leave the flag out"):
        check_staging(contained, Path("/tmp"))
    with pytest.raises(ConfigError, match="--stage-directory=tmp is a relative path"):
        check_staging(CLUSTER, Path("tmp"))
    monkeypatch.setattr(sys, "prefix", "/usr")
    with pytest.raises(ConfigError, match="into a virtual environment"):
        check_staging(replace(contained, container_image=""), Path("/tmp"))
