import contextlib
import errno
import json
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.errors import UserError
from foundation.typed_values import to_tree
from pretrain.checkpoint import directory as files
from pretrain.checkpoint.checkpointer import Checkpointer
from pretrain.checkpoint.disk import Disk
from pretrain.checkpoint.facts import EVER, AttemptHistory
from pretrain.checkpoint.index import Checkpoint
from pretrain.checkpoint.load import load_fragments, restore_counters, restore_random_state
from pretrain.checkpoint.local_checkpoints import MAY_DIFFER, LocalCheckpoints
from pretrain.checkpoint.resume_point import find_resume_point
from pretrain.checkpoint.storage_retry import StorageRetry
from pretrain.checkpoint.transfer import SaveProblem
from pretrain.checkpoint.verify import verify
from pretrain.config.run import CheckpointConfig, DataConfig, EngineConfig, ModelConfig, RunConfig
from pretrain.distributed.world import World
from pretrain.engines.engine import Engine
from pretrain.errors import CheckpointError, StorageError, UnreadableError
from pretrain.recovery.stop_requests import StopRequest
from pretrain.run import build_engine
from pretrain.rundir.events import Restored, Rewind, Spike, TrainingBegan
from pretrain.rundir.history import attempt_history
from pretrain.rundir.lock import Fence, StaleAttempt
from pretrain.state import TrainState
from tests.helpers.checkpoints import publish_step
from tests.helpers.jobs import until
from tests.helpers.models import random_tokens

RUN = RunConfig(
    model=ModelConfig(vocab_size=37, num_layers=2, d_model=256, num_heads=2, memory_length=8),
    data=DataConfig(lanes=4, segment_length=8),
    engine=EngineConfig(kind="torch", zero_stage=0, micro_batch_lanes=2),
)


@pytest.fixture(scope="module")
def engine(world: World) -> Engine:
    return build_engine(RUN, world)


def state_of(engine: Engine, step: int) -> TrainState:
    """Two slots with a memory each, as after `step` updates."""
    tokens_BL = random_tokens(4, 9, seed=step)
    memories = []
    for slot in (slice(0, 2), slice(2, 4)):
        _, memory = engine.module(tokens_BL[slot, :-1], tokens_BL[slot, 1:], None)
        memories.append(tuple(part.detach() for part in memory))
    return TrainState(step=step, memories=memories)


def checkpointer(root, world, asynchronous=True, retry=None) -> Checkpointer:
    kept = CheckpointConfig(asynchronous=asynchronous, keep_last=9)
    disk = Disk(root, "attempt", "a-run")
    return Checkpointer(replace(RUN, checkpoint=kept), disk, world, retry=retry)


