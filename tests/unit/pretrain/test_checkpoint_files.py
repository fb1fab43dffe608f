from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from data_pipeline.errors import CheckpointError
from data_pipeline.files import sha256_of, write_json
from pretrain import checkpoint_files as files


def publish_step(root: Path, step: int, num_ranks: int = 2) -> Path:
    partial = files.partial_directory(root, step, "attempt")
    partial.mkdir(parents=True)
    for rank in range(num_ranks):
        for kind in ("engine", "state"):
            (partial / files.rank_file(kind, rank)).write_bytes(bytes([step, rank]) * 100)
        names = [files.rank_file(kind, rank) for kind in ("engine", "state")]
        written = {
            name: {"bytes": (partial / name).stat().st_size, "sha256": sha256_of(partial / name)} for name in names
        }
        report = {"files": written, "cursor": None}
        write_json(partial / files.rank_file("rank", rank), report)
    final = files.step_directory(root, step)
    files.publish(partial, final, {"step": step}, num_ranks)
    return final


def flip_a_bit(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


def test_a_published_checkpoint_verifies_and_knows_its_step(tmp_path: Path) -> None:
    assert files.verify(publish_step(tmp_path, 7)).step == 7


def test_a_partial_checkpoint_is_never_listed(tmp_path: Path) -> None:
    publish_step(tmp_path, 1)
    files.partial_directory(tmp_path, 2, "attempt").mkdir()
    assert files.steps_on_disk(tmp_path) == [1]


DAMAGE: dict[str, Callable[[Path], None]] = {
    "engine-00001.safetensors": flip_a_bit,
    "state-00000.safetensors": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "engine-00000.safetensors": lambda path: path.unlink(),
    "index.json": flip_a_bit,
    "COMPLETE": lambda path: path.unlink(),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_previous_one_used(tmp_path: Path, name: str) -> None:
    publish_step(tmp_path, 1)
    DAMAGE[name](publish_step(tmp_path, 2) / name)
    said: list[str] = []
    found = files.newest_good(tmp_path, said.append)
    assert found is not None
    assert found.step == 1
    assert len(said) == 1
    assert name in said[0]


def test_the_files_of_an_older_step_under_a_newer_marker_are_refused(tmp_path: Path) -> None:
    old, new = publish_step(tmp_path, 1), publish_step(tmp_path, 2)
    (new / "engine-00000.safetensors").write_bytes((old / "engine-00000.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="engine-00000"):
        files.verify(new)


def test_a_run_with_only_damaged_checkpoints_is_not_started_afresh(tmp_path: Path) -> None:
    flip_a_bit(publish_step(tmp_path, 1) / "engine-00000.safetensors")
    with pytest.raises(CheckpointError, match="none of its 1 checkpoints is good"):
        files.newest_good(tmp_path, lambda text: None)


def test_a_run_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert files.newest_good(tmp_path / "absent", lambda text: None) is None


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        publish_step(tmp_path, step)
    assert files.prune(tmp_path, keep_last=2) == [1, 2]
    assert files.steps_on_disk(tmp_path) == [3, 4]


def test_prune_leaves_multiples_of_keep_every(tmp_path: Path) -> None:
    for step in range(1, 8):
        publish_step(tmp_path, step, num_ranks=1)
    assert files.prune(tmp_path, keep_last=1, keep_every=3) == [1, 2, 4, 5]
    assert files.steps_on_disk(tmp_path) == [3, 6, 7]


def test_publishing_again_replaces_a_refused_checkpoint(tmp_path: Path) -> None:
    flip_a_bit(publish_step(tmp_path, 3) / "engine-00000.safetensors")
    publish_step(tmp_path, 3)
    assert files.verify(files.step_directory(tmp_path, 3)).step == 3
