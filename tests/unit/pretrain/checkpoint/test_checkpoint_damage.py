"""Every file of a checkpoint, damaged in every way: refused by name, and the one before is used."""

import contextlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pydantic.type_adapter  # noqa: F401  (a user without rights could not import it)
import pytest

from pretrain.checkpoint import directory as files
from pretrain.checkpoint import retention
from pretrain.checkpoint.disk import publish
from pretrain.checkpoint.index import read_index
from pretrain.checkpoint.resume_point import find_resume_point
from pretrain.checkpoint.storage_retry import StorageRetry
from pretrain.checkpoint.verify import (
    check_share,
    counts,
    latest_step,
    latest_valid,
    sha256_of,
    steps_that_count,
    verify,
)
from pretrain.cli import main
from pretrain.commands import checkpoint
from pretrain.config.run import CheckpointConfig, ModelConfig, RunConfig
from pretrain.errors import CheckpointError, UnreadableError
from pretrain.recovery.rewind import rewind
from pretrain.rundir.events import Spike
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkpoints import flip_a_bit, index_of, publish_step, rewrite_index
from tests.helpers.memory_limit import memory_limit

NAMES = (files.rank_file(0), files.rank_file(1), files.INDEX, files.MARKER)
NOBODY = 65534


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("published")
    for step in (1, 2):
        publish_step(root, step)
    return root


@pytest.fixture
def root(published: Path) -> Iterator[Path]:
    """A copy that another user may read: the checkpoints of steps 1 and 2."""
    with tempfile.TemporaryDirectory() as home:
        os.chmod(home, 0o755)
        root = shutil.copytree(published, Path(home) / "checkpoints")
        os.chmod(root, 0o755)
        yield root


def refused(root: Path, run_id: str = "") -> str:
    """Why the checkpoint of step 2 is skipped; that of step 1 is used."""
    said: list[str] = []
    assert latest_valid(root, said.append, run_id).step == 1
    (line,) = said
    return line


def flip(path: Path, offset: int, bit: int) -> None:
    contents = bytearray(path.read_bytes())
    contents[offset] ^= 1 << bit
    path.write_bytes(contents)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "top bit of the first byte": lambda path: flip(path, 0, 7),
    "lowest bit in the middle": flip_a_bit,
    "lowest bit of the last byte": lambda path: flip(path, -1, 0),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "directory": lambda path: (path.unlink(), path.mkdir()),
    "missing": Path.unlink,
    "FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
    "no permission": lambda path: path.chmod(0),
}


