from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from data_pipeline.cli import main
from data_pipeline.corpora.copy_corpus import fetch_corpus, upload_corpus
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.manifest import MANIFEST_NAME
from data_pipeline.corpora.stores import RetryPolicy
from foundation.errors import DataError
from tests.helpers.corpora import contents, make_tiny_corpus
from tests.helpers.stores import QUICK, FileServer, client


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return make_tiny_corpus(tmp_path_factory.mktemp("built") / "corpus")


def objects(endpoint: str, bucket: str) -> dict[str, bytes]:
    name = bucket.removeprefix("s3://")
    s3 = client(endpoint)
    keys = [item["Key"] for item in s3.list_objects_v2(Bucket=name).get("Contents", [])]
    return {key: s3.get_object(Bucket=name, Key=key)["Body"].read() for key in keys}


def test_upload_then_fetch_gives_the_same_bytes_and_a_second_upload_repairs_changed_files(
    built, tmp_path, bucket, s3_endpoint, capsys
):
    url = f"{bucket}/c"
    assert main(["upload", str(built), url]) == 0
    there = objects(s3_endpoint, bucket)
    for split in ("train", "validation", "tokenizer"):
        for name, content in contents(built / split).items():
            assert there[f"c/{split}/{name}"] == content
    assert len(there) == sum(
        len(contents(built / split)) for split in ("train", "validation", "tokenizer")
    )
    corrupted = "c/train/shard.00001.mds"
    client(s3_endpoint).put_object(
        Bucket=bucket.removeprefix("s3://"), Key=corrupted, Body=b"x" + there[corrupted][1:]
    )
    with pytest.raises(DataError, match=r"shard\.00001\.mds could not be fetched"):
        fetch_corpus(url, tmp_path / "copy", ["train"], print, RetryPolicy(attempts=2, pause=0.01))
    assert not (tmp_path / "copy" / "train" / MANIFEST_NAME).exists(), "not whole"
    upload_corpus(built, url, print)
    assert objects(s3_endpoint, bucket) == there
    assert main(["fetch", url, str(tmp_path / "copy"), "--splits", "train", "validation"]) == 0
    assert main(["verify", str(tmp_path / "copy")]) == 0
    assert "every shard matches its manifest" in capsys.readouterr().out


def test_fetch_resumes_where_it_was_interrupted(built, tmp_path):
    with FileServer(built) as server:
        server.fault, server.faulty = "500", 1
        for _ in range(2):
            fetch_corpus(server.url, tmp_path / "copy", ["train"], lambda line: None, QUICK)
        shards = Corpus.open(built / "train").manifest.shards
        assert [server.requests[shard.path] for shard in shards] == [2] * len(shards), (
            "a fault and a transfer each"
        )
        (tmp_path / "copy" / "train" / shards[2].path).write_bytes(b"corrupted")
        fetch_corpus(server.url, tmp_path / "copy", ["train"], lambda line: None, QUICK)
        assert sum(server.requests[shard.path] for shard in shards) == 2 * len(shards) + 1
    assert contents(tmp_path / "copy" / "train") == {
        name: content for name, content in contents(built / "train").items() if name != "index.json"
    }


@pytest.mark.parametrize("name", ["train", "tokenizer"])
def test_fetch_writes_nothing_where_a_link_in_its_directory_leads(built, tmp_path, name):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / name).symlink_to(tmp_path / "elsewhere")
    with FileServer(built) as server, pytest.raises(DataError, match=f"{name} is a link"):
        fetch_corpus(server.url, tmp_path / "copy", ["train"], lambda line: None, QUICK)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_corrupted_shard_is_not_uploaded(built, tmp_path, bucket, s3_endpoint):
    import shutil

    shutil.copytree(built, tmp_path / "copy")
    path = tmp_path / "copy" / "train" / "shard.00002.mds"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"shard\.00002\.mds is corrupted"):
        upload_corpus(tmp_path / "copy", f"{bucket}/c", print)
    assert "c/train/manifest.json" not in objects(s3_endpoint, bucket)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["upload", "{built}", "http://127.0.0.1:1/c"],
            "expected a URL that starts with one of s3://",
        ),
        (["upload", "{built}", "s3://no-such-bucket/c"], "s3://no-such-bucket/c cannot be opened"),
        (["upload", "{built}/train", "{bucket}/c"], "is one split; give the corpus"),
        (["upload", "{built}/tokenizer", "{bucket}/c"], "no manifest.json"),
        (["fetch", "{built}", "copy"], "expected a URL that starts with one of http://"),
        (["inspect", "ftp://host/c"], "expected a URL that starts with one of http://"),
    ],
)
def test_an_impossible_copy_is_one_line(built, bucket, capsys, arguments, message):
    assert main([argument.format(built=built, bucket=bucket) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_corpus_in_a_store_is_inspected_and_audited_in_place(
    built, tmp_path, monkeypatch, capsys
):
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


def test_verify_reads_every_byte_of_a_store(built, tmp_path, capsys):
    import shutil

    shutil.copytree(built, tmp_path / "copy")
    with FileServer(tmp_path / "copy") as server:
        assert main(["verify", server.url]) == 0
        assert f"{server.url}: every shard matches its manifest" in capsys.readouterr().out
        path = tmp_path / "copy" / "validation" / "shard.00000.mds"
        path.unlink()
        assert main(["verify", server.url]) == 2
        assert "validation/shard.00000.mds could not be fetched" in capsys.readouterr().err


def test_ctrl_c_does_not_wait_for_a_silent_store_and_leaves_no_half_file(built, tmp_path):
    with FileServer(built) as server:
        server.fault, server.faulty, server.stall_seconds = "stall", 1000, 600.0
        command = [
            sys.executable,
            "-m",
            "data_pipeline",
            "fetch",
            server.url,
            str(tmp_path / "copy"),
        ]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while sum(server.requests.values()) < 3:  # the manifest and some shards
            time.sleep(0.01)
            assert process.poll() is None
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
        assert time.monotonic() - began < 300
    assert process.returncode == 130
    assert error.splitlines()[-1] == "interrupted"
    assert list(contents(tmp_path / "copy")) == [".fetch.lock"]
