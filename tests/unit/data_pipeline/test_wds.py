from __future__ import annotations

import io
import re
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.commands.verify import describe_split, verify_split
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.lengths import write_lengths
from data_pipeline.corpora.manifest import read_manifest
from data_pipeline.shards.shards import ShardReader, write_shard
from foundation.errors import DataError
from foundation.files import sha256_of
from tests.helpers.corpora import config_of, contents, documents_of, some_texts


def documents(dtype: str) -> list[tuple[str, np.ndarray]]:
    """Ids that WebDataset's keys must escape, some too long for a header; lengths near a block."""
    ids = ["a.b/c.txt", "\u00e9 %2E", "d\nd", "../x", "", "x" * 90, "y" * 300, "\u6f22" * 60]
    lengths = [1, 2, 191, 192, 193, 448, 70000, 5]
    generator = np.random.default_rng(0)
    return [
        (i, generator.integers(0, 1 << 16, n).astype(dtype))
        for i, n in zip(ids, lengths, strict=True)
    ]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_own_reader_finds_every_document_of_the_stock_writer(tmp_path, dtype):
    written = documents(dtype)
    write_shard(tmp_path / "shard.00007.tar", written, tmp_path / "scratch")
    reader = ShardReader(tmp_path / "shard.00007.tar", dtype)
    assert reader.lengths.tolist() == [len(tokens) for _, tokens in written]
    for number, (name, tokens) in enumerate(written):
        assert reader.document_id(number) == name
        assert np.array_equal(reader.tokens(number), tokens)
        assert np.array_equal(
            reader.tokens(number, len(tokens) // 2, 1), tokens[len(tokens) // 2 :][:1]
        )


@pytest.mark.filterwarnings("ignore")
def test_stock_readers_read_our_shards(tmp_path):
    import webdataset

    build_corpus(config_of(tmp_path, some_texts(), shard_format="webdataset", shard_bytes=20000))
    corpus = Corpus.open(tmp_path / "out" / "train")
    paths = [str(corpus.directory / shard.path) for shard in corpus.manifest.shards]
    assert len(paths) > 2
    stock = iter(webdataset.WebDataset(paths, shardshuffle=False).decode())
    for number in range(len(paths)):
        reader = corpus.shard(number)
        for document in range(len(reader)):
            sample = next(stock)
            assert sample["__key__"].partition("-")[2] == reader.document_id(document)
            assert np.array_equal(sample["tokens.npy"], reader.tokens(document))
    assert next(stock, None) is None


def test_a_build_as_webdataset_holds_the_same_documents_as_one_as_mds(tmp_path):
    config = config_of(tmp_path / "wds", some_texts(), shard_format="webdataset", shard_bytes=20000)
    build_corpus(config)
    build_corpus(
        config_of(tmp_path / "again", some_texts(), shard_format="webdataset", shard_bytes=20000)
    )
    build_corpus(config_of(tmp_path / "mds", some_texts()))
    assert contents(config.output) == contents(tmp_path / "again" / "out")
    for split in ("train", "validation"):
        assert documents_of(config.output / split) == documents_of(tmp_path / "mds" / "out" / split)
        *full, _ = sorted((config.output / split).glob("*.tar"))
        sizes = [len(path.read_bytes().rstrip(b"\0")) for path in full]
        assert all(20000 - 3000 < size <= 20000 for size in sizes), "as many documents as fit"
        assert not verify_split(config.output / split, lambda line: None)


def test_tokens_that_look_like_headers_are_not_mistaken_for_them(tmp_path):
    header = np.frombuffer(tar_of(b"x" * 100)[:512], np.uint16)
    tokens = np.concatenate(
        [np.zeros(192, np.uint16), header, np.zeros(300, np.uint16), header]
    )  # on a block
    written = [("a", tokens), ("b", tokens[:500]), ("c", tokens)]
    write_shard(tmp_path / "shard.00000.tar", written, tmp_path / "scratch")
    content = (tmp_path / "shard.00000.tar").read_bytes()
    assert (
        sum(content[start + 257 : start + 262] == b"ustar" for start in range(0, len(content), 512))
        > 3
    )
    reader = ShardReader(tmp_path / "shard.00000.tar", "uint16")
    assert [reader.document_id(number) for number in range(3)] == ["a", "b", "c"]
    assert all(
        np.array_equal(reader.tokens(number), tokens) for number, (_, tokens) in enumerate(written)
    )


def damaged(content: bytes, kind: str) -> bytes:
    array = bytearray(content)
    if kind == "empty":
        return b""
    if kind == "cut":
        return content[: len(content) // 2 // 512 * 512]
    if kind == "no end":
        return content[: -(-len(content.rstrip(b"\0")) // 512) * 512]
    if kind == "other file":
        return b"x" * 512 * 20
    if kind == "only end":
        return bytes(1024)
    if kind == "more after":
        return content + b"more"
    if kind == "block after":
        return content + b"more" * 128
    if kind == "checksum":
        array[20] ^= 1
    if kind == "size":
        array[124:135] = b"not a numbe"
    if kind == "text":
        return tar_of(
            b"some text, long enough to hold the header of an array, but it is none" + bytes(100)
        )
    if kind == "short":
        return tar_of(b"x")
    if kind == "other type":
        file = io.BytesIO()
        np.save(file, np.zeros(5, np.int64))
        return tar_of(file.getvalue())
    if kind == "no tokens":
        file = io.BytesIO()
        np.save(file, np.zeros(0, np.uint16))
        return tar_of(file.getvalue())
    return bytes(array)


def tar_of(data: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        info = tarfile.TarInfo("00000000-a.tokens.npy")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("empty", "is empty"),
        ("cut", "have no end-of-archive marker"),
        ("no end", "have no end-of-archive marker"),
        ("other file", "have no end-of-archive marker after 0 headers"),
        ("only end", "contains no documents"),
        ("more after", "not a whole number of blocks"),
        ("block after", "have no end-of-archive marker"),
        ("checksum", "checksum of the header at byte 0"),
        ("size", "have no end-of-archive marker"),
        ("text", "does not start a one-dimensional array of uint16"),
        ("short", "does not start a one-dimensional array of uint16"),
        ("other type", "does not start a one-dimensional array of uint16"),
        ("no tokens", "impossible"),
    ],
)
def test_damage_is_an_error_that_names_the_file(tmp_path, kind, message):
    path: Path = tmp_path / "shard.00000.tar"
    write_shard(path, documents("uint16")[:5], tmp_path / "scratch")
    path.write_bytes(damaged(path.read_bytes(), kind))
    with pytest.raises(DataError, match=rf"shard .*shard\.00000\.tar .*{message}"):
        ShardReader(path, "uint16")


def test_an_id_that_cannot_be_read_is_found_by_verify_and_named(tmp_path):
    config = config_of(tmp_path, some_texts(20), shard_format="webdataset")
    source = config.input[0]
    source.write_text(source.read_text().replace('"id": "d', '"id": "' + "x" * 200))
    build_corpus(config)
    split = config.output / "train"
    manifest = read_manifest(split)
    path = split / manifest.shards[0].path
    path.write_bytes(re.sub(rb"[0-9]+ path=", b"999 path=", path.read_bytes()))
    sha256, sizes = sha256_of(path), Corpus.open(split).document_lengths(0)
    listed = write_lengths(path, sha256, sizes.tolist())
    first = replace(manifest.shards[0], sha256=sha256, lengths=listed)
    replace(manifest, shards=(first, *manifest.shards[1:])).write(split)
    message = "shard.00000.tar is corrupted: a document has no name that ends in .tokens.npy"
    (problem,) = verify_split(split, lambda line: None)
    assert message in problem
    with pytest.raises(DataError, match=re.escape(message)):
        list(describe_split(split, 0, seed=1))


def test_a_shard_of_an_unknown_format_is_rejected(tmp_path):
    (tmp_path / "shard.00000.zip").write_bytes(b"x")
    with pytest.raises(
        DataError, match=r"unknown format, expected a name that ends in \.mds or \.tar"
    ):
        ShardReader(tmp_path / "shard.00000.zip", "uint16")


def test_a_full_disk_leaves_no_writer_that_fails_again_when_it_is_collected(tmp_path, monkeypatch):
    import gc
    import resource

    ignored = []
    monkeypatch.setattr("sys.unraisablehook", ignored.append)
    documents = [(f"d{number}", np.arange(3000, dtype=np.uint16)) for number in range(20)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_shard(tmp_path / "shard.00000.tar", documents, tmp_path / "scratch")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    gc.collect()
    assert [str(found.exc_value) for found in ignored] == []
    assert list(tmp_path.iterdir()) == []
