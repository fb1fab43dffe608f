"""Shards in both formats: written and read by their stock libraries, and by our own readers."""

import gc
import io
import json
import re
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.commands.inspect import describe_split
from data_pipeline.commands.verify import verify_split
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.lengths import write_lengths
from data_pipeline.corpora.manifest import read_manifest
from data_pipeline.shards.shards import ShardReader, write_shard
from foundation.errors import DataError
from foundation.files import sha256_of
from tests.helpers.corpora import config_of, contents, documents_of, make_tiny_corpus, some_texts
from tests.helpers.full_disk import full_disk


def documents(dtype: str) -> list[tuple[str, np.ndarray]]:
    """Ids that WebDataset's keys must escape, some too long for a header. Lengths near a block of a
    tar, and near where the size of an array in MDS grows from one to two and four bytes."""
    ids = ["a.b/c.txt", "\u00e9 %2E", "d\nd", "../x", "", "x" * 90, "y" * 300, "\u6f22" * 60]
    lengths = [1, 2, 3, 191, 192, 193, 255, 256, 257, 448, 65535, 65536, 70000, 5]
    generator = np.random.default_rng(0)
    names = [f"{ids[n % len(ids)]}{n // len(ids) or ''}" for n in range(len(lengths))]
    tokens = [generator.integers(0, 1 << 16, length).astype(dtype) for length in lengths]
    return list(zip(names, tokens, strict=True))


def written(folder: Path, suffix: str, count: int | None = None, dtype: str = "uint16") -> Path:
    path = folder / f"shard.00003{suffix}"
    write_shard(path, documents(dtype)[:count], folder / "scratch")
    return path


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("suffix", [".mds", ".tar"])
def test_own_reader_finds_every_document_of_the_stock_writer(tmp_path, suffix, dtype):
    reader = ShardReader(written(tmp_path, suffix, dtype=dtype), dtype)
    assert reader.lengths.tolist() == [len(tokens) for _, tokens in documents(dtype)]
    for number, (name, tokens) in enumerate(documents(dtype)):
        assert reader.document_id(number) == name
        assert np.array_equal(reader.tokens(number), tokens)
        middle = len(tokens) // 2
        assert np.array_equal(reader.tokens(number, middle, 1), tokens[middle:][:1])


def test_the_stock_readers_of_mds_read_our_shards(tmp_path):
    from streaming import StreamingDataset
    from streaming.base.format.mds.reader import MDSReader
    from streaming.base.util import clean_stale_shared_memory

    directory = make_tiny_corpus(tmp_path / "corpus") / "train"
    index = json.loads((directory / "index.json").read_text())
    assert index["version"] == 2
    expected = {}
    for entry in index["shards"]:
        reader = ShardReader(directory / entry["raw_data"]["basename"], "uint16")
        stock = MDSReader.from_json(str(directory), "", entry)
        assert stock.size == len(reader)
        for number in range(len(reader)):
            sample = stock.get_item(number)
            assert sample["id"] == reader.document_id(number)
            assert np.array_equal(sample["tokens"], reader.tokens(number))
            expected[sample["id"]] = sample["tokens"]
    assert len(index["shards"]) > 3
    clean_stale_shared_memory()
    settings = {"shuffle": False, "batch_size": 1, "validate_hash": "xxh64"}
    dataset = StreamingDataset(local=str(directory), **settings)
    found = {sample["id"]: sample["tokens"] for sample in dataset}
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in found)


@pytest.mark.filterwarnings("ignore")
def test_the_stock_reader_of_webdataset_reads_a_build_with_the_documents_of_one_as_mds(tmp_path):
    import webdataset

    config = config_of(tmp_path / "tar", some_texts(), shard_format="webdataset", shard_bytes=20000)
    again = config_of(tmp_path / "two", some_texts(), shard_format="webdataset", shard_bytes=20000)
    for each in (config, again, config_of(tmp_path / "mds", some_texts())):
        build_corpus(each)
    assert contents(config.output) == contents(again.output)
    for split in ("train", "validation"):
        assert documents_of(config.output / split) == documents_of(tmp_path / "mds" / "out" / split)
        *full, _ = sorted((config.output / split).glob("*.tar"))
        sizes = [len(path.read_bytes().rstrip(b"\0")) for path in full]
        assert all(20000 - 3000 < size <= 20000 for size in sizes), "as many documents as fit"
        assert not verify_split(config.output / split, lambda line: None)
    corpus = Corpus.open(config.output / "train")
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


