"""What a start resumes from: what is published stays the least, and every destination counts.

A checkpoint here is one of `tests.helpers.checkpoints`, which verifies and which no model has.
"""

import gc
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from foundation.files import content_of
from foundation.typed_values import from_json, to_tree
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import retention
from pretrain.checkpoint import verify as verify_module
from pretrain.checkpoint.disk import Disk
from pretrain.checkpoint.facts import Candidate, Destination, Fact, Past, Refusal, choose_candidate
from pretrain.checkpoint.index import INDEX_FORMAT, Checkpoint, read_index
from pretrain.checkpoint.local_checkpoints import MAY_DIFFER, LocalCheckpoints
from pretrain.checkpoint.mirror import Publication
from pretrain.checkpoint.object_store import (
    MIRROR_INDEX,
    RUN_FILES,
    MirrorIndex,
    ObjectStore,
    StoredCheckpoint,
)
from pretrain.checkpoint.resume_point import find_resume_point
from pretrain.checkpoint.verify import latest_valid, steps_that_count, verify
from pretrain.cli import main
from pretrain.config.run import CheckpointConfig, RunConfig
from pretrain.errors import CheckpointError, OtherVersionError, UnreadableError
from pretrain.rundir.events import (
    AttemptEnded,
    AttemptReason,
    Event,
    Mirrored,
    NextAction,
    Outcome,
    Published,
    Restored,
    ResumeFrom,
    Rewind,
    Spike,
    TrainingBegan,
    TrainingEnded,
)
from pretrain.rundir.history import attempt_history, past_of
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkpoints import flip_a_bit, publish_step, rewrite_index
from tests.helpers.mirrors import run_in, save
from tests.helpers.stores import QUICK, FileServer

DISK, NODES, STORE = Destination


def fact(step: int, where: Destination = DISK) -> Fact:
    return Fact(step, where, where.value)


def at(step: int, where: Destination = DISK, problem: str = "") -> Candidate:
    return Candidate(step, where, where.value, problem)


@pytest.mark.parametrize(
    ("facts", "candidates", "asked", "chosen"),
    [
        ([], [], None, None),
        ([fact(20)], [at(10), at(20)], None, at(20)),
        ([fact(20)], [at(20), at(30)], None, at(30)),  # killed before the fact was told
        ([fact(20)], [at(20, STORE), at(20, DISK, "bad"), at(20, NODES)], None, at(20, NODES)),
        ([fact(20)], [at(10), at(20, STORE)], None, at(20, STORE)),
        ([fact(20), fact(26, NODES)], [at(20)], None, at(20)),  # a node that is gone stops nothing
        ([fact(20), fact(26, NODES)], [at(20, DISK, "bad"), at(26, NODES)], None, at(26, NODES)),
        ([fact(20)], [], None, "step 20 .*run directory.* not there.*from-step 0$"),
        ([fact(20)], [at(10), at(20, DISK, "bad")], None, "^bad; .*step 10.*from-step 10$"),
        ([fact(20, STORE)], [at(10)], None, "step 20 .*object store .*from-step 10$"),
        ([fact(20)], [at(20, STORE, "away"), at(10)], None, "^away and .* run directory"),
        ([fact(2, NODES)], [at(2, NODES, "bad")], None, None),
        ([], [at(10, DISK, "bad")], None, "^bad; .*beginning with --from-step 0$"),
        ([fact(20)], [at(10), at(20)], 10, at(10)),
        ([fact(20)], [at(10), at(20)], 0, None),
        ([fact(20)], [at(10), at(20)], 15, "asks for step 15.*no checkpoint of step 15.*step 20"),
        ([fact(20)], [at(10), at(20, DISK, "bad")], 20, "asks for step 20, but bad;"),
    ],
)
def test_nothing_older_than_what_is_published_is_chosen_unasked(facts, candidates, asked, chosen):
    found = choose_candidate(facts, candidates, asked)
    if isinstance(chosen, str):
        assert isinstance(found, Refusal)
        assert re.search(chosen, found.sentence)
        assert "\n" not in found.sentence
    else:
        assert found == chosen


def began(attempt: str, step: int = 0, *, local: bool = False) -> TrainingBegan:
    return TrainingBegan(step=step, world_size=1, attempt=attempt, local=local)


def told(attempt: str, step: int, where: Destination = DISK) -> Published:
    return Published(step=step, attempt=attempt, destination=where)


