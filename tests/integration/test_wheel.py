"""A release: sdist and wheel, installed into an empty environment and used from elsewhere."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distributions
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
    """The wheel of an sdist, both built as `make dist` does, from a copy of the checkout."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (command,) = re.findall(r"^\tuv (build .*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    command = command.replace("$(BIN)/python", sys.executable).split()
    build = [sys.executable, "-m", "uv", *command, "--out-dir", output]
    subprocess.run(build, cwd=source, env=ENVIRONMENT, check=True)
    assert len(list(output.glob("*.tar.gz"))) == 1
    (built,) = output.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory) -> Path:
    """The console scripts' folder in an environment of the wheel and, as links to our own, of the
    packages of requirements.lock alone: the check fails if the wheel asks for more.
    """
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False)
    (packages,) = environment.glob("lib/*/site-packages")
    lock = (ROOT / "requirements.lock").read_text()
    locked = set(re.findall(r"^([\w-]+)==", lock, re.MULTILINE))
    for ours in distributions():
        if re.sub(r"[._]", "-", ours.name).lower() in locked:
            for top in {file.parts[0] for file in ours.files or ()} - {"..", "__pycache__"}:
                if not (packages / top).exists():
                    (packages / top).symlink_to(Path(str(ours.locate_file(top))))
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python"]
    for command in (("install", "--quiet", "--no-deps", "--no-index", wheel), ("check",)):
        subprocess.run([*pip, *command], env=ENVIRONMENT, check=True)
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


def test_the_first_commands_of_the_readme_run_and_resume(wheel, programs, tmp_path):
    version = wheel.name.split("-")[1]
    assert run(programs, tmp_path, "pretrain", "--version").startswith(f"pretrain {version}, torch")
    model = "configs/models/xl_modern_100m.yaml"
    described = run(programs, tmp_path, "pretrain", "describe", model, "model.vocab_size=32000")
    assert "100,125,440" in described
    (tmp_path / "TEXTS").mkdir()
    for number in range(120):
        (tmp_path / "TEXTS" / f"{number}.txt").write_text(f"{number} words " * 200)
    short = ("optim.steps=2", "optim.schedule.warmup_steps=1", "evaluation.max_tokens=200")
    settings = {"build": ["tokenizer.kind=bytes"], "local": short}
    block = (ROOT / "README.md").read_text().partition("**Your text**")[2].split("```")[1]
    for line in block.strip().splitlines():
        words = shlex.split(line, comments=True)
        run(programs, tmp_path, *words, *settings.get(words[1], ()))
    assert (tmp_path / "mine-hf" / "model.safetensors").exists()
    assert (tmp_path / "runs" / "mine" / "report.html").exists()
    run(programs, tmp_path, "launcher", "local", "mine.yaml", *short, "optim.steps=3")
    starts = find_events(RunDir(tmp_path / "runs" / "mine").ledger.read(), TrainingBegan)
    assert [event.step for event in starts] == [0, 2]
