"""With `format: auto` nothing is read as what it is not."""

from __future__ import annotations

import gzip
import io
import json
import os
import socket
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.builder.documents import read_documents
from data_pipeline.builder.records import Document, Reject
from data_pipeline.builder.sources import list_sources
from data_pipeline.config import CorpusConfig
from foundation.errors import DataError
from foundation.progress import Note
from tests.fuzz.examine import bounded_memory
from tests.helpers.corpora import make_tiny_corpus, write_jsonl


def read_all(path: Path, notes: list | None = None, **settings) -> list[Document | Reject]:
    config = CorpusConfig(input=(path,), output=path.parent / "unused", **settings)
    report = (lambda what: None) if notes is None else notes.append
    return [
        record
        for source in list_sources(config.input, config, report)
        for record in read_documents(source, config)
    ]


def arrow_bytes() -> bytes:
    import pyarrow

    file = io.BytesIO()
    table = pyarrow.table({"text": ["a"]})
    with pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


LINES = b'{"text": "one"}\n{"text": "two"}\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("c4-train.00000-of-01024.json.gz", gzip.compress(LINES, mtime=0)),
        ("x.json", LINES),
        ("X.JSONL", LINES),
        ("x.JsonL.GZ", gzip.compress(LINES, mtime=0)),
    ],
)
def test_one_object_per_line_is_json_lines_whatever_the_case_of_the_name(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert [record.text for record in read_all(tmp_path)] == ["one", "two"]
    assert len(read_all(tmp_path, suffixes=(".json", ".jsonl"))) == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", b'[\n {"text": "a"}\n]', r"JSON without an object on its first line.*jq -c"),
        ("x.json", b'{\n "text": "a"\n}', r"JSON without an object on its first line.*jq -c"),
        ("part-00000", LINES, r"is JSON Lines by its first line.*rename it to \.jsonl"),
        ("shard.00000.mds", b"text", r"too short for a header"),
        ("shard.00000.mds.zstd", b"text", r"corrupted or truncated"),
        ("shard.00000.mds", b"\x01\0\0\0" + b"\xff" * 9, r"header expects 4294967295 bytes"),
        ("train.bin", np.arange(500, dtype=np.uint16).tobytes(), "an array of numbers"),
        ("train.tokens", np.arange(500, dtype=np.uint16).tobytes(), r"not text \(byte 0 is 0\)"),
        ("cafe", b"caf\xe9", r"not text \(invalid UTF-8 at byte 3\).*format=text"),
        ("x.csv", b"id,text\n", r"a table.*Parquet or JSON Lines"),
        ("x.jsonl.bz2", b"BZh9", r"an archive, expected .*; unpack it"),
        ("x.tgz", gzip.compress(b"", mtime=0), r"rename it to \.tar\.gz"),
        ("x", gzip.compress(b"text", mtime=0), r"compressed by gzip.*rename it to end in \.gz"),
        ("x.data", b"PAR1....PAR1", r"a Parquet file.*format=parquet"),
        ("x.arrow", b"ARROW1 and no more", r"corrupted or truncated"),
        ("x.dataset", arrow_bytes(), r"an Arrow file.*rename it to \.arrow"),
    ],
)
def test_a_file_that_is_not_text_is_refused_with_what_would_read_it(
    tmp_path, name, content, message
):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        read_all(tmp_path)
    assert str(tmp_path / name) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["x.arrow", "x.parquet"])
def test_a_table_that_states_sizes_beyond_memory_is_refused(tmp_path, name):
    """An Arrow stream of the bytes `null` announces 1.8 GB."""
    (tmp_path / name).write_bytes(b"null" if name == "x.arrow" else b"PAR1\xff\xff\xff\x70PAR1")
    with bounded_memory(1 << 28), pytest.raises(DataError, match=r"corrupted or truncated"):
        read_all(tmp_path)


def test_text_of_any_name_is_text_and_a_stated_format_is_taken_at_its_word(tmp_path):
    (tmp_path / "Makefile").write_text("all:\n\ttrue\n")
    (tmp_path / "\u00e9.py").write_text("\u00e9" * 700_000)  # cut inside a character by the head
    assert [record.id for record in read_all(tmp_path)] == ["Makefile", "\u00e9.py"]
    (tmp_path / "x.json").write_text("[1]")
    records = read_all(tmp_path, format="text")
    assert [record.text for record in records][1:2] == ["[1]"]


def test_a_binary_file_among_many_is_listed_as_unusable_when_it_is_read(tmp_path):
    for number in range(17):
        (tmp_path / f"{number:02}.log").write_text("text")
    (tmp_path / "99.log").write_bytes(b"text\0")
    *good, bad = read_all(tmp_path)
    assert all(isinstance(record, Document) for record in good)
    assert bad == Reject("99.log", "not text (byte 4 is 0)")


def test_files_about_records_are_left_out_and_said(tmp_path):
    write_jsonl(tmp_path / "data" / "x.jsonl", ["one"])
    for name in ("README.md", "LICENSE", "data/dataset_info.json", "data/_SUCCESS"):
        (tmp_path / name).write_text("about")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "README.md").write_text("beside no records")
    notes: list = []
    assert [record.id for record in read_all(tmp_path, notes)] == ["d0", "other/README.md"]
    assert notes == [
        Note(
            f"input {tmp_path}: left out, beside records: "
            "LICENSE, README.md, data/_SUCCESS and 1 more"
        )
    ]
    assert len(read_all(tmp_path, format="text")) == 6, "on demand all of them are text"


def test_a_built_corpus_is_not_built_again(tmp_path):
    built = make_tiny_corpus(tmp_path / "corpus", documents=12)
    for folder in (built, built / "train"):
        with pytest.raises(DataError, match=r"is a built corpus .* train on it with data\.path"):
            read_all(folder)


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_what_is_neither_file_nor_folder_is_named(tmp_path, monkeypatch, kind):
    path = tmp_path / "in" / "x"
    path.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        monkeypatch.chdir(path.parent)  # the names of sockets are short
        socket.socket(socket.AF_UNIX).bind("x")
    for root in (path, path.parent):
        with pytest.raises(DataError, match=rf"{path} is a pipe, socket or device"):
            read_all(root)


def test_string_views_in_parquet_are_text(tmp_path):
    import pyarrow
    from pyarrow import parquet

    texts = ["one \u00e9", "two"]
    table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.string_view())})
    parquet.write_table(table, tmp_path / "x.PARQUET")
    assert [record.text for record in read_all(tmp_path / "x.PARQUET")] == texts


def test_json_records_keep_their_fields_in_a_json_file(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"id": "own", "text": "t", "url": "u"}))
    assert read_all(tmp_path) == [Document("own", "t", "x.json:1")]
