"""Ranks of an older attempt that still save while a newer one has the run, at chosen moments."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import CheckpointError
from foundation.retry import Patience
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from pretrain.checkpoint.checkpointer import Checkpointer
from pretrain.checkpoint.destinations import Disk
from pretrain.checkpoint.resume_point import find_resume_point
from pretrain.config.data import DataConfig
from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.config.run import CheckpointConfig, RunConfig
from pretrain.distributed.world import World
from pretrain.engines.engine import Engine
from pretrain.run import build_engine
from pretrain.rundir.lock import Fence
from pretrain.state import TrainState

RUN = RunConfig(
    model=ModelConfig(vocab_size=37, num_layers=1, d_model=32, num_heads=2, memory_length=8),
    data=DataConfig(lanes=2, segment_length=8),
    engine=EngineConfig(kind="torch", zero_stage=0),
    checkpoint=CheckpointConfig(keep_last=9),
)
SECONDS = 20


@pytest.fixture(scope="module")
def engine(world: World) -> Engine:
    return build_engine(RUN, world)


class Attempt(Checkpointer):
    """An attempt's saves, whose publications wait, fenced already, until they `may_publish`."""

    def __init__(self, root: Path, world: World, name: str) -> None:
        self.fence = Fence(root.parent, name)
        self.fence.claim()
        self.is_about_to_publish, self.may_publish = threading.Event(), threading.Event()
        super().__init__(RUN, Disk(root, name, "a-run", self._check), world, Patience(60))

    def _check(self) -> None:
        self.fence.check()
        if threading.current_thread().name == "save":
            self.is_about_to_publish.set()
            assert self.may_publish.wait(SECONDS)


def test_an_older_attempt_that_gives_up_leaves_the_files_of_the_newer_one(
    engine, world, tmp_path, caplog
):
    root = tmp_path / "checkpoints"
    old, new = (Attempt(root, world, name) for name in ("old", "new"))
    new.save(engine, TrainState(step=3, memories=[None]))
    assert new.is_about_to_publish.wait(SECONDS)
    old.save(engine, TrainState(step=3, memories=[None]))
    with pytest.raises(CheckpointError, match="could not save step 3: attempt old exits"):
        old.finish()
    new.may_publish.set()
    assert new.finish()
    assert "not saved" not in caplog.text
    marker.verify(files.step_directory(root, 3))


@pytest.mark.parametrize("moment", ["before the removal", "in it", "after it"])
def test_a_start_that_removes_what_an_older_attempt_is_publishing_leaves_all_or_nothing(
    engine, world, tmp_path, caplog, monkeypatch, moment
):
    root = tmp_path / "checkpoints"
    old = Attempt(root, world, "old")
    old.save(engine, TrainState(step=3, memories=[None]))
    assert old.is_about_to_publish.wait(SECONDS)
    new = Fence(tmp_path, "new")
    new.claim()
    told: list[str] = []

    def publish_now() -> None:
        old.may_publish.set()
        if not told:
            told.append(_told_by(old))

    def unlink(path: Any, real: Any = os.unlink, **more: Any) -> None:
        real(path, **more)
        monkeypatch.undo()  # once, after the first of the files
        publish_now()

    if moment == "before the removal":
        publish_now()
    if moment == "in it":
        monkeypatch.setattr(os, "unlink", unlink)
    find_resume_point(root, world, "a-run")
    publish_now()
    assert "No such file" not in caplog.text + told[0]
    if moment == "before the removal":
        assert told == ["saved"]
        marker.verify(files.step_directory(root, 3))
    else:
        assert "could not save step 3: attempt old exits: attempt new has claimed" in told[0]
        assert told[0].endswith("older checkpoints are untouched")
        assert not files.steps_on_disk(root)
    assert not [each for each in root.iterdir() if each.name.startswith(".partial")]


def _told_by(attempt: Attempt) -> str:
    """What the ranks of an attempt report of their save."""
    try:
        return "saved" if attempt.finish() else "not saved"
    except CheckpointError as error:
        return str(error)
