import contextlib
import hashlib
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.cli import main
from data_pipeline.config import CacheConfig, MixturePart
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.manifest import read_manifest
from data_pipeline.corpora.remote_corpus import CachedShards, local_corpus_directory
from data_pipeline.corpora.shard_cache import GIB, ShardCache
from data_pipeline.corpora.stores import RetryPolicy, store_at
from data_pipeline.lanes.evaluation_stream import EvaluationStream
from data_pipeline.lanes.lane_stream import LaneStream
from data_pipeline.lanes.mixture import open_training_data
from foundation.errors import DataError
from tests.helpers.corpora import make_tiny_corpus, write_numbered_corpus
from tests.helpers.jobs import until
from tests.helpers.stores import QUICK, FileServer, client, put_directory

LANES, LENGTH, SEED = 4, 16, 3


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """40 shards of about 1 KB."""
    return write_numbered_corpus(tmp_path_factory.mktemp("numbered"), [[20, 35, 41, 24]] * 40)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return make_tiny_corpus(tmp_path_factory.mktemp("built") / "corpus", documents=50)


def remote(
    corpus: Corpus,
    url: str,
    directory: Path,
    shards_in_cache: float = 1000,
    policy: RetryPolicy = QUICK,
) -> Corpus:
    """The corpus as it is read from a store, with a cache of so many shards."""
    size = max(shard.size for shard in corpus.manifest.shards)
    cache = ShardCache(CacheConfig(directory=directory, gib=shards_in_cache * size / GIB))
    return Corpus(corpus.directory, corpus.manifest, CachedShards(store_at(url, policy), cache))


def tokens_of(stream, batches: int) -> np.ndarray:
    return np.concatenate([next(stream).tokens_BL for _ in range(batches)], axis=1)


def test_a_cache_smaller_than_the_corpus_gives_two_ranks_its_tokens(numbered, tmp_path):
    batches = 2 * numbered.num_tokens // (LANES * LENGTH)
    expected = tokens_of(LaneStream(numbered, LANES, SEED, LENGTH, range(LANES)), batches)
    with FileServer(numbered.directory) as server:
        found, limit = {}, 14

        def rank(lanes: range) -> None:
            corpus = remote(numbered, server.url, tmp_path, limit)
            found[lanes.start] = tokens_of(LaneStream(corpus, LANES, SEED, LENGTH, lanes), batches)

        with ThreadPoolExecutor() as pool:
            list(pool.map(rank, (range(2), range(2, 4))))
        transfers = sum(server.requests.values())
    assert (np.concatenate([found[0], found[2]]) == expected).all()
    largest = max(shard.size for shard in numbered.manifest.shards)
    kept = 0
    for path in (tmp_path / "shards").iterdir():
        with contextlib.suppress(FileNotFoundError):  # what is fetched ahead still replaces shards
            kept += path.stat().st_size
    assert kept <= limit * largest
    assert transfers > 40, "shards of the first epoch had to make room"