def saved(engine, world, root, state, asynchronous=True) -> Checkpoint:
    saving = checkpointer(root, world, asynchronous)
    saving.save(engine, state)
    saving.finish()
    return verify(files.step_directory(root, state.step))


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """Files of this process cannot become as long as those of the engine."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_asynchronous_save_writes_the_bytes_of_a_blocking_one(engine, world, tmp_path):
    state = state_of(engine, step=3)
    blocking = saved(engine, world, tmp_path / "blocking", state, asynchronous=False)
    background = checkpointer(tmp_path / "background", world)
    background.save(engine, state)
    background.wait_for_copy()
    for fragment in engine.fragments():
        for value in fragment.values.values():
            value.uniform_(-1.0, 1.0)
    background.finish()
    found = verify(files.step_directory(tmp_path / "background", 3))
    assert found.files == blocking.files


def test_the_next_call_raises_the_error_of_a_save_and_removes_its_files(engine, world, tmp_path):
    saving = checkpointer(tmp_path, world)
    saving.save(engine, state_of(engine, 1))
    saving.finish()
    with no_room():
        saving.save(engine, state_of(engine, 2))
        until(lambda: saving.has_failed)  # known before anybody waits for the save
        with pytest.raises(StorageError, match=r"step 2.*rank-00000"):
            saving.finish()
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]
    saving.save(engine, state_of(engine, 2))
    saving.finish()
    assert files.steps_on_disk(tmp_path) == [1, 2]


def test_a_failed_save_is_followed_by_another(engine, world, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("pretrain.checkpoint.storage_retry.FIRST_PAUSE", 0.2)
    saving = checkpointer(tmp_path, world, retry=StorageRetry(60))
    with no_room():
        assert saving.save(engine, state_of(engine, 1))
        assert not saving.finish()
        assert not saving.is_to_try_again, "not at once: storage needs time"
        assert not list(tmp_path.iterdir())
        until(lambda: saving.is_to_try_again)
    saving.save(engine, state_of(engine, 2))
    assert saving.finish()
    assert not saving.is_to_try_again
    assert files.steps_on_disk(tmp_path) == [2]
    assert f"{tmp_path}/.partial-00000001-attempt/rank-00000.safetensors" in caplog.text


def test_the_last_save_waits_for_what_comes_before_it(engine, world, tmp_path, monkeypatch):
    monkeypatch.setattr("pretrain.checkpoint.storage_retry.FIRST_PAUSE", 1.0)
    waited: list[int] = []
    state, obstacles = state_of(engine, 3), iter(["metrics.jsonl: no space"] * 2)
    saving = checkpointer(tmp_path, world, retry=StorageRetry(60, lambda: waited.append(1)))
    saving.until_published(lambda: saving.save(engine, state, obstacle=lambda: next(obstacles, "")))
    assert files.steps_on_disk(tmp_path) == [3]
    assert len(waited) >= 2, "the heartbeat goes on meanwhile"


def test_a_stop_request_ends_the_last_saves_wait_for_storage(engine, world, tmp_path, caplog):
    stop = StopRequest()
    retry = StorageRetry(600, stop_requests=lambda: stop.count)
    saving = checkpointer(tmp_path / "checkpoints", world, retry=retry)
    (tmp_path / "checkpoints").write_text("not a directory")
    asked = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    asked.start()
    started = time.monotonic()
    try:
        with pytest.raises(UserError, match="step 7"):
            saving.until_published(lambda: saving.save(engine, state_of(engine, 7)))
    finally:
        asked.join()
        stop.restore_handlers()
    assert time.monotonic() - started < 300
    (said,) = [record.getMessage() for record in caplog.records]
    assert str(tmp_path / "checkpoints") in said


def test_a_checkpoint_lost_after_it_was_verified_is_refused_by_name(engine, world, tmp_path):
    found = saved(engine, world, tmp_path, state_of(engine, 1))
    lost = found.directory / files.rank_file(0)
    lost.unlink()
    with pytest.raises(UnreadableError, match=lost.name):
        checkpointer(tmp_path, world).restore(engine, found)


def test_a_save_that_storage_is_not_to_blame_for_is_not_tried_again(engine, world, tmp_path):
    def newer_attempt() -> None:
        raise StaleAttempt("a newer attempt has the run")

    disk = Disk(tmp_path, "attempt", "a-run", newer_attempt)
    saving = Checkpointer(RUN, disk, world, StorageRetry(60))
    saving.save(engine, state_of(engine, 1))
    with pytest.raises(CheckpointError):
        saving.finish()


@pytest.mark.parametrize(
    "change", [lambda memory: memory[::-1], lambda memory: (memory[0][..., 1:], *memory[1:])]
)
def test_memories_of_another_model_are_refused_before_use(engine, world, tmp_path, change):
    state = state_of(engine, 1)
    state.memories = [change(memory) for memory in state.memories if memory]
    found = saved(engine, world, tmp_path, state)
    with pytest.raises(CheckpointError):
        checkpointer(tmp_path, world)._restore_memories(engine, found, range(4))


def test_an_engine_that_a_checkpoint_fills_draws_nothing(engine, world, tmp_path):
    torch.rand(3)
    drawn = torch.get_rng_state()
    found = saved(engine, world, tmp_path, state_of(engine, 1))
    torch.manual_seed(RUN.seed)
    undrawn = torch.get_rng_state()
    empty = build_engine(RUN, world, draws=False)
    assert torch.equal(torch.get_rng_state(), undrawn)
    weights = [weight for weight in empty.module.parameters() if weight.ndim > 1]
    assert not any(weight.any() for weight in weights)
    load_fragments(empty, found)
    restore_counters(empty, found)
    restore_random_state(found, 0)
    assert torch.equal(torch.get_rng_state(), drawn)
    for ours, theirs in zip(empty.fragments(), engine.fragments(), strict=True):
        torch.testing.assert_close(ours.values, theirs.values, rtol=0, atol=0)
    assert all(map(torch.equal, empty.module.parameters(), engine.module.parameters()))


def test_a_save_that_finds_no_host_memory_may_be_followed_by_another():
    for kind in (torch.empty, bytearray):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            kind(1 << 60)
        assert SaveProblem.of(caught.value).is_transient
    assert not SaveProblem.of(RuntimeError("another")).is_transient


SECONDS = 20


class Attempt(Checkpointer):
    """An attempt's saves, whose publications wait, fenced already, until they `may_publish`."""

    def __init__(self, root: Path, world: World, name: str) -> None:
        self.fence = Fence(root.parent, name)
        self.fence.claim()
        self.is_about_to_publish, self.may_publish = threading.Event(), threading.Event()
        super().__init__(RUN, Disk(root, name, "a-run", self._check), world, StorageRetry(60))

    def _check(self) -> None:
        self.fence.check()
        if threading.current_thread().name == "save":
            self.is_about_to_publish.set()
            assert self.may_publish.wait(SECONDS)