def ended(step: int) -> AttemptEnded:
    return AttemptEnded(
        attempt_number=0, statuses=(-9,), step_before=0, step=step,
        reason=AttemptReason.RANK_FAILED, next=NextAction.RETRY, first_failure=0,
    )  # fmt: skip


REWIND = Rewind(spike=Spike(15, 34), to_step=10, segments=(13, 45))
STORED = Mirrored(step=10, url="object store")


@pytest.mark.parametrize(
    ("ledger", "newest"),
    [
        ([began("a")], {}),
        ([began("a"), told("a", 10), told("a", 20)], {DISK: 20}),
        (
            [began("a"), told("a", 10), STORED, told("a", 15, NODES)],
            {DISK: 10, STORE: 10, NODES: 15},
        ),
        ([began("a"), told("a", 10), told("a", 20), REWIND], {DISK: 10}),
        ([began("a"), told("a", 20), REWIND, began("b", 10), told("b", 20)], {DISK: 20}),
        ([began("a"), told("a", 20), ResumeFrom(step=0)], {DISK: 20}),
        ([began("a"), told("a", 20), ResumeFrom(step=0), began("b", 0)], {}),
        ([began("a"), told("a", 20), began("b", 10), told("a", 30)], {DISK: 10}),  # a stale attempt
        ([began("a"), told("a", 20), Restored(step=10, url="object store")], {DISK: 10, STORE: 10}),
        # of earlier versions
        ([began("a"), began("b", 20)], {DISK: 20}),
        ([began("a"), ended(20)], {DISK: 20}),
        ([began("a"), TrainingEnded(outcome=Outcome.STOPPED, step=7)], {DISK: 7}),
        ([began("a"), ended(20), REWIND], {}),
    ],
)
def test_the_ledger_has_what_is_published_and_not_undone(ledger: list[Event], newest):
    found: dict[Destination, int] = {}
    past = past_of(ledger, "run directory")
    for each in past.facts:
        found[each.destination] = max(each.step, found.get(each.destination, 0))
    assert found == newest
    assert past.asked == (0 if isinstance(ledger[-1], ResumeFrom) else None)


def test_what_rank_0_knows_of_the_past_reaches_all_ranks(stored):
    past = stored.past()
    assert past.facts
    assert past.history.standing
    assert from_json(Past, json.dumps(to_tree(past))) == past


def test_a_checkpoint_without_an_attempt_stands_as_those_of_its_time_do():
    assert attempt_history([]).stands(20, "")
    assert attempt_history([began("a")]).stands(20, "")
    assert not attempt_history([began("a"), REWIND]).stands(20, "")
    assert not attempt_history([began("a"), began("b", 10), told("b", 12), REWIND]).stands(20, "")


# --------------------------------------------------------- real files, and a store on a web server


def mirror(run_dir: RunDir, steps: list[int], home: Path) -> None:
    """Put the checkpoints of these steps into `home`, as uploads do."""
    stored = []
    for step in steps:
        directory = files.step_directory(run_dir.checkpoints, step)
        new = StoredCheckpoint.of(directory)
        shutil.copytree(directory, home / new.folder, dirs_exist_ok=True)
        for name in RUN_FILES:
            shutil.copy(run_dir.path / name, home / new.folder)
        contents = {name: content_of(home / new.folder / name) for name in RUN_FILES}
        stored.append(replace(new, run_files=contents))
    (home / MIRROR_INDEX).write_bytes(MirrorIndex(run_dir.identity.id, tuple(stored)).to_bytes())


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "store").mkdir()
    with FileServer(tmp_path / "store") as server:
        yield server.url


@pytest.fixture
def stored(tmp_path: Path, url: str) -> RunDir:
    """A run that has published steps 100 to 300, of which 100 and 200 are in the store, too."""
    run_dir = run_in(tmp_path / "run", [])
    for step in (100, 200, 300):
        save(run_dir, step)
        run_dir.ledger.append(told("17.0.0.ab", step))
    run_dir.ledger.append(Mirrored(step=200, url=url))
    mirror(run_dir, [100, 200], tmp_path / "store")
    return run_dir


def look(run_dir: RunDir, world, before: int | None = None) -> int:
    """The step that a start, or a rewind, takes; it is whole in the run directory then."""
    root, run_id = run_dir.checkpoints, run_dir.identity.id
    found = find_resume_point(root, world, run_id, before, past=run_dir.past())
    if found is None:
        return 0
    assert verify(files.step_directory(root, found.step)).step == found.step
    return found.step


