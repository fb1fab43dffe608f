from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from foundation.errors import CheckpointError
from foundation.files import sha256_of, write_json
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from tests.helpers.checkpoints import index_of, publish_step
from tests.helpers.memory_limit import memory_limit


def flip_a_bit(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


def test_a_published_checkpoint_verifies_and_knows_its_step(tmp_path: Path) -> None:
    assert marker.verify(publish_step(tmp_path, 7)).step == 7


def test_sizes_of_many_files_are_asked_together(tmp_path, monkeypatch):
    """Of thousands of files, each of which waits for a file server, the supervisor asks often."""
    path, meeting, check = publish_step(tmp_path, 7, num_ranks=8), Barrier(8), marker._check_size

    def met(*arguments: Any) -> None:
        meeting.wait(timeout=300)
        check(*arguments)

    monkeypatch.setattr(marker, "_check_size", met)
    assert marker.counts(path)


def test_a_partial_checkpoint_is_never_listed(tmp_path: Path) -> None:
    publish_step(tmp_path, 1)
    files.partial_directory(tmp_path, 2, "attempt").mkdir()
    assert files.steps_on_disk(tmp_path) == [1]


def replace_by_that_of_step_1(*paths: Path) -> None:
    for path in paths:
        path.write_bytes((files.step_directory(path.parents[1], 1) / path.name).read_bytes())


def exchange_ranks(directory: Path) -> None:
    (directory / "rank-00000.safetensors").write_bytes(
        (directory / "rank-00001.safetensors").read_bytes()
    )


def rewrite_index(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the index, with a marker that agrees with it."""
    index = json.loads((directory / files.INDEX).read_text())
    change(index)
    write_json(directory / files.INDEX, index)
    (directory / files.MARKER).write_text(sha256_of(directory / files.INDEX) + "\n")


def forget_a_rank(directory: Path) -> None:
    """As if fewer ranks had been published: marker, index and files agree with each other."""
    rewrite_index(directory, lambda index: index["ranks"].pop())


def set_older_format(directory: Path) -> None:
    rewrite_index(directory, lambda index: index.update(format=4))


def rename_step_1(directory: Path) -> None:
    shutil.rmtree(directory)
    shutil.copytree(files.step_directory(directory.parent, 1), directory)


# what happened -> (how, to the checkpoint of step 2; part of the error)
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing rank": (forget_a_rank, "world_size is 2, ranks has 1"),
    "another rank's file": (
        exchange_ranks,
        "rank-00000.safetensors: contains the data of rank-00001",
    ),
    "file of an older step": (
        lambda step: replace_by_that_of_step_1(step / "rank-00000.safetensors"),
        "rank-00000.safetensors",
    ),
    "old marker, new files": (
        lambda step: replace_by_that_of_step_1(step / files.MARKER),
        "index.json: does not match its COMPLETE marker",
    ),
    "old index and marker, new files": (
        lambda step: replace_by_that_of_step_1(step / files.INDEX, step / files.MARKER),
        "contains the checkpoint of step 1",
    ),
    "renamed directory": (rename_step_1, "contains the checkpoint of step 1"),
    "older format": (
        set_older_format,
        f"found format 4, expected format {marker.FORMAT}; resume with the",
    ),
    "unknown field of a file": (
        lambda step: rewrite_index(step, lambda index: index["ranks"][0].update(mode=4095)),
        "'mode' is unknown",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_corrupted_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, what: str
) -> None:
    publish_step(tmp_path, 1)
    damage, reason = DAMAGE[what]
    damage(publish_step(tmp_path, 2))
    said: list[str] = []
    found = marker.latest_valid(tmp_path, said.append)
    assert found is not None
    assert found.step == 1
    assert len(said) == 1
    assert reason in said[0]


def test_a_checkpoint_of_another_run_is_rejected(tmp_path: Path) -> None:
    publish_step(tmp_path, 1, run="this")
    publish_step(tmp_path, 2, run="another")
    said: list[str] = []
    found = marker.latest_valid(tmp_path, said.append, run_id="this")
    assert found is not None
    assert found.step == 1
    assert "found a checkpoint of run another, expected run this" in said[0]


def test_a_run_with_only_corrupted_checkpoints_does_not_start_from_scratch(tmp_path: Path) -> None:
    flip_a_bit(publish_step(tmp_path, 1) / "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match="none of its 1 checkpoints is valid"):
        marker.latest_valid(tmp_path, lambda text: None)


def test_a_run_without_checkpoints_has_no_latest(tmp_path: Path) -> None:
    assert marker.latest_valid(tmp_path / "absent", lambda text: None) is None


def test_prune_keeps_the_latest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        publish_step(tmp_path, step)
    assert files.prune(tmp_path, marker.steps_that_count(tmp_path), keep_last=2) == [1, 2]
    assert files.steps_on_disk(tmp_path) == [3, 4]


def test_prune_keeps_multiples_of_keep_every(tmp_path: Path) -> None:
    for step in range(1, 8):
        publish_step(tmp_path, step, num_ranks=1)
    assert files.prune(tmp_path, range(1, 8), keep_last=1, keep_every=3) == [1, 2, 4, 5]
    assert files.steps_on_disk(tmp_path) == [3, 6, 7]


def test_prune_keeps_the_latest_from_before_a_suspicion_until_it_is_over(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        publish_step(tmp_path, step, num_ranks=1)
    for since, removed in ((4, [1, 2]), (2, [3]), (None, [])):
        valid = marker.steps_that_count(tmp_path)
        assert files.prune(tmp_path, valid, keep_last=1, suspected_since=since) == removed


def test_too_little_disk_space_is_an_error(tmp_path: Path) -> None:
    files.require_space(tmp_path / "checkpoints", 1)
    with pytest.raises(CheckpointError, match="MiB free"):
        files.require_space(tmp_path / "checkpoints", 2**70)


def test_publishing_again_replaces_an_invalid_checkpoint(tmp_path: Path) -> None:
    flip_a_bit(publish_step(tmp_path, 3) / "rank-00000.safetensors")
    publish_step(tmp_path, 3)
    assert marker.verify(files.step_directory(tmp_path, 3)).step == 3


@pytest.mark.parametrize(("content", "words"), [(None, "missing"), (b"cut", "found 3 bytes")])
def test_a_file_that_rank_0_does_not_see_whole_is_not_published(tmp_path, content, words):
    partial, final = tmp_path / ".partial-00000001-attempt", files.step_directory(tmp_path, 1)
    partial.mkdir()
    name = files.rank_file(0)
    report = {"first_lane": 0, "num_lanes": 1, "cursor": None, "bytes": 9, "sha256": "0" * 64}
    report["pieces"] = {}
    if content is not None:
        (partial / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name}: {words}"):
        marker.publish(partial, final, index_of(1, 1), [report])
    assert not final.exists()
    assert not (partial / files.MARKER).exists()


def test_a_step_that_is_a_link_is_refused_and_what_it_leads_to_is_never_removed(tmp_path):
    root, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    root.mkdir()
    publish_step(root, 1).rename(elsewhere)
    before = sorted(elsewhere.iterdir())
    link = files.step_directory(root, 1)
    link.symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="found a link, expected a directory; move"):
        marker.verify(link)
    assert not marker.counts(link)
    publish_step(root, 2)
    assert files.prune(root, [2], keep_last=1) == [1]
    assert [entry.name for entry in root.iterdir()] == ["step-00000002"]
    assert sorted(elsewhere.iterdir()) == before


@pytest.mark.parametrize("name", [files.INDEX, files.MARKER])
def test_holes_of_40_gib_in_a_checkpoint_cost_no_memory(tmp_path, name):
    step = publish_step(tmp_path, 1)
    with open(step / name, "wb") as file:
        file.truncate(40 << 30)
    with memory_limit(1 << 30):
        assert marker.latest_step(tmp_path) == 0
