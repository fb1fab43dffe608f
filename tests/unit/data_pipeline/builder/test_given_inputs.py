"""Data sets of others, text and tokens, written by the libraries that users write them with; and
input that is not what was listed or promised: one line, and nothing is left of the build."""

import base64
import bz2
import gzip
import json
import os
import re
import shutil
import struct
import tarfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from data_pipeline.builder import build_corpus as builder
from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.builder.documents import read_documents
from data_pipeline.builder.parallel_build import build_in_processes
from data_pipeline.builder.sources import list_sources
from data_pipeline.config import CorpusConfig, TokenizerConfig
from data_pipeline.corpora.manifest import read_manifest
from data_pipeline.tokenizer import Tokenizer
from foundation.errors import ConfigError, UserError
from tests.helpers.corpora import documents_of, stored, write_jsonl
from tests.helpers.token_files import DOCUMENTS, END, make_input, write_mds, write_megatron

BYTES = TokenizerConfig(kind="bytes")
UNKNOWN = TokenizerConfig(kind="unknown", vocab_size=400, end_id=399)
TOKENS = TokenizerConfig(kind="unknown", vocab_size=END + 1, end_id=END)


def build(folder: Path, **settings) -> None:
    options = {"input": (folder,), "tokenizer": BYTES, "validation_fraction": 0.0, "threads": 1}
    build_corpus(CorpusConfig(output=folder.parent / "out", **{**options, **settings}))


def refuse(culprit: Path | str, folder: Path, **settings) -> None:
    """A build ends in one line that names the culprit, and leaves nothing."""
    with pytest.raises(UserError) as error:
        build(folder, **settings)
    assert str(culprit) in str(error.value)
    assert "\n" not in str(error.value)
    assert not (folder.parent / "out").exists()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.mark.parametrize(
    "kind", ["megatron", "nanoGPT", "numpy", "int32", "mds", "mds of bytes", "parquet", "arrow"]
)
def test_tokens_become_a_corpus_as_they_are(folder, kind):
    build(folder, **{"tokenizer": TOKENS, **make_input(kind, folder)})
    out = folder.parent / "out"
    assert [tokens for _, tokens in stored(out / "train")] == [[*each, END] for each in DOCUMENTS]
    assert Tokenizer.load(out / "tokenizer").decode([5, END]) == "5 "


def test_a_megatron_pair_is_named_by_its_prefix_and_its_index_is_read(folder):
    settings = {"tokenizer": TOKENS, **make_input("megatron", folder)}
    refuse(folder / "y", folder, **settings, input=(folder / "y",))
    build(folder, **settings, input=(folder / "x",))
    assert [tokens for _, tokens in stored(folder.parent / "out" / "train")] == [
        [*each, END] for each in DOCUMENTS
    ]
    notes: list[object] = []
    config = CorpusConfig(input=(folder,), output=folder.parent / "new", **settings)
    assert [source.name for source in list_sources((folder,), config, notes.append)] == ["x.bin"]
    assert notes == []


def test_tokens_of_a_named_tokenizer_have_sizes_and_a_text(folder):
    texts = ["one caf\u00e9", "two"]
    np.save(folder / "x.npy", np.array([token for t in texts for token in (*t.encode(), 300)]))
    build(folder, format="array", tokenizer=TokenizerConfig(kind="bytes", end_id=300))
    train = folder.parent / "out" / "train"
    assert sorted(documents_of(train).values()) == texts
    manifest = read_manifest(train)
    assert manifest.text_bytes == len("".join(texts).encode())
    assert manifest.characters == len("".join(texts))


@pytest.mark.parametrize("kind", ["save_to_disk", "splits", "parquet", "mds", "mds.zstd"])
def test_texts_of_data_sets_are_read(folder, kind):
    import datasets

    texts = ["one", "two \u00e9", "three"]
    table = datasets.Dataset.from_dict({"text": texts, "n": [1, 2, 3]})
    if kind == "save_to_disk":
        table.save_to_disk(str(folder), num_shards=2)
    elif kind == "splits":
        datasets.DatasetDict({"train": table}).save_to_disk(str(folder))
    elif kind == "parquet":
        table.to_parquet(str(folder / "train-00000-of-00001.parquet"))
    else:
        settings = {"compression": "zstd"} if kind == "mds.zstd" else {}
        write_mds(folder, {"text": "str"}, [{"text": text} for text in texts], **settings)
    build(folder)
    assert list(documents_of(folder.parent / "out" / "train").values()) == texts