@contextlib.contextmanager
def without_root_permissions() -> Iterator[None]:
    """Root may read every file: the block runs as another user."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


def test_storage_that_fails_for_a_moment_is_waited_for_and_leaves_no_note(root, world, caplog):
    """No checkpoint can be read: EIO, as while a file server fails over."""
    away = root.with_name("away")
    shutil.copytree(root, away)
    for step in (1, 2):
        index = root / f"step-{step:08d}" / files.INDEX
        index.unlink()
        index.symlink_to("/proc/self/mem")  # EIO

    def come_back() -> None:
        for step in (1, 2):
            name = Path(f"step-{step:08d}") / files.INDEX
            os.replace(away / name, root / name)

    timer = threading.Timer(0.3, come_back)
    timer.start()
    assert find_resume_point(root, world, "", retry=StorageRetry(600)).step == 2
    timer.join()
    assert steps_that_count(root) == [1, 2]
    waits, _ = [record.getMessage() for record in caplog.records if record.levelno > 20]
    assert "index.json: " in waits


def test_a_mount_that_is_away_is_no_run_from_scratch(root, world):
    (root.parent / "run.json").write_text("{}")
    away = root.rename(root.with_name("away"))
    with pytest.raises(UnreadableError, match="checkpoints: "):
        find_resume_point(root, world, "")
    timer = threading.Timer(0.3, os.rename, (away, root))
    timer.start()
    assert find_resume_point(root, world, "", retry=StorageRetry(600)) is not None
    timer.join()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(root, name, how):
    step_2 = files.step_directory(root, 2)
    DAMAGE[how](step_2 / name)
    with without_root_permissions():
        said = refused(root)
    # A marker that does not match its index is named together with it.
    assert str(step_2 / name) in said or (name == files.MARKER and files.MARKER in said)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_whose_reading_fails_is_named_and_the_checkpoint_before_is_used(root, name):
    step_2 = files.step_directory(root, 2)
    if name not in (files.INDEX, files.MARKER):  # else its size is refused before it is read
        rewrite_index(step_2, lambda index: index["ranks"][NAMES.index(name)].update(bytes=0))
    (step_2 / name).unlink()
    (step_2 / name).symlink_to("/proc/self/mem")  # EIO, as from a disk that breaks
    assert f"{step_2 / name}: " in refused(root)


INDEXES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no format": lambda index: index.pop("format"),
    "no reports": lambda index: index.pop("ranks"),
    "a rank without a cursor": lambda index: index["ranks"][0].pop("cursor"),
    "a file without a checksum": lambda index: index["ranks"][1].pop("sha256"),
    "a file elsewhere": lambda index: index["ranks"][1].update(file="../../../etc/passwd"),
    "a size that is text": lambda index: index["ranks"][1].update(bytes="9" * 5000),
    "a checksum that is a number": lambda index: index["ranks"][1].update(sha256=1.5),
    "no pieces": lambda index: index.pop("pieces"),
    "pieces of another kind": lambda index: index.update(pieces=[]),
    "a parameter without kinds": lambda index: index["pieces"]["w"].update(kinds=[]),
    "pieces of no rank": lambda index: index["pieces"]["w"].update(runs=[[1, 0, 100, 2]]),
    "a run that is text": lambda index: index["pieces"]["w"].update(runs=["0001"]),
    "a world of minus one": lambda index: index.update(world_size=-1),
}


@pytest.mark.parametrize("how", INDEXES)
def test_an_index_of_another_form_is_refused_by_name_and_the_one_before_used(root, how):
    rewrite_index(files.step_directory(root, 2), INDEXES[how])
    assert files.INDEX in refused(root)


@pytest.mark.parametrize("content", [b"[]", b"3", b"\xff", b"{", b"[" * 100_000])
def test_an_index_that_is_no_object_is_refused_by_name(root, content):
    index = files.step_directory(root, 2) / files.INDEX
    index.write_bytes(content)
    index.with_name(files.MARKER).write_text(sha256_of(index) + "\n")
    assert str(index) in refused(root)


def test_a_file_with_other_pieces_than_the_index_says_is_refused_by_name(root):
    """Its checksum is right; a reader would take other elements than the index says."""
    directory = files.step_directory(root, 2)
    swapped = [[1, 0, 100, 1], [0, 100, 100, 1]]
    rewrite_index(directory, lambda index: index["pieces"]["w"].update(runs=swapped))
    with pytest.raises(CheckpointError, match=r"rank-00000.*w\|0\|weight"):
        verify(directory)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_share_the_reading_read_every_file_once(root, name):
    """Marker and index are read by all."""
    directory = files.step_directory(root, 2)
    flip_a_bit(directory / name)
    refusing = []
    for rank in range(3):
        try:
            check_share(read_index(directory), rank, world_size=3)
        except CheckpointError:
            refusing.append(rank)
    assert len(refusing) == (3 if name in (files.INDEX, files.MARKER) else 1)


def test_a_refused_checkpoint_is_no_progress_until_it_can_be_read_again(root, world):
    damaged = files.step_directory(root, 2) / files.rank_file(0)
    flip_a_bit(damaged)
    assert latest_step(root) == 2, "only reading everything can tell"
    assert find_resume_point(root, world, "").step == 1
    assert latest_step(root) == 1
    assert steps_that_count(root) == [1]
    flip_a_bit(damaged)
    assert find_resume_point(root, world, "").step == 2
    assert latest_step(root) == 2


@pytest.mark.parametrize("how", ["truncated", "missing", "directory"])
@pytest.mark.parametrize("name", NAMES)
def test_damage_that_shows_without_reading_tensors_is_no_progress(root, name, how):
    DAMAGE[how](files.step_directory(root, 2) / name)
    assert latest_step(root) == 1


def test_refused_checkpoints_prune_no_valid_one_and_go_when_they_are_old(root, world):
    for step in (3, 4):
        flip_a_bit(publish_step(root, step) / files.MARKER)
    assert retention.prune(root, steps_that_count(root), keep_last=1) == [1]
    assert find_resume_point(root, world, "").step == 2
    publish_step(root, 5)
    assert retention.prune(root, steps_that_count(root), keep_last=1) == [2, 3, 4]
    assert retention.prune(root, [], keep_last=1) == []


def test_a_rewind_removes_also_the_checkpoint_of_the_first_bad_step(root):
    publish_step(root, 5)
    retention.discard_from(root, 2)
    assert files.steps_on_disk(root) == [1]


def test_a_checkpoint_that_cannot_be_removed_stays_and_fails_no_save(root, caplog):
    with without_root_permissions():
        assert retention.prune(root, [1, 2], keep_last=1) == []
    assert files.steps_on_disk(root) == [1, 2]
    assert "step-00000001" in caplog.text


def test_a_rewind_deletes_nothing_if_no_checkpoint_before_the_spike_is_valid(tmp_path, world):
    run = RunConfig()
    run_dir = RunDir.create(tmp_path / "run", run)
    for step in (10, 20):
        publish_step(run_dir.checkpoints, step, run=run_dir.identity.id)
    flip_a_bit(files.step_directory(run_dir.checkpoints, 10) / files.rank_file(1))
    with pytest.raises(CheckpointError):
        rewind(run, run_dir, world, Spike(15, 18, 9.0, 2.0))
    assert files.steps_on_disk(run_dir.checkpoints) == [10, 20]


@pytest.mark.parametrize(
    ("starts", "missing"), [((0, 1, 7), "1, expected 4"), ((0, 5, 8), "5, expected 4")]
)
def test_pieces_that_overlap_or_leave_a_hole_are_refused(root, starts, missing):
    """12 elements: [0, 4) [1, 4) [7, 12) would leave [4, 7) as memory happened to be."""
    ends = {1: 4, 5: 8}
    runs = [[0, start, (4 if start == 0 else ends.get(start, 12)) - start, 1] for start in starts]
    directory = files.step_directory(root, 2)
    rewrite_index(directory, lambda index: index["pieces"]["w"].update(runs=runs))
    with pytest.raises(CheckpointError, match=f"'w' .* {missing}"):
        verify(directory)


def replace_by_that_of_step_1(*paths: Path) -> None:
    for path in paths:
        path.write_bytes((files.step_directory(path.parents[1], 1) / path.name).read_bytes())


# what happened -> (how, to the checkpoint of step 2; the file that is named)
CONFUSION: dict[str, tuple[Callable[[Path], object], str]] = {
    # As if fewer ranks had been published: marker, index and files agree with each other.
    "missing rank": (
        lambda step: rewrite_index(step, lambda index: index["ranks"].pop()),
        files.INDEX,
    ),
    "another rank's file": (
        lambda step: shutil.copy(step / files.rank_file(1), step / files.rank_file(0)),
        files.rank_file(0),
    ),
    "file of an older step": (
        lambda step: replace_by_that_of_step_1(step / files.rank_file(0)),
        files.rank_file(0),
    ),
    "old marker, new files": (
        lambda step: replace_by_that_of_step_1(step / files.MARKER),
        files.MARKER,
    ),
    "old index and marker, new files": (
        lambda step: replace_by_that_of_step_1(step / files.INDEX, step / files.MARKER),
        "step 1",
    ),
    "unknown field of a file": (
        lambda step: rewrite_index(step, lambda index: index["ranks"][0].update(mode=4095)),
        "mode",
    ),
}


def test_a_checkpoint_of_another_run_is_rejected(root):
    said: list[str] = []
    publish_step(root, 3, run="another")
    assert latest_valid(root, said.append, "run").step == 2
    assert "another" in said[0]


@pytest.mark.parametrize("what", CONFUSION)
def test_what_belongs_to_another_checkpoint_is_named_and_the_one_before_is_used(root, what):
    confuse, named = CONFUSION[what]
    confuse(files.step_directory(root, 2))
    assert named in refused(root)


@pytest.mark.parametrize(
    ("keeps", "removed"),
    [
        ({"keep_last": 2}, [1, 2, 3, 4, 5]),
        ({"keep_last": 1, "keep_every": 3}, [1, 2, 4, 5]),
        ({"keep_last": 1, "suspected_since": 4}, [1, 2, 4, 5, 6]),
        ({"keep_last": 1, "held": (2,)}, [1, 3, 4, 5, 6]),
        ({"keep_last": 9}, []),
    ],
)
def test_what_is_pruned_is_neither_among_the_latest_nor_kept_for_a_reason(keeps, removed):
    steps = list(range(1, 8))
    assert retention.steps_to_prune(steps, steps, **{"keep_every": 0, **keeps}) == removed


def test_publishing_again_replaces_an_invalid_checkpoint(tmp_path: Path) -> None:
    flip_a_bit(publish_step(tmp_path, 3) / "rank-00000.safetensors")
    publish_step(tmp_path, 3)
    assert verify(files.step_directory(tmp_path, 3)).step == 3


@pytest.mark.parametrize("content", [None, b"cut"])
def test_a_file_that_rank_0_does_not_see_whole_is_not_published(tmp_path, content):
    partial, final = tmp_path / ".partial-00000001-attempt", files.step_directory(tmp_path, 1)
    partial.mkdir()
    name = files.rank_file(0)
    report = {"first_lane": 0, "num_lanes": 1, "cursor": None, "bytes": 9, "sha256": "0" * 64}
    report["pieces"] = {}
    if content is not None:
        (partial / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name}: "):
        publish(partial, final, index_of(1, 1), [report])
    assert not final.exists()
    assert not (partial / files.MARKER).exists()


def test_a_step_that_is_a_link_is_refused_and_what_it_leads_to_is_never_removed(tmp_path):
    root, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    root.mkdir()
    publish_step(root, 1).rename(elsewhere)
    before = sorted(elsewhere.iterdir())
    link = files.step_directory(root, 1)
    link.symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match=link.name):
        verify(link)
    assert not counts(link)
    publish_step(root, 2)
    assert retention.prune(root, [2], keep_last=1) == [1]
    assert [entry.name for entry in root.iterdir()] == ["step-00000002"]
    assert sorted(elsewhere.iterdir()) == before


@pytest.mark.parametrize("name", [files.INDEX, files.MARKER])
def test_holes_of_40_gib_in_a_checkpoint_cost_no_memory(tmp_path, name):
    step = publish_step(tmp_path, 1)
    with open(step / name, "wb") as file:
        file.truncate(40 << 30)
    with memory_limit(1 << 30):
        assert latest_step(tmp_path) == 0


def test_indexes_that_are_refused_are_read_for_a_while_only(tmp_path, monkeypatch):
    for number in range(1, 10):
        step = publish_step(tmp_path, number)
        if number > 1:
            (step / files.INDEX).write_bytes(bytes(1000))
    assert latest_step(tmp_path) == 1
    monkeypatch.setattr("pretrain.checkpoint.verify.MOST_REFUSED_BYTES", 5000)
    assert latest_step(tmp_path) == 0


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run with checkpoints of steps 10 to 40."""
    kept = CheckpointConfig(interval=10, keep_last=2)
    config = RunConfig(model=ModelConfig(vocab_size=300), checkpoint=kept)
    run_dir = RunDir.create(tmp_path / "run", config)
    for step in (10, 20, 30, 40):
        publish_step(run_dir.checkpoints, step, tokens_seen=64 * step)
    return run_dir