def test_a_permanent_fault_ends_the_stream_with_one_error(numbered, tmp_path):
    with FileServer(numbered.directory) as server:
        corpus = remote(numbered, server.url, tmp_path, shards_in_cache=14)
        stream = LaneStream(corpus, LANES, SEED, LENGTH, range(LANES))
        tokens_of(stream, 2)
        server.fault, server.faulty = "flip", 1000
        with pytest.raises(DataError, match=r"shard\.\d+\.mds"):
            tokens_of(stream, 2 * numbered.num_tokens // (LANES * LENGTH))


def test_a_cursor_of_the_local_corpus_resumes_in_the_store_and_back(numbered, tmp_path):
    local = LaneStream(numbered, LANES, SEED, LENGTH, range(LANES))
    cursor = [next(local) for _ in range(30)][-1].cursor
    with FileServer(numbered.directory) as server:
        corpus = remote(numbered, server.url, tmp_path)
        stream = LaneStream(corpus, LANES, SEED, LENGTH, range(LANES), cursor)
        batches = [next(stream) for _ in range(30)]
        assert stream.tokens_read(batches[-1].cursor) == {server.url: 60 * LANES * LENGTH}
    for batch in batches:
        assert (batch.tokens_BL == next(local).tokens_BL).all()
    back = LaneStream(numbered, LANES, SEED, LENGTH, range(LANES), batches[-1].cursor)
    assert (next(back).tokens_BL == next(local).tokens_BL).all()


def test_the_next_shards_of_lanes_are_prefetched(tmp_path):
    corpus = write_numbered_corpus(tmp_path / "train", [[3000] * 10] * 12)
    with FileServer(corpus.directory) as server:
        stream = LaneStream(remote(corpus, server.url, tmp_path / "cache"), 2, SEED, 64, range(2))
        next(stream)
        # Each lane is in a shard and prefetches the next one; the second ends where the first
        # lane starts.
        until(lambda: len(server.requests) >= 4)
        requested = set(server.requests)
        for _ in range(30_000 // 64 - 200):
            next(stream)
        opened = {corpus.manifest.shards[unit].path for unit, _ in stream._reader._readers}
    assert opened <= requested


@pytest.mark.parametrize("command", [["verify"], ["inspect"], ["audit", "--lanes=2"]])
def test_a_corpus_never_says_that_it_is_a_copy_of_a_store(built, tmp_path, command):
    """Else opening it would ask a store of whoever made the corpus, and make a cache beside it."""
    with FileServer(built) as server:
        name = hashlib.sha256(server.url.encode()).hexdigest()[:16]
        forged = tmp_path / "data" / "corpora" / name
        shutil.copytree(built, forged)
        forged.chmod(0o700)
        (forged / "remote.json").write_text(json.dumps({"url": server.url, "cache_gib": 1}))
        assert main([command[0], str(forged), *command[1:]]) == 0
        assert not server.requests
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["corpora"]


def test_parts_of_a_mixture_may_be_in_stores(built, tmp_path):
    other = make_tiny_corpus(tmp_path / "other", seed=5)
    parts = [MixturePart(path=built, repeat=1), MixturePart(path=other, repeat=2)]
    expected = LaneStream(open_training_data(built, parts), LANES, SEED, LENGTH, range(LANES))
    with FileServer(tmp_path) as server:
        parts[1] = replace(parts[1], path=Path(f"{server.url}/other"))
        data = open_training_data(built, parts, CacheConfig(directory=tmp_path / "cache"))
        found = LaneStream(data, LANES, SEED, LENGTH, range(LANES))
        assert (tokens_of(found, 60) == tokens_of(expected, 60)).all()
        data.check_capacity(3)
        assert any(name.startswith("shard") for name in server.requests)


def test_of_the_splits_only_the_training_split_is_needed(built, tmp_path):
    (tmp_path / "only").mkdir()
    for name in ("tokenizer", "train"):
        (tmp_path / "only" / name).symlink_to(built / name)
    with FileServer(tmp_path) as server:
        cache = CacheConfig(directory=tmp_path / "cache")
        directory = local_corpus_directory(Path(f"{server.url}/only"), cache, QUICK)
        assert Corpus.open(directory / "train", cache=cache).manifest == read_manifest(
            built / "train"
        )
        assert not (directory / "validation" / "manifest.json").exists()
        with pytest.raises(DataError, match=r"none/train/\S+ .* 404"):
            local_corpus_directory(Path(f"{server.url}/none"), cache, QUICK)


def test_a_denied_split_is_an_error_and_an_absent_one_names_data_path(
    built, tmp_path, monkeypatch, s3_endpoint, bucket
):
    put_directory(s3_endpoint, built, f"{bucket}/c")
    cache = CacheConfig(directory=tmp_path / "cache")
    with FileServer(s3_endpoint) as server:
        monkeypatch.setenv("S3_ENDPOINT_URL", server.url)
        url = Path(f"{bucket}/c")
        directory = local_corpus_directory(url, cache)
        server.denied = "/validation/"
        with pytest.raises(DataError, match=r"validation/\S+ .* 403"):
            local_corpus_directory(url, cache)
        server.denied = ""
        name = bucket.removeprefix("s3://")
        client(s3_endpoint).delete_object(Bucket=name, Key="c/validation/manifest.json")
        assert local_corpus_directory(url, cache) == directory
        with pytest.raises(DataError, match=rf"^data\.path={bucket}/c "):
            Corpus.open(directory / "validation", cache=cache)
    shutil.copytree(built / "train", tmp_path / "local" / "train")
    with pytest.raises(DataError, match=r"path=.*/local "):
        Corpus.open(tmp_path / "local" / "validation")


@pytest.mark.parametrize("kind", ["http", "s3"])
def test_a_manifest_is_fetched_again_only_when_it_is_another(
    built, tmp_path, kind, monkeypatch, s3_endpoint, bucket
):
    store = tmp_path / "store"
    shutil.copytree(built, store)
    if kind == "s3":
        put_directory(s3_endpoint, store, f"{bucket}/c")
    with FileServer(s3_endpoint if kind == "s3" else store) as server:
        url = Path(server.url if kind == "http" else f"{bucket}/c")
        if kind == "s3":
            monkeypatch.setenv("S3_ENDPOINT_URL", server.url)
        cache = CacheConfig(directory=tmp_path / "cache")

        def fetched() -> int:
            before = server.requests["manifest.json"]
            directory = local_corpus_directory(url, cache, QUICK)
            assert Corpus.open(directory / "train", cache=cache).manifest == read_manifest(expected)
            return server.requests["manifest.json"] - before

        expected = built / "train"
        assert fetched() == 2, "of both splits"
        assert fetched() == 0
        copy = next((tmp_path / "cache").rglob("train/manifest.json"))
        copy.write_text(copy.read_text().replace("1", "2"))
        assert fetched() == 1, "a copy that was changed is no copy"
        expected = store / "train"
        replace(read_manifest(built / "train"), end_id=3).write(expected)
        if kind == "s3":
            put_directory(s3_endpoint, store, f"{bucket}/c")
        # Its tokenizer is another now: only the manifests are looked at.
        assert fetched() == 1


def test_ranks_that_ask_at_the_same_time_ask_the_store_once_or_twice(built, tmp_path):
    cache, start = CacheConfig(directory=tmp_path), threading.Barrier(8)
    with FileServer(built) as server:

        def rank(_: int) -> None:
            start.wait(10)
            local_corpus_directory(Path(server.url), cache, QUICK)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(rank, range(8)))
        assert server.requests["manifest.json"] == 2, "of both splits"
        assert server.requests["tokenizer.json"] == 1


def shards_in(server: FileServer) -> int:
    return sum(name.endswith(".mds") for name in list(server.requests))


def test_an_evaluation_prefetches_what_its_lanes_read_next(tmp_path):
    corpus = write_numbered_corpus(tmp_path / "validation", [[3000] * 10] * 12)
    expected = [batch.targets_BL for batch in EvaluationStream(corpus, 2, 512, range(2))]
    with FileServer(corpus.directory) as server:
        # Patient: a busy machine asks for nothing twice.
        copy = remote(corpus, server.url, tmp_path / "cache", policy=RetryPolicy())
        stream = EvaluationStream(copy, 2, 512, range(2))
        batches = [next(stream)]
        for count in (4, 6):  # the shard of each lane, and the next one
            until(lambda least=count: shards_in(server) >= least)
            assert shards_in(server) == count
            batches += [next(stream) for _ in range(-(-30_000 // 512))]
        batches += list(stream)
        assert set(server.requests.values()) == {1}
    for batch, targets_BL in zip(batches, expected, strict=True):
        assert (batch.targets_BL == targets_BL).all()