def test_pickled_columns_are_refused_where_they_are_asked_for(folder):
    write_mds(folder, {"text": "str", "x": "pkl"}, [{"text": "one", "x": {"a": 1}}])
    refuse(folder, folder, text_field="x")
    build(folder)  # elsewhere they are not looked at


@pytest.mark.parametrize(
    ("inputs", "validation", "file"),
    [
        ([""], ["valid"], "valid/x"), (["valid"], [""], "valid/x"), ([""], [""], "train/x"),
        (["train/x"], ["train/x"], "train/x"), (["train"], ["train/x"], "train/x"),
        (["train"], ["../link"], "../link/x"), (["train"], ["../links"], "../links/y"),
        (["train", "valid"], ["valid"], "valid/x"), (["", "train"], [], "train/x"),
        (["train/x", ""], [], "train/x"), (["train", "../links"], [], "../links/y"),
        (["train/x", "train/x"], [], "train/x"),
    ],
)  # fmt: skip
def test_a_file_of_two_inputs(folder, inputs, validation, file):
    for name in ("train/x", "valid/x"):
        (folder / name).parent.mkdir()
        (folder / name).write_text("some words")
    links = folder.parent / "links"
    links.mkdir()
    (links / "y").hardlink_to(folder / "train" / "x")
    (folder.parent / "link").symlink_to("in/train")
    roots = [tuple(folder / name for name in names) for names in (inputs, validation)]
    refuse(folder / file, folder, input=roots[0], validation_input=roots[1])


def shrink(path: Path) -> None:
    os.truncate(path, path.read_bytes().index(b"\n") + 1)


def shrink_unseen(path: Path) -> None:
    before = path.stat().st_mtime_ns
    shrink(path)
    os.utime(path, ns=(before, before))


@pytest.mark.parametrize(
    "change",
    [
        shrink,
        shrink_unseen,
        lambda path: path.write_bytes(path.read_bytes()),
        lambda path: write_jsonl(path, ["1"] * 9),
    ],
)
def test_a_file_that_changes_after_the_listing(folder, monkeypatch, change):
    first, second = (write_jsonl(folder / name, ["one", "two"]) for name in ("1.jsonl", "2.jsonl"))
    before = second.stat().st_mtime_ns - 10**9
    os.utime(second, ns=(before, before))

    def reading(source, *arguments):
        if source.path == first:
            change(second)
        return read_documents(source, *arguments)

    monkeypatch.setattr(builder, "read_documents", reading)
    refuse(second, folder)


def flip(shard: Path) -> None:
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1  # of the last text, or of what the compression ends with
    shard.write_bytes(content)


def name_another_hash(shard: Path) -> None:
    index = shard.with_name("index.json")
    index.write_text(index.read_text().replace('"sha1"', '"shake_128"'))


@pytest.mark.parametrize(
    ("compression", "hashes", "damage"),
    [
        (None, [], Path.unlink),
        ("zstd", ["sha1"], Path.unlink),
        ("gz", [], lambda shard: shutil.copy(shard, shard.with_suffix(""))),
        (None, ["xxh64"], flip),
        ("zstd", ["sha1"], flip),
        ("gz", ["blake2b", "xxh3_128"], flip),
        (None, ["sha1"], name_another_hash),
    ],
)
def test_an_mds_data_set_that_is_not_what_its_index_says(folder, compression, hashes, damage):
    write_mds(
        folder, {"text": "str"}, [{"text": f"text {number}"} for number in range(200)],
        compression=compression, hashes=hashes, size_limit=2000,
    )  # fmt: skip
    build(folder)
    shutil.rmtree(folder.parent / "out")
    shard = sorted(folder.glob("shard.*"))[1]
    damage(shard)
    refuse(shard.parent, folder)


