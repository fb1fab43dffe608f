from __future__ import annotations

import json

import numpy as np
import pytest

from data_pipeline.shards.shards import ShardReader, write_index, write_shard
from foundation.errors import DataError
from tests.helpers.corpora import make_tiny_corpus


def documents_of(dtype: str):
    generator = np.random.default_rng(0)
    # Lengths on both sides of where the shape's own encoding grows from one to two and four bytes.
    for number, length in enumerate([1, 2, 3, 255, 256, 257, 65535, 65536, 70000, 5]):
        yield (
            f"document \u00e9 {number}" * (number % 3 + 1),
            generator.integers(0, 1 << 16, length).astype(dtype),
        )


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_own_reader_finds_every_document_of_the_stock_writer(tmp_path, dtype):
    documents = list(documents_of(dtype))
    write_shard(tmp_path / "shard.00007.mds", documents, tmp_path / "scratch")
    reader = ShardReader(tmp_path / "shard.00007.mds", dtype)
    assert len(reader) == len(documents)
    assert reader.lengths.tolist() == [len(tokens) for _, tokens in documents]
    for number, (name, tokens) in enumerate(documents):
        assert reader.document_id(number) == name
        assert np.array_equal(reader.tokens(number), tokens)
        assert np.array_equal(
            reader.tokens(number, len(tokens) // 2, 1), tokens[len(tokens) // 2 :][:1]
        )


def test_stock_readers_read_our_shards(tmp_path):
    from streaming import StreamingDataset
    from streaming.base.format.mds.reader import MDSReader
    from streaming.base.util import clean_stale_shared_memory

    directory = make_tiny_corpus(tmp_path / "corpus") / "train"
    index = json.loads((directory / "index.json").read_text())
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
    dataset = StreamingDataset(
        local=str(directory), shuffle=False, batch_size=1, validate_hash="xxh64"
    )
    found = {sample["id"]: sample["tokens"] for sample in dataset}
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in found)


def test_a_failed_write_leaves_no_file(tmp_path):
    (tmp_path / "scratch").mkdir()
    bad = [
        ("a", np.zeros(3, np.uint16)),
        ("b", np.zeros(0, np.uint16)),
    ]  # MDS cannot hold an empty document
    with pytest.raises(ValueError, match="0 elements"):
        write_shard(tmp_path / "shard.00000.mds", bad, tmp_path / "scratch")
    assert not list(tmp_path.glob("*.mds"))


def damaged(content: bytes, kind: str) -> bytes:
    array = bytearray(content)
    start = int.from_bytes(array[4:8], "little")  # of the first document
    if kind == "empty":
        return b""
    if kind == "short":
        return content[:6]
    if kind == "truncated":
        return content[:-10]
    if kind == "longer":
        return content + b"12"
    if kind == "count":
        array[0:4] = b"\xff\xff\xff\x7f"
    if kind == "none":
        array[0:4] = b"\0\0\0\0"
    if kind == "columns":
        array = bytearray(content.replace(b'"tokens"', b'"t0kens"'))
    if kind == "json":
        array = bytearray(content.replace(b'{"column', b'["column'))
    if kind == "id size":
        array[start] ^= 1
    if kind == "shape":
        array[start + 8 + 1] = 2 << 2
    if kind == "dtype":
        array = bytearray(content.replace(b"uint16", b"uint32"))
    return bytes(array)


@pytest.mark.parametrize(
    "kind",
    [
        "empty",
        "short",
        "truncated",
        "longer",
        "count",
        "none",
        "columns",
        "json",
        "id size",
        "shape",
        "dtype",
    ],
)
def test_a_shard_that_contradicts_its_headers_is_named(tmp_path, kind):
    path = tmp_path / "shard.00003.mds"
    write_shard(
        path, [(letter, np.arange(40, dtype=np.uint16)) for letter in "abc"], tmp_path / "scratch"
    )
    content = path.read_bytes()
    assert damaged(content, kind) != content
    path.write_bytes(damaged(content, kind))
    with pytest.raises(DataError, match=r"shard .*shard\.00003\.mds is (corrupted|empty)"):
        ShardReader(path, "uint16")


def test_the_index_is_what_stock_readers_look_for(tmp_path):
    entry = write_shard(
        tmp_path / "shard.00004.mds", [("a", np.ones(3, np.uint16))], tmp_path / "scratch"
    )
    write_index(tmp_path, [entry])
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["version"] == 2
    assert index["shards"][0]["raw_data"]["basename"] == "shard.00004.mds"
    assert index["shards"][0]["raw_data"]["bytes"] == (tmp_path / "shard.00004.mds").stat().st_size
