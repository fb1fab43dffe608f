"""Tests pass in any checkout: one full of runs and corpora, one that nobody may write to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.checkout import ROOT
from tests.helpers.corpora import make_tiny_corpus

# Whose experiment names the corpus of the demo by a relative path.
ROOM = ROOT / "tests" / "unit" / "pretrain" / "scaling" / "test_plan.py"


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_text(""),
        lambda path: path.mkdir(),
        lambda path: os.open(path, os.O_CREAT | os.O_WRONLY),
        lambda path: Path("own").replace(path),
        lambda path: path.symlink_to("own"),
        lambda path: (ROOT / "README.md").touch(),
        lambda path: (ROOT / "README.md").unlink(),
    ],
)
def test_a_test_that_changes_the_checkout_fails(change):
    Path("own").write_text("")
    with pytest.raises(OSError, match="must not change the checkout"):
        change(ROOT / "new")
    assert not (ROOT / "new").exists()


def test_a_test_sees_nothing_that_commands_left():
    assert not list(Path().iterdir())
    with pytest.raises(FileNotFoundError):
        (ROOT / "runs" / "demo" / "report.html").read_text()
    with pytest.raises(FileNotFoundError):
        list((ROOT / "runs").iterdir())


@pytest.mark.slow
def test_tests_started_where_the_demo_and_others_left_files_pass_and_leave_them():
    make_tiny_corpus(Path("runs/demo/data"))
    make_tiny_corpus(Path("corpus"))
    for name in ("runs/tiny", "runs/mine", "configs/experiments", "wandb"):
        Path(name).mkdir(parents=True)
    for name in (
        "tiny.yaml",
        "mine.yaml",
        "sweep.yaml",
        "configs/experiments/demo.yaml",
        "wandb/settings",
    ):
        Path(name).write_text("not what a test wrote")
    before = sorted(Path().rglob("*"))
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", ROOM]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert sorted(Path().rglob("*")) == before