@pytest.mark.parametrize(("code", "dtype"), [(8, "<i4"), (4, "<u2")])
def test_an_index_of_another_type_than_its_file(folder, code, dtype):
    documents = [[5, 6, 7], [8], [9, 10, 11, 12]]
    write_megatron(folder / "x", documents, {8: "<u2", 4: "<i4"}[code], code)
    np.array([token for each in documents for token in each], dtype).tofile(folder / "x.bin")
    refuse(folder, folder, format="megatron", tokenizer=UNKNOWN)


@pytest.mark.parametrize(
    ("tokens", "kind", "culprit"),
    [
        ([4, END + 1], "unknown", "x.npy:1"),
        ([4, 256, 5], "bytes", "x.npy:1"),
        ([4, -1, 5], "unknown", "x.npy"),
        ([4], "unigram", "tokenizer.kind"),
    ],
)
def test_ids_that_the_vocabulary_does_not_explain_are_refused(folder, tokens, kind, culprit):
    np.save(folder / "x.npy", np.array(tokens))
    refuse(culprit, folder, format="array", tokenizer=replace(TOKENS, kind=kind))


def overwrite(path: Path, offset: int, content: bytes) -> None:
    whole = bytearray(path.read_bytes())
    offset %= len(whole)
    whole[offset : offset + len(content)] = content
    path.write_bytes(whole)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b"text"),
        lambda path: path.write_bytes(path.read_bytes()[:-8]),
        lambda path: overwrite(path, 17, b"\x06"),
        lambda path: overwrite(path, 34, b"\xff\xff\xff\x7f"),
        lambda path: overwrite(path, -8, b"\xff"),
    ],
)
def test_a_wrong_index_is_refused_in_one_line(folder, change):
    settings = make_input("megatron", folder)
    change(folder / "x.idx")
    refuse(folder, folder, **{"tokenizer": TOKENS, **settings})


@pytest.mark.parametrize("write", [np.save, np.savez])
def test_neither_an_array_of_objects_nor_an_archive_is_read_as_an_array(folder, write):
    path = folder / "x.npy"
    with path.open("wb") as file:
        write(file, np.array([{"a": 1}] if write is np.save else [1, 2]))
    refuse(path, folder, format="array", tokenizer=TOKENS)
    with pytest.raises(ConfigError):
        build(folder, format="array", token_dtype="float32")


@pytest.mark.parametrize(
    "content",
    [
        b"words " * 50_000 + b"\xff" + b" more" * 50_000,
        b"words " * 50_000 + "ä".encode()[:1],
        b"\x80" * 250_000,
    ],
)
def test_a_stream_with_a_byte_that_is_no_text(folder, content):
    (folder / "x").write_bytes(content)
    refuse(folder / "x", folder, format="stream", max_rejects=100)


def test_an_arrow_stream_that_was_cut_after_a_batch(folder):
    with pyarrow.OSFile(str(folder / "x.arrow"), "wb") as file:
        batch = pyarrow.record_batch({"text": ["one", "two"]})
        writer = pyarrow.ipc.new_stream(file, batch.schema)
        for _ in range(3):
            writer.write_batch(batch)
            end = file.tell()
        writer.close()
    build(folder)
    shutil.rmtree(folder.parent / "out")
    os.truncate(folder / "x.arrow", end)
    refuse(folder / "x.arrow", folder)


@pytest.mark.parametrize("column", ["input_ids", "text", "number"])
@pytest.mark.parametrize("offset", [12800, 2**30, -4])
def test_an_offset_that_leads_out_of_a_table_does_not_end_the_process(folder, column, offset):
    ids = [[77, 78, 79], [80], [81, 82]]
    columns = {"input_ids": ids, "text": ["a", "bcde", "f"], "number": [1] * 3}
    table, path = pyarrow.table(columns), folder / "x.arrow"
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    content = path.read_bytes()
    for valid in (struct.pack("<4i", 0, 3, 4, 6), struct.pack("<4i", 0, 1, 5, 6)):
        assert content.count(valid) == 1
        content = content.replace(valid, valid[:8] + struct.pack("<i", offset) + valid[12:])
    path.write_bytes(content)
    refuse(path, folder, text_field=column)


