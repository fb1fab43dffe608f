from __future__ import annotations

import os
from pathlib import Path

import pytest

from data_pipeline.corpora import shard_cache
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


def test_the_files_that_are_looked_at_per_reservation_do_not_grow_with_the_cache(
    files, monkeypatch
):
    looked = [0]
    listed = CacheSpace._entries

    def entries(self):
        for entry in listed(self):
            looked[0] += 1
            yield entry

    monkeypatch.setattr(CacheSpace, "_entries", entries)
    per_reservation = []
    first = 0
    for count in (200, 1600):
        space = CacheSpace(files, 10 * count, remove)
        for number in range(first, first + count):  # fills it
            assert space.make(10)
            put(files, number + 1)
        looked[0] = 0
        for number in range(first + count, first + count + 400):
            assert space.make(10)
            put(files, number + 1)
            assert len(kept(files)) <= count if number % 100 == 0 else True
        per_reservation.append(looked[0] / 400)
        first += count + 400
    assert per_reservation[1] < 2 * per_reservation[0] < 20


def test_files_are_removed_in_the_order_of_their_last_use_also_over_several_listings(
    files, monkeypatch
):
    monkeypatch.setattr(shard_cache, "FEWEST_LISTED", 3)
    for number in range(1, 11):
        put(files, number)
    space = CacheSpace(files, 100, remove)
    assert space.make(10)
    assert kept(files) == list(range(2, 11))
    put(files, 11)
    put(files, 3, used=1000)  # after it was listed as one of the oldest
    assert space.make(10)
    assert kept(files) == [3, *range(4, 12)]
    put(files, 12)
    for number in range(13, 19):
        assert CacheSpace(files, 100, remove).make(10), "the state is on disk"
        put(files, number)
    assert kept(files) == [3, *range(10, 19)]


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


def test_bytes_that_count_although_they_are_gone_are_found_again(files, tmp_path):
    reserved = [30]
    space = CacheSpace(files, 100, remove, lambda: reserved[0])
    assert space.make(70)  # a download that then fails
    reserved[0] = 0
    assert space.make(100), "nothing is there"
    put(files, 1)
    for damage in (b"", b"x", b"1 2", b"-5 0\n"):
        (tmp_path / "files.space").write_bytes(damage)
        assert space.make(90)
        assert kept(files) == [1]
    (tmp_path / "files.oldest").write_bytes(b"1 10 ../../precious\n")
    (tmp_path / "files.space").write_bytes(b"100 0\n")
    assert space.make(95)
    assert kept(files) == []