def empty(run_dir: RunDir) -> None:
    for step in files.steps_on_disk(run_dir.checkpoints):
        shutil.rmtree(files.step_directory(run_dir.checkpoints, step))


def damage(run_dir: RunDir, *steps: int) -> None:
    for step in steps:
        flip_a_bit(files.step_directory(run_dir.checkpoints, step) / files.rank_file(1))


def undo(run_dir: RunDir) -> None:
    run_dir.ledger.append(Rewind(spike=Spike(150, 170), to_step=100, segments=(149, 180)))


def lose_the_last(run_dir: RunDir) -> None:
    shutil.rmtree(files.step_directory(run_dir.checkpoints, 300))


@pytest.mark.parametrize(
    ("acts", "before", "taken"),
    [
        ([], None, 300),
        ([empty], None, "step 300 was saved in .*checkpoints.* step 200 in http.*--from-step 200$"),
        ([empty, lambda run: run.ask_to_resume_from(200)], None, 200),
        ([empty, lambda run: run.ask_to_resume_from(0)], None, 0),
        ([lose_the_last], None, "step 300 .*not there; .* step 200 in .*checkpoints"),
        ([lambda run: damage(run, 300)], None, "00300.* changed since .*--from-step 200$"),
        ([undo], None, 100),
        ([undo, lambda run: damage(run, 100)], None, 100),  # repaired from the store
        ([undo, empty], None, 100),
        ([empty], 250, 200),  # a rewind of a run that came from the store
        ([empty], 150, 100),
        ([lambda run: damage(run, 200)], 250, 200),
    ],
)
def test_a_start_looks_everywhere_and_refuses_to_lose_steps(stored, world, acts, before, taken):
    for act in acts:
        act(stored)
    on_disk, lines = files.steps_on_disk(stored.checkpoints), stored.metrics.read_bytes()
    if isinstance(taken, int):
        assert look(stored, world, before) == taken
    else:
        with pytest.raises(CheckpointError, match=taken) as refused:
            look(stored, world, before)
        assert "remove" not in str(refused.value)
    assert set(on_disk) <= set(files.steps_on_disk(stored.checkpoints)), "nothing is removed"
    assert stored.metrics.read_bytes() == lines


def test_a_store_that_is_away_matters_only_if_something_is_missing(stored, world, tmp_path):
    (tmp_path / "store" / MIRROR_INDEX).write_text("{}")
    assert look(stored, world) == 300
    damage(stored, 300)
    with pytest.raises(UnreadableError, match=r"could not be asked .*--from-step 200$"):
        look(stored, world)


def test_an_older_copy_of_a_run_does_not_pass_by_what_the_store_has(stored, world, tmp_path, url):
    copy = RunDir(shutil.copytree(stored.path, tmp_path / "copy"))
    stored.ledger.append(began("later", 300))
    publish_step(stored.checkpoints, 400, run=stored.identity.id, attempt="later")
    mirror(stored, [200, 400], tmp_path / "store")
    with pytest.raises(CheckpointError, match=r"has step 400, which .*copy lacks"):
        look(copy, world)
    # as if the store had been away when the copy started
    disk = Disk(copy.checkpoints, "b", copy.identity.id)
    store = ObjectStore(url, tmp_path, QUICK)
    uploads = Publication(store, disk, 300, CheckpointConfig(), copy.past().history)
    with pytest.raises(CheckpointError, match=r"has step 400 of this run.*--from-step 300"):
        uploads.publish(copy.checkpoints / "step-00000300", lambda: None)
    assert look(stored, world) == 400