def test_list_names_every_step_even_if_its_index_is_unreadable(run_dir, capsys):
    (run_dir.checkpoints / "step-00000020" / files.INDEX).write_text("{")
    evaluation = {"kind": "evaluation", "step": 10, "loss": 2.1}
    run_dir.metrics.write_text(json.dumps(evaluation) + "\n")
    assert main(["checkpoint", "list", str(run_dir.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "10", "20", "30", "40"]
    assert lines[1].split()[1:4] == ["2", "640", "2.1000"]
    assert "unreadable" in lines[2]
    assert lines[3].split()[3] == "-"
    assert main(["checkpoint", "list", str(run_dir.path), "--json"]) == 0
    first, second, *_ = json.loads(capsys.readouterr().out)
    assert (first["ranks"], first["tokens"], first["validation"]) == (2, 640, 2.1)
    assert second["ranks"] is None
    lines = [{**evaluation, "tokens": 20_000}, {**evaluation, "step": 40, "tokens": 100_000}]
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["checkpoint", "list", str(run_dir.path)]) == 0
    said = capsys.readouterr().out
    assert all(f"2.1000 on {tokens}" in said for tokens in ("20,000", "100,000"))


def test_list_reads_large_indexes_in_vain_for_a_while_only(run_dir, monkeypatch, capsys):
    index = run_dir.checkpoints / "step-00000030" / files.INDEX
    index.write_text(index.read_text() + " " * (2 << 20))
    monkeypatch.setattr(checkpoint, "MOST_REFUSED_BYTES", 4 << 20)
    for refused, tokens in ((b"", "1920"), (bytes(3 << 20), "unreadable")):
        (run_dir.checkpoints / "step-00000010" / files.INDEX).write_bytes(refused)
        assert main(["checkpoint", "list", str(run_dir.path)]) == 0
        _, first, second, third, last = capsys.readouterr().out.splitlines()
        assert [line.split()[2] for line in (first, third)] == ["unreadable", tokens]
        assert [line.split()[2] for line in (second, last)] == ["1280", "2560"]


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.safetensors"])
def test_verify_names_the_corrupted_file_and_fails(run_dir, capsys, name):
    assert main(["checkpoint", "verify", str(run_dir.path)]) == 0
    flip_a_bit(run_dir.checkpoints / "step-00000030" / name)
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(run_dir.path)]) == 1
    said = capsys.readouterr().out
    assert "step 30: CORRUPTED" in said
    assert name in said
    assert "3 of 4" in said
    assert main(["checkpoint", "verify", str(run_dir.path), "--json"]) == 1
    found = {each["step"]: each["problem"] for each in json.loads(capsys.readouterr().out)}
    assert [step for step, problem in found.items() if problem] == [30]


def test_a_checkpoint_with_a_hole_that_readers_refuse_is_not_valid(run_dir, capsys):
    """Its checksums are right: it was written so."""
    publish_step(run_dir.checkpoints, 50, gap=1)
    assert main(["checkpoint", "verify", str(run_dir.path)]) == 1
    said = capsys.readouterr().out
    assert "step 50: CORRUPTED" in said
    assert "101, expected 100" in said
    valid = latest_valid(run_dir.checkpoints, lambda line: None)
    assert valid.step == 40, "a resume takes the one before"