def test_tokens_that_look_like_headers_are_not_mistaken_for_them(tmp_path):
    header, gap = np.frombuffer(tar_of(b"x" * 100)[:512], np.uint16), np.zeros(300, np.uint16)
    tokens = np.concatenate([gap[:192], header, gap, header])  # on a block
    three = [("a", tokens), ("b", tokens[:500]), ("c", tokens)]
    write_shard(tmp_path / "shard.00000.tar", three, tmp_path / "scratch")
    content = (tmp_path / "shard.00000.tar").read_bytes()
    assert sum(content[at + 257 : at + 262] == b"ustar" for at in range(0, len(content), 512)) > 3
    reader = ShardReader(tmp_path / "shard.00000.tar", "uint16")
    assert [reader.document_id(number) for number in range(3)] == ["a", "b", "c"]
    assert all(np.array_equal(reader.tokens(n), each) for n, (_, each) in enumerate(three))


def tar_of(data: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        info = tarfile.TarInfo("00000000-a.tokens.npy")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def array_of(tokens: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, tokens)
    return file.getvalue()


def patched(offset: int, content: bytes) -> Callable[[bytes], bytes]:
    return lambda whole: whole[:offset] + content + whole[offset + len(content) :]


def first_document(offset: int, change: Callable[[int], int]) -> Callable[[bytes], bytes]:
    """A change of one byte after the start of the first document of an MDS shard."""

    def damage(whole: bytes) -> bytes:
        at = int.from_bytes(whole[4:8], "little") + offset
        return patched(at, bytes([change(whole[at])]))(whole)

    return damage


MDS_DAMAGE = {
    "empty": lambda whole: b"",
    "short": lambda whole: whole[:6],
    "truncated": lambda whole: whole[:-10],
    "longer": lambda whole: whole + b"12",
    "count": patched(0, b"\xff\xff\xff\x7f"),
    "none": patched(0, bytes(4)),
    "columns": lambda whole: whole.replace(b'"tokens"', b'"t0kens"'),
    "json": lambda whole: whole.replace(b'{"column', b'["column'),
    "id size": first_document(0, lambda value: value ^ 1),
    "shape": first_document(8 + len("a.b/c.txt"), lambda value: 2 << 2),
    "dtype": lambda whole: whole.replace(b"uint16", b"uint32"),
}
TAR_DAMAGE = {
    "empty": lambda whole: b"",
    "cut": lambda whole: whole[: len(whole) // 2 // 512 * 512],
    "no end": lambda whole: whole[: -(-len(whole.rstrip(b"\0")) // 512) * 512],
    "other file": lambda whole: b"x" * 512 * 20,
    "only end": lambda whole: bytes(1024),
    "more after": lambda whole: whole + b"more",
    "block after": lambda whole: whole + b"more" * 128,
    "checksum": lambda whole: patched(20, bytes([whole[20] ^ 1]))(whole),
    "size": patched(124, b"not a numbe"),
    "text": lambda whole: tar_of(b"long enough for a header of an array" + bytes(150)),
    "short": lambda whole: tar_of(b"x"),
    "other type": lambda whole: tar_of(array_of(np.zeros(5, np.int64))),
    "no tokens": lambda whole: tar_of(array_of(np.zeros(0, np.uint16))),
}
DAMAGES = [(".mds", name, damage) for name, damage in MDS_DAMAGE.items()]
DAMAGES += [(".tar", name, damage) for name, damage in TAR_DAMAGE.items()]


@pytest.mark.parametrize(("suffix", "name", "damage"), DAMAGES)
def test_a_shard_that_contradicts_its_headers_is_named(tmp_path, suffix, name, damage):
    path = written(tmp_path, suffix, 5)
    content = path.read_bytes()
    assert damage(content) != content
    path.write_bytes(damage(content))
    with pytest.raises(DataError, match=path.name):
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
    (problem,) = verify_split(split, lambda line: None)
    assert path.name in problem
    with pytest.raises(DataError, match=path.name):
        list(describe_split(split, 0, seed=1))


def test_a_shard_of_an_unknown_format_is_rejected(tmp_path):
    (tmp_path / "shard.00000.zip").write_bytes(b"x")
    with pytest.raises(DataError, match=r"\.zip"):
        ShardReader(tmp_path / "shard.00000.zip", "uint16")


def test_a_full_disk_leaves_no_writer_that_fails_again_when_it_is_collected(tmp_path, monkeypatch):
    ignored = []
    monkeypatch.setattr("sys.unraisablehook", ignored.append)
    with full_disk(20_000), pytest.raises(OSError):
        written(tmp_path, ".tar")
    gc.collect()
    assert [str(found.exc_value) for found in ignored] == []
    assert list(tmp_path.iterdir()) == []