@pytest.mark.parametrize("name", ["x.txt", "x.md", "x.TXT.gz"])
def test_records_in_a_file_named_like_text(folder, name):
    write = gzip.open if name.endswith(".gz") else open
    with write(folder / name, "wb") as file:
        file.write(b'{"text": "one"}\n{"text": "two"}\n')
    refuse(folder / name, folder)
    with write(folder / name, "wb") as file, tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(__file__, "a.txt")
    refuse(folder / name, folder)
    build(folder, format="text")


def test_ranks_of_tiktoken_that_were_cut(folder, tmp_path):
    (folder / "x.txt").write_text("text")
    ranks = [bytes([value]) for value in range(256)]
    ranks += [bytes([97 + one, 97 + other]) for one in range(10) for other in range(10)]
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(ranks)]
    path = tmp_path / "ranks.tiktoken"
    settings = TokenizerConfig(path=path, pattern=r"\w+|\W+", special_tokens={"<|end|>": 356},
                               end_token="<|end|>")  # fmt: skip
    for cut in (60, 2):
        path.write_bytes(b"".join(lines[:-cut]))
        refuse(path, folder, tokenizer=settings)
    path.write_bytes(b"".join(lines))
    build(folder, tokenizer=settings)
    model = path.rename(tmp_path / "tokenizer.model")  # as Llama 3 calls it
    with pytest.raises(ConfigError, match="has ranks only"):
        build(folder, tokenizer=TokenizerConfig(path=model))


def test_after_a_refusal_the_same_command_with_other_settings_builds(folder):
    """A tokenizer was saved and shards were begun before the record that is refused."""
    np.save(folder / "x.npy", np.array([1, 2, 3, 399, 4, 5], "uint16"))
    tokenizer = replace(UNKNOWN, vocab_size=399, end_id=398)
    refuse("x.npy:1", folder, format="array", tokenizer=tokenizer)
    build(folder, format="array", tokenizer=UNKNOWN)
    recipe = json.loads((folder.parent / "out" / "build.json").read_text())
    assert recipe["settings"]["tokenizer"]["end_id"] == 399


@pytest.mark.parametrize("run", [build_corpus, partial(build_in_processes, processes=2)])
def test_after_a_refusal_with_a_list_of_rejects_other_settings_build(folder, run):
    for name in ("1.jsonl", "2.jsonl"):
        (folder / name).write_text('{"content": "words"}\n' * 20)
    config = CorpusConfig(
        input=(folder,), output=folder.parent / "out", tokenizer=BYTES, validation_fraction=0.0,
        max_rejects=9,
    )  # fmt: skip
    with pytest.raises(UserError) as error:
        run(config)
    assert Path(re.findall(r"(\S+rejects.jsonl)", str(error.value))[0]).read_text()
    run(replace(config, text_field="content"))


def parquet(path: Path, columns: dict, **settings) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **settings)


def test_parquet_of_other_encodings_and_with_empty_rows_is_read(folder, capsys):
    texts = [f"text {number}" for number in range(50)]
    encodings = {"text": "DELTA_BYTE_ARRAY", "id": "DELTA_LENGTH_BYTE_ARRAY"}
    columns = {"text": [*texts, *[""] * 2000], "id": [f"i{number}" for number in range(2050)]}
    parquet(folder / "x.parquet", columns, use_dictionary=False, column_encoding=encodings)
    build(folder)
    assert list(documents_of(folder.parent / "out" / "train").values()) == texts
    assert not (folder.parent / "out" / "rejects.jsonl").exists()


def test_a_changed_byte_under_a_checksum_of_a_page(folder):
    texts = [f"text {number}" * 20 for number in range(50)]
    options = {"compression": "none", "write_page_checksum": True, "use_dictionary": False}
    parquet(folder / "x.parquet", {"text": texts}, **options)
    build(folder)
    shutil.rmtree(folder.parent / "out")
    path = folder / "x.parquet"
    overwrite(path, path.read_bytes().index(b"text 30"), b"T")
    refuse(path, folder)


