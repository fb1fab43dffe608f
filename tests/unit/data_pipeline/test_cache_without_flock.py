"""The shard cache where `flock` fails for every process: what one reads, no other removes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from data_pipeline.config import CacheConfig
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.manifest import ShardInfo
from data_pipeline.corpora.shard_cache import GIB, CacheFullError, ShardCache
from data_pipeline.corpora.stores import Store, store_at
from data_pipeline.shards.shards import ShardReader
from foundation.locks import PATIENCE_SECONDS, exclusive_lock
from tests.helpers.corpora import write_numbered_corpus
from tests.helpers.no_flock import without_flock
from tests.helpers.stores import QUICK, FileServer

HOLD = """
import sys
from pathlib import Path
from tests.helpers.no_flock import deny_flock
from data_pipeline.config import CacheConfig
from data_pipeline.corpora.manifest import read_manifest
from data_pipeline.corpora.shard_cache import ShardCache
from data_pipeline.corpora.stores import store_at
deny_flock()
cache = ShardCache(CacheConfig(directory=Path(sys.argv[1])))
shards = read_manifest(Path(sys.argv[3])).shards
held = [cache.open(store_at(sys.argv[2]), info) for info in shards[:int(sys.argv[4])]]
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_numbered_corpus(tmp_path_factory.mktemp("remote") / "train", [[100] * 20] * 6)


@pytest.fixture
def server(corpus: Corpus) -> Iterator[FileServer]:
    with FileServer(corpus.directory) as server:
        yield server


@pytest.fixture(autouse=True)
def no_flock() -> Iterator[None]:
    with without_flock():
        yield


@pytest.fixture
def store(server: FileServer) -> Store:
    return store_at(server.url, QUICK)


@pytest.fixture
def shards(corpus: Corpus) -> list[ShardInfo]:
    return list(corpus.manifest.shards)


def cache_for(directory: Path, shards: list[ShardInfo], count: int) -> ShardCache:
    """A cache with space for so many shards."""
    limit = count * max(info.size for info in shards)
    return ShardCache(CacheConfig(directory=directory, gib=limit / GIB))


def kept(directory: Path) -> set[str]:
    return set(os.listdir(directory / "shards"))


def hold(directory: Path, server: FileServer, corpus: Corpus, count: int) -> subprocess.Popen[str]:
    """A process that has the first shards open."""
    arguments = (directory, server.url, corpus.directory, count)
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_processes_transfer_each_shard_once_and_one_that_was_killed_protects_nothing(
    server, corpus, store, shards, tmp_path
):
    started = [hold(tmp_path, server, corpus, 3) for _ in range(2)]
    try:
        with ThreadPoolExecutor(3) as pool:
            cache = cache_for(tmp_path, shards, 3)
            list(pool.map(lambda info: cache.fetch(store, info), shards[:3]))
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
        assert set(server.requests.values()) == {1}
        started[0].communicate("")
        with pytest.raises(CacheFullError):  # the other one has all three
            cache.open(store, shards[3])
        assert kept(tmp_path) == {info.sha256 for info in shards[:3]}
        started[1].send_signal(signal.SIGKILL)
        started[1].wait()
        assert len(os.listdir(tmp_path / "readers")) == 3
        cache.open(store, shards[3]).close()
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert kept(tmp_path) == {info.sha256 for info in shards[1:4]}
    assert len(os.listdir(tmp_path / "readers")) == 2, "of those that nobody had to evict"


def test_a_shard_is_protected_as_long_as_its_tokens_are_mapped(store, shards, tmp_path):
    cache = cache_for(tmp_path, shards, 1)
    other = cache_for(tmp_path, shards, 1)
    reader = ShardReader(Path("shard.mds"), "uint32", cache.open(store, shards[0]))
    tokens = reader.tokens(3)
    before = tokens.copy()
    del reader
    with pytest.raises(CacheFullError):
        other.open(store, shards[1])
    other.fetch(store, shards[1])
    assert kept(tmp_path) == {shards[0].sha256}
    assert (tokens == before).all()
    del tokens
    other.open(store, shards[1]).close()
    assert kept(tmp_path) == {shards[1].sha256}
    assert not os.listdir(tmp_path / "readers")


def test_a_shard_that_another_machine_has_open_stays_until_that_has_long_been_silent(
    store, shards, tmp_path
):
    cache = cache_for(tmp_path, shards, 1)
    cache.open(store, shards[0]).close()
    mark = tmp_path / "readers" / f"{shards[0].sha256}.0123456789abcdef.owner"
    foreign = {"token": "1", "hostname": "n2", "machine": "x", "pid": os.getpid(), "started": "1"}
    mark.write_text(json.dumps(foreign))
    with pytest.raises(CacheFullError):
        cache.open(store, shards[1])
    assert kept(tmp_path) == {shards[0].sha256}
    silent = mark.stat().st_mtime - PATIENCE_SECONDS - 1
    os.utime(mark, (silent, silent))
    cache.open(store, shards[1]).close()
    assert kept(tmp_path) == {shards[1].sha256}
    assert not mark.exists()


def test_no_shard_is_opened_while_another_process_looks_which_ones_are_open(
    store, shards, tmp_path
):
    cache = cache_for(tmp_path, shards, 1)
    cache.open(store, shards[0]).close()
    with ThreadPoolExecutor(1) as pool:
        with exclusive_lock(tmp_path / "room.lock", 10):
            opening = pool.submit(cache.open, store, shards[0])
            assert not wait([opening], 0.3).done
            assert not os.listdir(tmp_path / "readers")
        with opening.result(10):
            assert len(os.listdir(tmp_path / "readers")) == 1


def test_the_limit_holds_and_nobody_loses_what_it_reads_while_many_fetch(store, shards, tmp_path):
    caches, most = [cache_for(tmp_path, shards, 3) for _ in range(2)], 0

    def read_all(cache: ShardCache) -> None:
        for info in shards:
            with cache.open(store, info) as file:
                assert (tmp_path / "shards" / info.sha256).stat().st_ino == os.fstat(
                    file.fileno()
                ).st_ino

    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(read_all, cache) for cache in caches]
        while not all(future.done() for future in done):
            with contextlib.suppress(FileNotFoundError):  # evicted between listing and reading
                paths = [each for each in (tmp_path / "shards").iterdir() if len(each.name) == 64]
                most = max(most, sum(path.stat().st_size for path in paths))
            time.sleep(0.001)
        for future in done:
            future.result()
    assert 0 < most <= caches[0].limit
    left = [path for path in tmp_path.rglob("*") if path.name.endswith((".owner", ".tmp"))]
    assert not left


def test_a_corrupted_shard_is_fetched_again(server, store, shards, tmp_path):
    cache_for(tmp_path, shards, 2).open(store, shards[0]).close()
    path = tmp_path / "shards" / shards[0].sha256
    original = path.read_bytes()
    path.write_bytes(b"x" + original[1:])
    with cache_for(tmp_path, shards, 2).open(store, shards[0]) as file:
        assert file.read() == original
    assert server.requests["shard.00000.mds"] == 2
