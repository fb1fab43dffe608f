"""The wheel, installed into its own environment and used from a directory without the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from pretrain.rundir.events import TrainingBegan
from pretrain.rundir.history import find_events
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkout import ROOT

pytestmark = pytest.mark.slow
SOURCES = ("configs", "foundation", "data_pipeline", "launcher", "pretrain", "benchmarks", "tests")
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "200",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy: setuptools leaves a build/ whose old files go into later
    wheels.
    """
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # Without isolation: pip would download a setuptools that the environment has already.
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", output, source], env=ENVIRONMENT, check=True)
    (built,) = output.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory) -> Path:
    """The console scripts' folder in an environment of the wheel and our own dependencies."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python"]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, env=ENVIRONMENT, check=True)
    # After the installation, or pip would replace the xl-pretrain of our own environment. An
    # editable one there stays out: Python ignores .pth files of folders that a .pth file names.
    (packages,) = environment.glob("lib/*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin"


def run(programs: Path, directory: Path, *command: str | Path) -> str:
    """What the command prints, started from `directory`; it must succeed."""
    program, *arguments = command
    place = {"cwd": directory, "env": ENVIRONMENT}
    done = subprocess.run([programs / program, *arguments], **place, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_the_packages_and_every_configuration_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"foundation", "data_pipeline", "launcher", "pretrain"}
    shipped = {name.removeprefix("foundation/") for name in names if name.endswith(".yaml")}
    assert shipped == {str(path.relative_to(ROOT)) for path in ROOT.glob("configs/*/*.yaml")}
    sources = {str(path.relative_to(ROOT)) for top in tops for path in (ROOT / top).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources


def test_the_modules_come_from_the_wheel(programs, tmp_path):
    script = "import data_pipeline, launcher, pretrain; print(pretrain.__file__)"
    printed = run(programs, tmp_path, "python", "-c", script)
    assert Path(printed.strip()).is_relative_to(programs.parent)
    for program in ("pretrain", "launcher", "data-pipeline"):
        assert f"usage: {program} " in run(programs, tmp_path, program, "--help")


def test_shipped_configurations_are_found_and_a_run_trains_and_resumes(programs, tmp_path):
    model = "configs/models/xl_modern_100m.yaml"
    described = run(programs, tmp_path, "pretrain", "describe", model, "model.vocab_size=32000")
    assert "100,125,440" in described
    for name, count in (("text.jsonl", 90), ("valid.jsonl", 6)):
        record = f'{{"text": "{"words " * 400}"}}\n'
        (tmp_path / name).write_text(record * count)
    build = ("data-pipeline", "build", "configs/data/bytes.yaml", "--input", "text.jsonl")
    run(programs, tmp_path, *build, "--output", "data", "validation_input=valid.jsonl")
    train = ("launcher", "local", "configs/experiments/demo.yaml", "--ranks=1", "--run-dir=run")
    small = ("data.path=data", "engine.kind=torch", "model.num_layers=1", "data.lanes=4")
    small += (
        "evaluation.max_tokens=200",
        "optim.schedule.warmup_steps=1",
        "optim.schedule.shape=constant",
    )
    for steps in (2, 3):
        run(programs, tmp_path, *train, *small, f"optim.steps={steps}")
    starts = find_events(RunDir(tmp_path / "run").ledger.read(), TrainingBegan)
    assert [event.step for event in starts] == [0, 2]
