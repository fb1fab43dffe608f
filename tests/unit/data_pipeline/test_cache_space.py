from __future__ import annotations

import os
from pathlib import Path

import pytest

from data_pipeline.corpora.shard_cache import CacheSpace


def name_of(number: int) -> str:
    return f"{number:064x}"


def put(files: Path, number: int, used: int | None = None) -> None:
    """A file of 10 bytes that was used at that time."""
    path = files / name_of(number)
    path.write_bytes(bytes(10))
    os.utime(path, ns=(used or number, 0))


def remove(path: Path) -> bool:
    path.unlink()
    return True


@pytest.fixture
def files(tmp_path) -> Path:
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


def kept(files: Path) -> list[int]:
    return sorted(int(path.name, 16) for path in files.iterdir())


def test_files_are_removed_in_the_order_of_their_last_use(files):
    for number in range(1, 11):
        put(files, number)
    space = CacheSpace(files, 100, remove)
    assert space.make(10)
    assert kept(files) == list(range(2, 11))
    put(files, 11)
    put(files, 3, used=1000)
    assert space.make(20)
    assert kept(files) == [3, *range(5, 12)]


def test_files_in_use_stay_and_space_that_only_they_have_is_refused(files):
    for number in range(1, 11):
        put(files, number)
    in_use = {name_of(1), name_of(3)}
    space = CacheSpace(files, 100, lambda path: path.name not in in_use and remove(path))
    assert space.make(10)
    assert kept(files) == [1, 3, *range(4, 11)]
    assert not space.make(90)
    assert kept(files) == [1, 3]
    assert space.make(80)


def test_reserved_bytes_count_and_other_files_do_not(files):
    (files / "a stranger's").write_bytes(bytes(1000))
    reserved = [30]
    space = CacheSpace(files, 100, remove, lambda: reserved[0])
    assert space.make(70)
    assert not space.make(71)
    reserved[0] = 0
    assert space.make(100)
    put(files, 1)
    assert space.make(90)
    assert (files / name_of(1)).exists()
    assert space.make(95)
    assert not (files / name_of(1)).exists()
