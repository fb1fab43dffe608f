import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from data_pipeline.cli import main
from data_pipeline.commands.verify import problems_at
from data_pipeline.corpora.fetch import (
    NotFetchedError,
    fetch_manifest,
    fetch_shard,
    fetch_tokenizer,
)
from data_pipeline.corpora.manifest import mismatch
from data_pipeline.corpora.stores import store_at
from data_pipeline.corpora.web_requests import RetryPolicy
from data_pipeline.tokenizer import Tokenizer
from foundation.errors import DataError
from foundation.files import sha256_of
from tests.helpers.corpora import make_tiny_corpus, write_numbered_corpus
from tests.helpers.full_disk import full_disk
from tests.helpers.stores import (
    CREDENTIALS,
    FAULTS,
    QUICK,
    QUICK_SDK,
    FileServer,
    make_bucket,
    put_directory,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_numbered_corpus(tmp_path_factory.mktemp("remote") / "train", [[30] * 10] * 3)


@pytest.fixture(scope="module", params=["web", "s3"])
def served(request, corpus, tmp_path_factory):
    """A store of the corpus, and its server."""
    if request.param == "web":
        with FileServer(corpus.directory) as server:
            yield store_at(server.url, QUICK), server
        return
    endpoint = request.getfixturevalue("s3_endpoint")
    url = make_bucket(endpoint, "fetched")
    put_directory(endpoint, corpus.directory, f"{url}/c")
    with FileServer(endpoint) as server, pytest.MonkeyPatch.context() as environment:
        for name, value in {**CREDENTIALS, "S3_ENDPOINT_URL": server.url}.items():
            environment.setenv(name, value)
        store = store_at(f"{url}/c", QUICK_SDK)
        # The first client takes its time.
        store.download("manifest.json", tmp_path_factory.mktemp("warm") / "x", 0)
        yield store, server


@pytest.fixture
def faulty(served):
    """The store and its server, which goes wrong on demand."""
    store, server = served
    server.fault, server.faulty = "", 0
    server.requests.clear()
    return store, server


@pytest.mark.parametrize("fault", FAULTS)
def test_a_transient_fault_leaves_the_right_bytes(faulty, corpus, tmp_path, fault):
    store, server = faulty
    server.fault, server.faulty = fault, 1
    info = corpus.manifest.shards[1]
    fetch_shard(store, info, tmp_path / "x", tmp_path)
    assert mismatch(tmp_path / "x", info) is None
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("fault", FAULTS[:2])
def test_a_permanent_fault_names_the_shard_and_leaves_no_file(faulty, corpus, tmp_path, fault):
    store, server = faulty
    server.fault, server.faulty = fault, 100
    with pytest.raises(NotFetchedError, match=r"shard\.00001\.mds") as error:
        fetch_shard(store, corpus.manifest.shards[1], tmp_path / "x", tmp_path)
    assert "\n" not in str(error.value)
    assert not error.value.is_absent
    assert server.requests["shard.00001.mds"] >= store.retry_policy.attempts
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_not_requested_again(faulty, tmp_path):
    store, server = faulty
    with pytest.raises(NotFetchedError) as error:
        fetch_manifest(store_at(f"{store.url}/elsewhere", QUICK), tmp_path)
    assert error.value.is_absent
    assert server.requests["manifest.json"] <= 2


def test_a_manifest_of_more_than_32_mib_arrives(corpus, tmp_path):
    remote = tmp_path / "remote"
    remote.mkdir()
    content = (corpus.directory / "manifest.json").read_bytes()
    # Spaces first: a manifest that is cut after them is none.
    (remote / "manifest.json").write_bytes(b" " * (33 << 20) + content)
    with FileServer(remote) as server:
        patient = replace(QUICK, timeout=60.0)  # a busy machine takes a while
        assert fetch_manifest(store_at(server.url, patient), tmp_path / "copy") == corpus.manifest


def test_a_full_disk_is_reported_immediately(faulty, corpus, tmp_path):
    store, server = faulty
    with full_disk(1000), pytest.raises(OSError) as error:
        fetch_shard(store, corpus.manifest.shards[0], tmp_path / "x", tmp_path)
    assert str(tmp_path) in error.value.filename
    assert server.requests["shard.00000.mds"] == 1
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_sends_steadily_but_too_slowly_times_out(corpus, tmp_path):
    with FileServer(corpus.directory) as server:
        server.bytes_per_second = 800.0
        store = store_at(server.url, RetryPolicy(attempts=1, timeout=0.2, bytes_per_second=1e6))
        with pytest.raises(NotFetchedError):
            fetch_shard(store, corpus.manifest.shards[0], tmp_path / "x", tmp_path)


def test_a_connection_that_is_refused_is_an_error(tmp_path):
    with FileServer(tmp_path) as server:
        url = server.url
    with pytest.raises(NotFetchedError, match=r"\.json .* 3 of 3 "):
        fetch_manifest(store_at(url, QUICK), tmp_path)


@pytest.mark.parametrize("vocabulary", ["bytes", "unigram"])
def test_a_tokenizer_is_fetched_completely_or_not_at_all(tmp_path, vocabulary):
    remote = make_tiny_corpus(tmp_path / "remote", vocabulary=vocabulary) / "tokenizer"
    fingerprint = Tokenizer.load(remote).fingerprint
    with FileServer(remote) as server:
        store = store_at(server.url, QUICK)
        for _ in range(2):
            fetch_tokenizer(store, tmp_path / "copy", fingerprint)
        assert Tokenizer.load(tmp_path / "copy").fingerprint == fingerprint
        assert server.requests["tokenizer.json"] == 1, "the second time it existed"
        with pytest.raises(DataError, match="ffff"):
            fetch_tokenizer(store, tmp_path / "other", "f" * 64)
        assert not list((tmp_path / "other").iterdir())
        if vocabulary == "unigram":
            (remote / "tokenizer.model").write_bytes(b"corrupted")
            with pytest.raises(DataError):
                fetch_tokenizer(store, tmp_path / "third", fingerprint)
            assert sha256_of(tmp_path / "copy" / "tokenizer.model")


@pytest.mark.parametrize(
    "host", ["[::1", "127.0.0.1:99999999999999999999/c", "host:port/c", "h/b\u00fccher", "h/a b"]
)
def test_an_invalid_url_is_an_error_without_retries(tmp_path, host):
    with pytest.raises(NotFetchedError, match=r" 1 of 3 "):
        fetch_manifest(store_at(f"http://{host}", QUICK), tmp_path)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return make_tiny_corpus(tmp_path_factory.mktemp("built") / "corpus", documents=30)


def test_verify_reads_all_and_names_each_wrong_file(built, tmp_path, bucket, s3_endpoint, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(built, copy)
    put_directory(s3_endpoint, copy, f"{bucket}/c")
    assert main(["verify", f"{bucket}/c"]) == 0
    assert f"{bucket}/c: every shard " in capsys.readouterr().out
    names = ("validation/shard.00000.mds", "train/shard.00001.mds.lengths", "train/shard.00002.mds")
    for name, change in zip(names, (None, lambda c: c[:-1] + b"x", lambda c: c[:-1]), strict=True):
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(change(content)) if change else (copy / name).unlink()
    (copy / "tokenizer" / "tokenizer.json").write_text("{}")
    with FileServer(copy) as server:
        problems = problems_at(server.url, lambda line: None, QUICK)
        for name in names:
            assert sum(f"{server.url}/{name} " in each for each in problems) == 1
        tokenizer = f"{server.url}/tokenizer/tokenizer.json "
        assert sum(tokenizer in each for each in problems) == 2, "for each split"
        assert len(problems) == 5


def test_a_corpus_in_a_store_is_inspected_and_audited_there(built, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with FileServer(built) as server:
        for command in ("inspect", "audit"):
            said = []
            for location in (str(built), server.url):
                assert main([command, location, "--lanes", "2"]) == 0
                said.append(capsys.readouterr().out.splitlines())
            differing = [pair for pair in zip(*said, strict=True) if pair[0] != pair[1]]
            assert len(differing) == (2 if command == "inspect" else 0), "only the places differ"


def test_ctrl_c_does_not_wait_for_a_silent_store_and_leaves_no_file(built, tmp_path):
    with FileServer(built) as server:
        server.fault, server.faulty, server.stall_seconds = "stall", 1000, 600.0
        command = [sys.executable, "-m", "data_pipeline", "verify", server.url]
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        while sum(server.requests.values()) < 4:  # the manifest, the tokenizer and some shards
            time.sleep(0.01)
            assert process.poll() is None
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
        assert time.monotonic() - began < 300
    assert (process.returncode, error.splitlines()[-1]) == (130, "interrupted")
    assert not [path for path in Path(tmp_path).rglob("*") if path.is_file()]
