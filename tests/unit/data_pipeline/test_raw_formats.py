"""Tars of text and Parquet as raw input."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tarfile
from pathlib import Path

import pytest
import zstandard

from data_pipeline.builder.documents import read_documents
from data_pipeline.builder.records import Document, Reject
from data_pipeline.builder.sources import list_sources
from data_pipeline.config import CorpusConfig
from foundation.errors import ConfigError, DataError


def read_all(path: Path, **settings) -> list[Document | Reject]:
    config = CorpusConfig(input=(path,), output=path.parent / "unused", **settings)
    return [
        record
        for source in list_sources(config.input, config)
        for record in read_documents(source, config)
    ]


def tar_of(members: list[tuple[str, bytes]], tar_format: int = tarfile.PAX_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tar_format) as archive:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


LONG_KEY = "m" * 90 + "/" + "n" * 80
MEMBERS = [
    ("folder/a.txt", "first \u00e9\n".encode()),
    ("folder/a.jpg", b"\xff" * 5000),
    ("b.json", b'{"text": "second", "id": "own"}'),
    (f"{LONG_KEY}.json", b'{"title": "no text"}'),
    (f"{LONG_KEY}.txt", b"third" * 200),
    ("\u6f22.txt", b"fourth"),
]


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.tar.zst"])
@pytest.mark.parametrize(
    "tar_format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT]
)
def test_a_tar_gives_a_document_for_each_sample_in_order(tmp_path, name, tar_format):
    content = tar_of(MEMBERS, tar_format)
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress, ".tar": bytes}
    (tmp_path / name).write_bytes(pack[Path(name).suffix](content))
    assert read_all(tmp_path / name) == [
        Document("folder/a", "first \u00e9\n", f"{name}:folder/a"),
        Document("own", "second", f"{name}:b"),
        Document(LONG_KEY, "third" * 200, f"{name}:{LONG_KEY}"),
        Document("\u6f22", "fourth", f"{name}:\u6f22"),
    ]


def test_a_tar_written_by_webdataset_itself_is_read(tmp_path):
    from webdataset.writer import TarWriter

    with open(tmp_path / "x.tar", "wb") as file:
        writer = TarWriter(file)
        writer.write({"__key__": "a", "txt": "one", "cls": 3})
        writer.write({"__key__": "b", "json": {"body": "two"}})
        writer.write({"__key__": "c", "body": b"three"})
        writer.close()
    records = read_all(tmp_path / "x.tar", text_field="body")
    assert [(record.id, record.text) for record in records] == [
        ("a", "one"),
        ("b", "two"),
        ("c", "three"),
    ]


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (("k.txt", b"caf\xe9"), "invalid UTF-8 at byte 3"),
        (("k.txt", b" \n"), "empty"),
        (("k.txt", b"x" * 101), "longer than max_document_bytes=100"),
        (("k.json", b'{"body": 1}'), "no field 'text'"),
        (("k.jpg", b"x"), "found members 'jpg', expected txt or text or json"),
        (("k", b"x"), "found members '', expected"),
    ],
)
def test_a_bad_sample_is_rejected_with_location_and_reason_and_its_neighbors_are_kept(
    tmp_path, member, reason
):
    (tmp_path / "x.tar").write_bytes(tar_of([("a.txt", b"before"), member, ("z.txt", b"after")]))
    before, rejected, after = read_all(tmp_path / "x.tar", max_document_bytes=100)
    assert (before.text, after.text) == ("before", "after")
    assert isinstance(rejected, Reject)
    assert rejected.source == "x.tar:k"
    assert reason in rejected.reason


def damaged(content: bytes, kind: str) -> bytes:
    array = bytearray(content)
    third = 512 * 5  # the header of the third member: folder, two members of a header and a block
    if kind == "header":
        array[third + 3] ^= 1
    if kind == "zeroed":
        array[third : third + 300] = bytes(300)
    if kind == "cut in a member":
        return content[: third + 600]
    if kind == "cut in a header":
        return content[: third + 100]
    if kind == "without its end":
        return content[: 512 * 7]
    if kind == "size":
        array[third + 124 : third + 136] = b"x" * 12
    return bytes(array)


@pytest.mark.parametrize(
    "kind", ["header", "zeroed", "cut in a member", "cut in a header", "without its end", "size"]
)
@pytest.mark.parametrize("name", ["x.tar", "x.tar.zst"])
def test_a_corrupted_tar_is_named_and_never_silently_truncated(tmp_path, name, kind):
    content = damaged(tar_of([(f"{i}.txt", b"text %d" % i) for i in range(3)]), kind)
    (tmp_path / name).write_bytes(
        zstandard.ZstdCompressor().compress(content) if name.endswith(".zst") else content
    )
    with pytest.raises(DataError, match=rf"{name} is corrupted or truncated"):
        read_all(tmp_path / name)


def test_parquet_gives_a_document_for_each_row(tmp_path):
    import pyarrow
    from pyarrow import parquet

    texts = [f"text {i} \u00e9" for i in range(3000)]
    table = pyarrow.table(
        {"n": range(3000), "body": texts, "key": [f"k{i}" if i != 7 else None for i in range(3000)]}
    )
    parquet.write_table(table, tmp_path / "x.parquet", row_group_size=700)
    records = read_all(tmp_path / "x.parquet", text_field="body", id_field="key")
    assert [record.text for record in records] == texts
    assert [record.id for record in records][6:9] == ["k6", "x.parquet:8", "k8"]
    assert records[7].source == "x.parquet:8"
    for column in (table["body"].dictionary_encode(), table["body"].cast(pyarrow.large_string())):
        parquet.write_table(pyarrow.table({"text": column}), tmp_path / "x.parquet")
        assert [record.text for record in read_all(tmp_path / "x.parquet")] == texts


def test_a_long_text_of_many_rows_of_parquet_is_in_memory_once(tmp_path):
    import pyarrow
    from pyarrow import parquet

    words = pyarrow.array(["a " * (1 << 16)])
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000, pyarrow.int32()), words)
    for text in (column, column.cast(pyarrow.string())):
        table = pyarrow.table({"text": text})
        parquet.write_table(table, tmp_path / "x.parquet", compression="zstd")
        del table
        pyarrow.default_memory_pool().release_unused()
        before = pyarrow.total_allocated_bytes()
        config = CorpusConfig(input=(tmp_path / "x.parquet",), output=tmp_path)
        source = next(iter(list_sources(config.input, config)))
        records = read_documents(source, config)
        first = next(records)
        assert isinstance(first, Document)
        assert first.id == "x.parquet:1"
        assert pyarrow.total_allocated_bytes() - before < 20 << 20
        assert sum(1 for _ in records) == 999


def test_bad_rows_of_parquet_are_rejected_with_location_and_reason(tmp_path):
    import pyarrow
    from pyarrow import parquet

    raw = [b"good", None, b"caf\xe9", b" ", b"x" * 101]
    column = pyarrow.array(raw, pyarrow.binary())
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "x.parquet")
    good, *bad = read_all(tmp_path / "x.parquet", max_document_bytes=100)
    assert (good.id, good.text) == ("x.parquet:1", "good")
    assert [record.source for record in bad] == [f"x.parquet:{row}" for row in range(2, 6)]
    reasons = [
        "is null",
        "invalid UTF-8 at byte 3",
        "empty",
        "longer than max_document_bytes=100",
    ]
    assert all(reason in record.reason for record, reason in zip(bad, reasons, strict=True))


def test_parquet_that_cannot_be_used_is_named(tmp_path, monkeypatch):
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"n": [1, 2], "body": ["a", "b"]}), path)
    with pytest.raises(DataError, match="has the columns n, body, not 'text'; set text_field"):
        read_all(path)
    with pytest.raises(DataError, match="holds int, expected text"):
        read_all(path, text_field="n")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"x.parquet is corrupted or truncated"):
        read_all(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="needs pyarrow, which is not installed"):
        read_all(path)


def test_tars_of_text_become_a_corpus(tmp_path):
    from data_pipeline.cli import main
    from tests.helpers.corpora import documents_of, some_texts

    texts = some_texts(60)
    (tmp_path / "a.tar").write_bytes(
        tar_of(
            [(f"d{i}.json", json.dumps({"text": text}).encode()) for i, text in enumerate(texts)]
            + [("z.jpg", b"")]
        )
    )
    flags = [
        "--input",
        str(tmp_path / "a.tar"),
        "--output",
        str(tmp_path / "out"),
        "--tokenizer",
        "bytes",
    ]
    assert main(["build", *flags, "--validation-fraction=0"]) == 0
    assert documents_of(tmp_path / "out" / "train") == {
        f"d{i}": text for i, text in enumerate(texts)
    }
    (reject,) = (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()
    assert json.loads(reject)["source"] == "a.tar:z"


@pytest.mark.parametrize(
    "tar_format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT]
)
def test_a_link_in_a_tar_is_rejected_and_its_neighbors_are_kept(tmp_path, tar_format):
    with tarfile.open(tmp_path / "x.tar", "w", format=tar_format) as archive:
        for name in ("a.txt", "b.txt", "c.txt"):
            info = tarfile.TarInfo(name)
            if name == "b.txt":
                info.type, info.linkname = (
                    tarfile.LNKTYPE,
                    "a.txt" if tar_format == tarfile.USTAR_FORMAT else "l" * 150,
                )
                archive.addfile(info)
                continue
            info.size = 4
            archive.addfile(info, io.BytesIO(b"text"))
    before, rejected, after = read_all(tmp_path / "x.tar")
    assert (before.id, after.id) == ("a", "c")
    assert rejected == Reject(
        "x.tar:b", "b.txt is a link or a device in the archive, expected a file"
    )


@pytest.mark.parametrize("size", ["-1", "9" * 5000, "\u00b2", ""])
def test_an_impossible_size_in_a_tar_is_a_corrupted_tar(tmp_path, size):
    info = tarfile.TarInfo("a.txt")
    info.size, info.pax_headers = 4, {"size": size}
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info, io.BytesIO(b"text"))
    with pytest.raises(DataError, match=r"x\.tar is corrupted or truncated"):
        read_all(tmp_path / "x.tar")
    content = bytearray(tar_of([("a.txt", b"text")], tarfile.USTAR_FORMAT))
    member = content[512:1024]
    member[124:136] = b"-0000000001\0"
    member[148:156] = b" " * 8
    member[148:156] = f"{sum(member):06o}\0 ".encode()
    content[512:1024] = member
    (tmp_path / "y.tar").write_bytes(content)
    with pytest.raises(DataError, match=r"y\.tar is corrupted .*has a size of -1"):
        read_all(tmp_path / "y.tar")
