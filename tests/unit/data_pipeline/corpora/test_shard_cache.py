import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from data_pipeline.config import CacheConfig
from data_pipeline.corpora.shard_cache import GIB, CacheFullError, ShardCache
from data_pipeline.corpora.stores import store_at
from data_pipeline.corpora.web_requests import RetryPolicy
from foundation.errors import DataError
from tests.helpers.corpora import write_numbered_corpus
from tests.helpers.jobs import until
from tests.helpers.stores import QUICK, FileServer

NUM_SHARDS = 8
FETCH = """
import sys
from pathlib import Path
from data_pipeline.config import CacheConfig
from data_pipeline.corpora.manifest import read_manifest
from data_pipeline.corpora.remote_corpus import ShardCache
from data_pipeline.corpora.stores import store_at
cache = ShardCache(CacheConfig(directory=Path(sys.argv[1])))
for info in read_manifest(Path(sys.argv[3])).shards:
    cache.open(store_at(sys.argv[2]), info).close()
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_numbered_corpus(tmp_path_factory.mktemp("remote"), [[100] * 20] * NUM_SHARDS)


@pytest.fixture
def server(corpus):
    with FileServer(corpus.directory) as server:
        yield server


@pytest.fixture
def shards(corpus):
    return corpus.manifest.shards


def cache_of(directory: Path, num_bytes: int = 1 << 30) -> ShardCache:
    return ShardCache(CacheConfig(directory=directory, gib=num_bytes / GIB))


def largest(shards) -> int:
    return max(info.size for info in shards)


def kept(cache: ShardCache) -> set[str]:
    return set(os.listdir(cache.directory / "shards"))


def processes(count: int, *arguments: object) -> list[subprocess.Popen]:
    command = [sys.executable, "-c", FETCH, *map(str, arguments)]
    return [subprocess.Popen(command) for _ in range(count)]


def test_a_shard_that_says_to_be_larger_than_the_cache_is_refused_at_once(server, shards, tmp_path):
    store = store_at(server.url, replace(QUICK, timeout=100.0))
    with pytest.raises(CacheFullError, match="4,825,210,966"):
        cache_of(tmp_path).open(store, replace(shards[1], size=4_825_210_966))


def test_processes_and_threads_transfer_each_shard_once(server, corpus, tmp_path):
    started = processes(2, tmp_path, server.url, corpus.directory)
    caches = [cache_of(tmp_path) for _ in range(3)]
    store = store_at(server.url)  # with time enough: a repeated attempt is a second request
    with ThreadPoolExecutor(6) as pool:
        for cache in caches:
            list(pool.map(partial(cache.fetch, store), corpus.manifest.shards))
    assert [process.wait(60) for process in started] == [0, 0]
    assert set(server.requests.values()) == {1}
    assert len(server.requests) == NUM_SHARDS
    assert kept(caches[0]) == {info.sha256 for info in corpus.manifest.shards}


def test_the_least_recently_used_shard_is_evicted(server, shards, tmp_path):
    store, cache = store_at(server.url, QUICK), cache_of(tmp_path, 3 * largest(shards))
    for number in (0, 1, 2, 0, 3):
        cache.open(store, shards[number]).close()
        time.sleep(0.002)
    assert kept(cache) == {shards[number].sha256 for number in (2, 0, 3)}


def test_open_shards_are_never_evicted_and_a_full_cache_is_an_error(server, shards, tmp_path):
    store, cache = store_at(server.url, QUICK), cache_of(tmp_path, 2 * largest(shards))
    first, second = (cache.open(store, info) for info in shards[:2])
    other = cache_of(tmp_path, 2 * largest(shards))
    with pytest.raises(CacheFullError, match=r"shard\.00002\.mds"):
        other.open(store, shards[2])
    other.fetch(store, shards[2])  # prefetching requests nothing that does not fit
    assert kept(cache) == {info.sha256 for info in shards[:2]}
    first.close()
    other.open(store, shards[2]).close()
    assert kept(cache) == {shards[1].sha256, shards[2].sha256}
    assert second.read() == (server.upstream / shards[1].path).read_bytes()


def test_a_cached_shard_that_was_changed_since_its_check_is_fetched_again(server, shards, tmp_path):
    store, same = store_at(server.url, QUICK), cache_of(tmp_path)
    for cache in (same, cache_of(tmp_path)):
        for damage in (lambda content: content[:-1], lambda content: bytes(len(content))):
            same.open(store, shards[0]).close()
            path = tmp_path / "shards" / shards[0].sha256
            original = path.read_bytes()
            path.write_bytes(damage(original))
            with cache.open(store, shards[0]) as file:
                assert file.read() == original
    assert server.requests["shard.00000.mds"] == 5


def test_a_process_killed_during_a_download_leaves_no_reservation(server, corpus, tmp_path):
    server.bytes_per_second = 10_000.0
    (process,) = processes(1, tmp_path, server.url, corpus.directory)
    incoming = tmp_path / "incoming"
    until(lambda: list(incoming.glob("*/*/*")))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(list(incoming.iterdir())) == 1
    server.bytes_per_second = 0.0
    info = corpus.manifest.shards[1]
    cache = cache_of(tmp_path, info.size + 10)  # no space besides what that process had reserved
    cache.open(store_at(server.url, QUICK), info).close()
    assert list(incoming.iterdir()) == []
    assert kept(cache) == {info.sha256}


def test_a_stopped_process_blocks_others_for_a_limited_time(server, corpus, tmp_path):
    server.bytes_per_second = 10_000.0
    (process,) = processes(1, tmp_path, server.url, corpus.directory)
    try:
        until(lambda: server.requests["shard.00000.mds"])
        process.send_signal(signal.SIGSTOP)
        store = store_at(server.url, RetryPolicy(1, 0.1, 0.01))
        with pytest.raises(DataError, match="held"):
            cache_of(tmp_path).open(store, corpus.manifest.shards[0])
    finally:
        process.kill()
        process.wait()


def test_a_cache_that_cannot_hold_the_open_shards_is_rejected(tmp_path):
    cache = cache_of(tmp_path, 1 << 20)
    cache.check_capacity(10, 100_000)
    with pytest.raises(DataError, match=r"0\.00196"):
        cache.check_capacity(20, 100_000)


def test_the_cache_removes_nothing_that_it_did_not_make(server, shards, tmp_path):
    cache = cache_of(tmp_path, largest(shards))
    for name in ("shards/notes.txt", "incoming/mine.3/x", "incoming/plain/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("precious")
    for info in shards[:2]:
        cache.open(store_at(server.url, QUICK), info).close()
    assert kept(cache) == {shards[1].sha256, "notes.txt"}
    assert sorted(path.name for path in (tmp_path / "incoming").iterdir()) == ["mine.3", "plain"]


@pytest.mark.parametrize("trap", ["link", "writable", "another user's"])
def test_a_cache_that_another_user_could_change_is_refused(tmp_path, trap, monkeypatch):
    path = tmp_path / "cache"
    if trap == "link":
        (tmp_path / "elsewhere").mkdir()
        path.symlink_to("elsewhere")
    else:
        path.mkdir()
    if trap == "writable":
        path.chmod(0o770)
    if trap == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(DataError, match=str(path)):
        cache_of(path)
    assert not any(tmp_path.rglob("shards"))


def test_a_cache_whose_parent_lets_every_user_replace_it_is_refused(tmp_path):
    parent = tmp_path / "open"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(DataError, match=f"{parent},"):
        cache_of(parent / "deep" / "cache")
    parent.chmod(0o1777)  # as /tmp: only its owner can
    cache_of(parent / "deep" / "cache")
    for name in (".", "shards", "incoming", "locks"):
        assert (parent / "deep" / "cache" / name).stat().st_mode & 0o777 == 0o700, "private"
