"""`data-pipeline fetch --raw`: the store says what the objects are, and every one is checked."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import pytest

from data_pipeline.cli import main
from data_pipeline.corpora import copy_corpus
from data_pipeline.corpora.copy_corpus import TwiceRead, fetch_objects
from data_pipeline.corpora.stores import ObjectStore, RetryPolicy, StoreError
from foundation.errors import DataError
from foundation.files import path_below
from tests.helpers.corpora import contents
from tests.helpers.stores import CREDENTIALS, QUICK, EndlessStore, FileServer, client

PART = 5 << 20  # the least that S3 takes


@pytest.fixture
def put(bucket, s3_endpoint):
    """Puts an object; one of several parts if it is larger than one."""
    from boto3.s3.transfer import TransferConfig

    def put(key: str, body: bytes, **settings) -> None:
        client(s3_endpoint).upload_fileobj(
            io.BytesIO(body),
            bucket.removeprefix("s3://"),
            key,
            Config=TransferConfig(multipart_threshold=PART, multipart_chunksize=PART),
            ExtraArgs=settings,
        )

    return put


@pytest.fixture
def faulty(s3_endpoint, bucket, monkeypatch):
    """The server, whose answers with contents of shards may go wrong."""
    with FileServer(s3_endpoint) as server:
        monkeypatch.setenv("S3_ENDPOINT_URL", server.url)
        yield server


def test_raw_objects_are_copied_as_they_are_named_and_again_only_if_they_changed(
    tmp_path, bucket, put, faulty, capsys
):
    put("text/a.txt", b"a")
    put("text/deep/b.txt", b"b")
    put("text/folder/", b"")
    put("textual/c.txt", b"c")
    for body in (b"a", b"b"):
        put("text/a.txt", body)
        assert main(["fetch", f"{bucket}/text", str(tmp_path / "copy"), "--raw"]) == 0
        assert f"holds the 2 objects under {bucket}/text" in capsys.readouterr().out
        assert contents(tmp_path / "copy") == {
            ".fetch.lock": b"",
            "a.txt": body,
            "deep/b.txt": b"b",
        }
    assert (faulty.requests["a.txt"], faulty.requests["b.txt"]) == (2, 1)
    assert main(["fetch", f"{bucket}/nothing", str(tmp_path / "copy"), "--raw"]) == 2
    assert "there are no objects under" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["short", "flip"])
@pytest.mark.parametrize("size", [1000, PART + 1000], ids=["one part", "two parts"])
def test_what_the_store_does_not_list_is_read_again_and_never_kept(
    tmp_path, bucket, put, faulty, fault, size
):
    body = bytes(range(250)) * (size // 250)
    put("text/shard.txt", body)
    faulty.fault, faulty.faulty = fault, 1
    assert fetch_objects(f"{bucket}/text", tmp_path / "copy", print, QUICK) == (1, [])
    assert (tmp_path / "copy" / "shard.txt").read_bytes() == body
    assert faulty.requests["shard.txt"] == 2
    faulty.faulty = 100
    _, (problem,) = fetch_objects(f"{bucket}/text", tmp_path / "other", print, QUICK)
    assert "text/shard.txt could not be fetched; attempt 3 of 3 failed: " in problem
    # The SDK checks what was uploaded in one part by itself.
    reason = "FlexibleChecksumError" if size < PART else {"short": "arrived", "flip": "MD5"}[fault]
    assert reason in problem
    assert list(contents(tmp_path / "other")) == [".fetch.lock"]


def test_a_file_of_the_right_size_with_other_bytes_is_fetched_again(tmp_path, bucket, put):
    put("text/a.txt", b"right")
    (tmp_path / "a.txt").write_bytes(bytes(5))  # as a hole in a file reads
    assert fetch_objects(f"{bucket}/text", tmp_path, print) == (1, [])
    assert (tmp_path / "a.txt").read_bytes() == b"right"


def test_one_odd_name_does_not_block_the_others_and_is_named(tmp_path, bucket, put, capsys):
    odd = ["../../x", "both/below", "a//b", "./c", ".fetch/d", "n" * 300, "linked/e", "folder/"]
    for name in (*odd, "both", "good.txt"):
        put(f"bad/{name}", b"x")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "linked").symlink_to("../elsewhere")
    assert main(["fetch", f"{bucket}/bad", str(tmp_path / "copy"), "--raw"]) == 2
    said = capsys.readouterr()
    assert f"8 of 10 objects under {bucket}/bad were not copied, all others were" in said.err
    lines = said.out.splitlines()
    both = [line for line in lines if "'both" in line]  # either, depending on which came first
    assert len(both) == 1
    assert "both a file and a folder" in both[0]
    for name in odd:
        assert name.startswith("both") or any(repr(name) in line for line in lines)
    copied = contents(tmp_path / "copy")
    assert copied["good.txt"] == b"x"
    assert not list((tmp_path / "elsewhere").iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "elsewhere"]


def test_a_store_without_checksums_is_read_twice(tmp_path, bucket, put, faulty, monkeypatch):
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    put("text/shard.txt", b"x" * 1000)
    store = TwiceRead(ObjectStore(f"{bucket}/text", QUICK))
    store.download("shard.txt", tmp_path / "a", 0)
    assert contents(tmp_path) == {"a": b"x" * 1000}
    faulty.fault, faulty.faulty = "flip", faulty.requests["shard.txt"] + 1
    with pytest.raises(StoreError, match="two readings of it differ"):
        store.download("shard.txt", tmp_path / "a", 0)


def test_a_full_disk_ends_the_copy_immediately(tmp_path, bucket, put):
    import resource

    for number in range(3):
        put(f"text/{number}", b"x" * 5000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            fetch_objects(f"{bucket}/text", tmp_path, lambda what: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.errno == errno.EFBIG


@pytest.mark.parametrize("name", ["", "..", "a/..", "/a", "a/", "a//b", "./a", "a\0b"])
def test_a_name_that_is_no_path_below_its_root_is_refused(tmp_path, name):
    with pytest.raises(DataError, match="expected a plain path"):
        path_below(tmp_path, name)
    assert path_below(tmp_path, "a/b..c") == Path(tmp_path / "a" / "b..c")


def test_a_large_raw_object_may_take_a_long_time(tmp_path, bucket, s3_endpoint, monkeypatch):
    client(s3_endpoint).put_object(
        Bucket=bucket.removeprefix("s3://"), Key="text/a.txt", Body=b"x" * 50_000
    )
    with FileServer(s3_endpoint) as server:
        monkeypatch.setenv("S3_ENDPOINT_URL", server.url)
        fetch_objects(f"{bucket}/text", tmp_path / "warm", print)  # the first client takes its time
        server.bytes_per_second = 20_000
        retry_policy = RetryPolicy(
            attempts=1, timeout=0.5, bytes_per_second=1e9
        )  # a second, if it were a small file
        fetch_objects(f"{bucket}/text", tmp_path / "copy", print, retry_policy)
    assert (tmp_path / "copy" / "a.txt").stat().st_size == 50_000


@pytest.mark.parametrize("what", ["keys", "empty pages", "body"])
def test_a_store_that_never_ends_is_left(tmp_path, monkeypatch, what, capsys):
    monkeypatch.setattr(copy_corpus, "MOST_OBJECTS", 3000)
    with EndlessStore(what) as server:
        for name, value in {**CREDENTIALS, "S3_ENDPOINT_URL": server.url}.items():
            monkeypatch.setenv(name, value)
        if what == "body":
            _, (problem,) = fetch_objects("s3://bucket", tmp_path, print, QUICK)
            assert "bytes arrived, the store lists 9" in problem
            assert server.num_sent < 100 << 20
            assert list(contents(tmp_path)) == [".fetch.lock"]
        else:
            with pytest.raises(DataError, match=r"s3://bucket cannot be listed .the list does not"):
                fetch_objects("s3://bucket", tmp_path, print, QUICK)
            assert server.num_pages <= 102


def test_a_store_without_list_permission_is_one_line(
    bucket, capsys, tmp_path, monkeypatch, s3_endpoint
):
    with FileServer(tmp_path) as server:  # answers 404 to all requests
        monkeypatch.setenv("S3_ENDPOINT_URL", server.url)
        assert main(["fetch", f"{bucket}/text", str(tmp_path / "copy"), "--raw"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{bucket}/text cannot be" in error