def test_a_damaged_shared_step_does_not_hide_later_ones_on_the_nodes(tmp_path, world, caplog):
    config = RunConfig(checkpoint=CheckpointConfig(local=tmp_path / "node"))
    run_dir = RunDir.create(tmp_path / "run", config)
    run_id = run_dir.identity.id
    run_dir.ledger.append(began("a"))
    for step in (20, 40):
        publish_step(run_dir.checkpoints, step, run=run_id, attempt="a")
        run_dir.ledger.append(told("a", step))
    tree = {k: v for k, v in to_tree(config).items() if k not in MAY_DIFFER}
    own = tmp_path / "node" / f"run-{run_id}" / "rank-00000"
    local = {"attempt": "a", "rank": 0, "world_size": 1}
    tree = json.loads(json.dumps(tree))
    for step in (41, 44):
        publish_step(own, step, 1, run=run_id, local=local, config=tree)
        run_dir.ledger.append(told("a", step, NODES))
    damage(run_dir, 40)

    def found() -> tuple[int, bool]:
        past = run_dir.past()
        disk = Disk(run_dir.checkpoints, "b", run_id)
        tier = LocalCheckpoints(config, disk, world, past.history)
        point = find_resume_point(run_dir.checkpoints, world, run_id, past=past, local=tier)
        assert point is not None
        return point.step, point.is_local

    assert found() == (44, True)
    flip_a_bit(own / "step-00000044" / files.rank_file(0))
    assert found() == (41, True)
    damage(run_dir, 40)
    shutil.rmtree(own)
    caplog.clear()
    assert found() == (40, False), "a node that is gone stops no start"
    assert caplog.text.count("has none on its node; using step 40") == 1


# --------------------------------------------------------- commands beside a run, other versions


def test_a_damaged_old_step_does_not_keep_a_later_one_from_being_noted(tmp_path, world):
    run_dir = run_in(tmp_path / "run", [100, 200, 300])
    old, later = (files.step_directory(run_dir.checkpoints, step) for step in (100, 300))
    verify_module.note_refusal(old, f"{verify_module.UNDONE} to step 0")
    (old / files.INDEX).write_text("{}")
    run_dir.ask_to_resume_from(200)
    assert look(run_dir, world) == 200
    assert verify_module.is_undone(old)
    assert verify_module.is_undone(later)


def prune_and_publish(root: Path) -> None:
    """What a run with keep_last=1 does."""
    newest = max(files.steps_on_disk(root))
    publish_step(root, newest + 10)
    retention.prune(root, steps_that_count(root), keep_last=1)


@pytest.mark.parametrize("moment", ["read_index", "check_share"])
def test_what_a_run_prunes_while_a_command_reads_is_no_damage(tmp_path, monkeypatch, moment):
    publish_step(tmp_path, 10)
    real: Callable[..., Checkpoint] = getattr(verify_module, moment)
    number = 0

    def disturbed(*arguments, **options):
        nonlocal number
        number += 1
        if number == 1:
            monkeypatch.setattr(verify_module, moment, real)
            shutil.move(tmp_path / "step-00000010", tmp_path / "gone")
            publish_step(tmp_path, 20)
        return real(*arguments, **options)

    monkeypatch.setattr(verify_module, moment, disturbed)
    said: list[str] = []
    found = latest_valid(tmp_path, said.append)
    assert found is not None
    assert (found.step, said) == (20, [])
    prune_and_publish(tmp_path)
    assert found.directory.is_dir(), "what a command reads stays"
    del found
    gc.collect()  # what was pruned meanwhile has left a traceback
    prune_and_publish(tmp_path)
    assert files.steps_on_disk(tmp_path) == [40]


def test_a_checkpoint_of_another_version_is_named_so_and_gets_no_note(tmp_path, world):
    for step in (10, 20):
        publish_step(tmp_path, step)
    rewrite_index(tmp_path / "step-00000020", lambda index: index.update(format=99))
    for find in (
        lambda: find_resume_point(tmp_path, world, ""),
        lambda: latest_valid(tmp_path, pytest.fail),
    ):
        with pytest.raises(OtherVersionError, match=rf"format 99, .*{INDEX_FORMAT}"):
            find()
    assert not list(tmp_path.glob(f"*/{files.REFUSED}"))


def test_verify_tells_damage_from_pruning_and_other_versions(stored, monkeypatch, capsys):
    rewrite_index(stored.checkpoints / "step-00000300", lambda index: index.update(format=99))
    real = read_index

    def pruning(directory: Path, run_id: str = "") -> Checkpoint:
        if directory.name == "step-00000100":
            shutil.rmtree(directory)
        return real(directory, run_id)

    monkeypatch.setattr(verify_module, "read_index", pruning)
    assert main(["checkpoint", "verify", str(stored.path)]) == 2
    said = capsys.readouterr().out
    assert "step 100: pruned\nstep 200: valid\nstep 300: of another version  " in said
    assert "1 of 2 checkpoints are valid" in said
    assert "CORRUPTED" not in said