def test_an_older_attempt_leaves_the_files_of_a_newer_one(engine, world, tmp_path, caplog):
    root = tmp_path / "checkpoints"
    old, new = (Attempt(root, world, name) for name in ("old", "new"))
    new.save(engine, TrainState(step=3, memories=[None]))
    assert new.is_about_to_publish.wait(SECONDS)
    old.save(engine, TrainState(step=3, memories=[None]))
    with pytest.raises(CheckpointError, match="attempt old"):
        old.finish()
    new.may_publish.set()
    assert new.finish()
    assert "not saved" not in caplog.text
    verify(files.step_directory(root, 3))


@pytest.mark.parametrize("moment", ["before the removal", "in it", "after it"])
def test_a_publication_is_all_or_nothing(engine, world, tmp_path, caplog, monkeypatch, moment):
    root = tmp_path / "checkpoints"
    old = Attempt(root, world, "old")
    old.save(engine, TrainState(step=3, memories=[None]))
    assert old.is_about_to_publish.wait(SECONDS)
    new = Fence(tmp_path, "new")
    new.claim()
    told: list[str] = []

    def publish_now() -> None:
        """Then `told` is what the ranks of the older attempt report of their save."""
        old.may_publish.set()
        if not told:
            try:
                told.append("saved" if old.finish() else "not saved")
            except CheckpointError as error:
                told.append(str(error))

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
    assert os.strerror(errno.ENOENT) not in caplog.text + told[0]
    if moment == "before the removal":
        assert told == ["saved"]
        verify(files.step_directory(root, 3))
    else:
        assert "attempt old" in told[0]
        assert not files.steps_on_disk(root)
    assert not [each for each in root.iterdir() if each.name.startswith(".partial")]


ID = "0123456789ab"


def tier(disk: Path, world: World, run_id: str = ID) -> LocalCheckpoints:
    config = replace(RunConfig(), checkpoint=CheckpointConfig(local=disk))
    disk_of_run = Disk(Path(), "attempt", run_id)
    return LocalCheckpoints(config, disk_of_run, world, AttemptHistory({"before": 15}))


def start(attempt: str, step: int) -> TrainingBegan:
    return TrainingBegan(step=step, world_size=2, attempt=attempt)


REWIND = Rewind(spike=Spike(70, 90), to_step=60, segments=(68, 100))
RESTORED = Restored(step=40, url="s3://bucket/run")


@pytest.mark.parametrize(
    ("ledger", "standing"),
    [
        ([], {}),
        ([start("a", 0)], {"a": EVER}),
        ([start("a", 0), start("b", 50)], {"a": 50, "b": EVER}),
        ([start("a", 0), start("b", 50), start("c", 20)], {"a": 20, "b": 20, "c": EVER}),
        ([start("a", 0), start("b", 50), start("c", 80)], {"a": 50, "b": 80, "c": EVER}),
        ([start("a", 0), REWIND], {"a": 60}),
        ([start("a", 0), REWIND, start("a.1", 60)], {"a": 60, "a.1": EVER}),
        ([start("a", 0), start("b", 50), RESTORED], {"a": 40, "b": 40}),
    ],
)
def test_an_attempt_stands_up_to_where_a_later_start_or_a_rewind_went_back_to(ledger, standing):
    assert attempt_history(ledger).standing == standing


def test_a_link_in_the_place_of_a_runs_folder_ends_no_run(world, tmp_path, caplog):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"run-{ID}").symlink_to(tmp_path / "elsewhere")
    assert tier(tmp_path, world).offered() == []
    assert str(tmp_path / f"run-{ID}") in caplog.text
    assert not list((tmp_path / "elsewhere").iterdir())


def test_the_id_of_a_run_leads_nowhere_else(world, tmp_path, caplog):
    assert tier(tmp_path / "disk", world, run_id="../../away").offered() == []
    assert "../../away" in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("step", "num_ranks", "zero_stage", "why"),
    [
        (10, 1, 2, ""),
        (10, 2, 2, "step 10 .* rank 0 of 2, .* rank 0 of 1"),
        (10, 1, 1, r"step 10 .*engine\.zero_stage: 1 -> 2"),
        (20, 1, 2, "step 20 "),
    ],
)
def test_other_runs_steps_are_not_used(world, tmp_path, caplog, step, num_ranks, zero_stage, why):
    local = tier(tmp_path, world)
    tree = json.loads(json.dumps(to_tree(RunConfig(engine=EngineConfig(zero_stage=zero_stage)))))
    config = {name: part for name, part in tree.items() if name not in MAY_DIFFER}
    saved = {"attempt": "before", "rank": 0, "world_size": num_ranks}
    root = tmp_path / f"run-{ID}" / "rank-00000"
    publish_step(root, step, num_ranks=1, run=ID, local=saved, config=config)
    assert local.offered() == ([] if why else [step])
    if not why:
        assert local.get(step).step == step
    local.log_unused(6 if why else step, known=0)
    assert bool(re.search(f"rank 0: {why}.* step 6", caplog.text)) == bool(why)
    assert list(root.glob("step-*")), "nothing goes before this start has saved a step"