def two_columns(path: Path) -> None:
    schema = pyarrow.schema([("text", pyarrow.string())] * 2)
    rows = pyarrow.Table.from_arrays([pyarrow.array(["one"])] * 2, schema=schema)
    pyarrow.parquet.write_table(rows, path)


def with_dictionary(path: Path) -> None:
    import zstandard

    samples = [b'{"text": "some words %d"}\n' % number for number in range(2000)]
    trained = zstandard.train_dictionary(1 << 12, samples)
    path.write_bytes(zstandard.ZstdCompressor(dict_data=trained).compress(b"".join(samples)))


RECORDS = b'{"text": "one"}\n'
GIT_LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n"


def holding(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "write", "is_damaged"),
    [
        *((name, holding(GIT_LFS), False) for name in ("x.txt", "x.jsonl.gz", "x.tar", "x.mds")),
        ("x.npy", holding(GIT_LFS), False),
        ("x.npy", holding(b"\x89HDF\r\n\x1a\n" + bytes(80)), False),
        ("x.jsonl", holding(gzip.compress(RECORDS)), False),
        ("x.jsonl.zst", holding(gzip.compress(RECORDS)), False),
        ("x.tar", holding(gzip.compress(RECORDS)), False),
        ("x.arrow", lambda path: parquet(path, {"text": ["one"]}), False),
        ("x.jsonl", holding(RECORDS.decode().encode("utf-16")), False),
        ("x.jsonl", holding(b'[{"text": "one"},\n {"text": "two"}]'), False),
        ("x.jsonl", holding(RECORDS + RECORDS[:-1] + bytes(99)), True),
        ("x.jsonl", holding(b'{\n "text": "one"\n}\n'), False),
        ("x.npy", lambda path: np.save(path, np.array([{}]), allow_pickle=True), False),
        ("x.jsonl.gz", holding(b"<!DOCTYPE html>"), True),
        ("x.jsonl.gz", holding(RECORDS), False),
        ("x.jsonl.gz", holding(gzip.compress(gzip.compress(RECORDS))), False),
        ("x.jsonl.gz", holding(bz2.compress(RECORDS)), False),
        ("x.jsonl", holding(b"SQLite format 3\0" + bytes(range(256))), False),
        ("x.jsonl", holding(RECORDS.decode().encode("utf-16-le")), False),
        ("x.jsonl", holding(2 * RECORDS.replace(b"\n", b"\r")), False),
        ("x.jsonl.gz", holding(gzip.compress(2 * RECORDS.replace(b"\n", b"\r"))), False),
        ("x.txt", holding(b"%PDF-1.4\n1 0 obj"), False),
        ("x.txt", holding(b"{\\rtf1\\ansi some text}"), False),
        ("x.text", holding(b"%!PS-Adobe-3.0\n(some text) show"), False),
        ("x.warc.wet.gz", holding(gzip.compress(b"WARC/1.0\r\nWARC-Type: conversion")), False),
        ("x.xml", holding(b"\xef\xbb\xbf<mediawiki xmlns=''><page>"), False),
        ("x.idx", holding(b"MMIDIDX\0\0" + bytes(40)), False),
        ("x.parquet", two_columns, False),
        ("x.jsonl.zst", with_dictionary, False),
        ("x.jsonl", lambda path: path.write_text('{"text": "one"}\n{"text": "tw'), True),
        ("x.jsonl.gz", lambda p: p.write_bytes(gzip.compress(b'{"text": "a"}\n{"te')), True),
        ("x.npy", lambda path: np.save(path, np.ones((2, 3), int)), False),
        ("x.npy", lambda path: np.save(path, np.ones(3)), False),
        ("x.arrow", lambda path: path.write_bytes(b"ARROW1\0\0" + bytes(40)), True),
    ],
)
def test_damaged_and_not_read_here_are_two_advices(folder, name, write, is_damaged):
    write(folder / name)
    settings = {"format": "array", "tokenizer": TOKENS} if name.endswith("npy") else {}
    with pytest.raises(UserError) as error:
        build(folder, **settings)
    assert str(folder / name) in str(error.value)
    assert ("fetch it again" in str(error.value)) == is_damaged
