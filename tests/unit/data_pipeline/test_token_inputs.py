"""Data sets of others, text and tokens, written by the libraries that users write them with."""

from __future__ import annotations

import gzip
import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.builder.documents import read_documents
from data_pipeline.builder.sources import list_sources
from data_pipeline.config import CorpusConfig, TokenizerConfig
from data_pipeline.corpora.manifest import read_manifest
from data_pipeline.tokenizer import Tokenizer
from foundation.errors import ConfigError, DataError
from tests.helpers.corpora import documents_of, stored
from tests.helpers.token_files import DOCUMENTS, END, make_input, write_mds

UNKNOWN = TokenizerConfig(kind="unknown", vocab_size=END + 1, end_id=END)


KINDS = ("megatron", "nanoGPT", "numpy", "int32", "mds", "mds of bytes", "parquet", "arrow")


def config_for(folder: Path, **settings) -> CorpusConfig:
    settings = {"validation_fraction": 0.0, "threads": 1, "tokenizer": UNKNOWN, **settings}
    return CorpusConfig(input=(folder,), output=folder.with_name("out"), **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_become_a_corpus_as_they_are(tmp_path, kind):
    folder = tmp_path / "in"
    folder.mkdir()
    build_corpus(config_for(folder, **make_input(kind, folder)))
    tokens = [tokens for _, tokens in stored(tmp_path / "out" / "train")]
    assert tokens == [[*each, END] for each in DOCUMENTS]
    assert Tokenizer.load(tmp_path / "out" / "tokenizer").decode([5, END]) == "5 "


def test_tokens_of_a_named_tokenizer_have_sizes_and_a_text(tmp_path):
    (tmp_path / "in").mkdir()
    texts = ["one caf\u00e9", "two"]
    tokens = [token for text in texts for token in (*text.encode(), 300)]
    np.save(tmp_path / "in" / "x.npy", np.array(tokens))
    tokenizer = TokenizerConfig(kind="bytes", end_id=300)
    named = config_for(tmp_path / "in", format="array", tokenizer=tokenizer)
    build_corpus(named)
    assert sorted(documents_of(tmp_path / "out" / "train").values()) == texts
    manifest = read_manifest(tmp_path / "out" / "train")
    assert manifest.text_bytes == len("".join(texts).encode())
    assert manifest.characters == len("".join(texts))


def read_texts(folder: Path) -> list[str]:
    config = CorpusConfig(input=(folder,), output=folder / "unused")
    sources = list_sources(config.input, config)
    return [record.text for source in sources for record in read_documents(source, config)]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["save_to_disk", "splits", "parquet", "mds", "mds.zstd", "c4"])
def test_texts_of_data_sets_are_read(tmp_path, kind):
    import datasets

    texts = ["one", "two \u00e9", "three"]
    table = datasets.Dataset.from_dict({"text": texts, "n": [1, 2, 3]})
    if kind == "save_to_disk":
        table.save_to_disk(str(tmp_path), num_shards=2)
    elif kind == "splits":
        datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path))
    elif kind == "parquet":
        table.to_parquet(str(tmp_path / "train-00000-of-00001.parquet"))
    elif kind == "c4":
        lines = "".join(json.dumps({"text": text, "url": "u"}) + "\n" for text in texts)
        path = tmp_path / "c4-train.00000-of-01024.json.gz"
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        settings = {"compression": "zstd"} if kind == "mds.zstd" else {}
        write_mds(tmp_path, {"text": "str"}, [{"text": text} for text in texts], **settings)
    assert read_texts(tmp_path) == texts


def test_pickled_columns_are_refused_where_they_are_asked_for(tmp_path):
    write_mds(tmp_path, {"text": "str", "x": "pkl"}, [{"text": "one", "x": {"a": 1}}])
    assert read_texts(tmp_path) == ["one"], "elsewhere they are not looked at"
    config = CorpusConfig(input=(tmp_path,), output=tmp_path / "out", text_field="x")
    with pytest.raises(DataError, match="pickled values, which are never read"):
        list(read_documents(list_sources(config.input, config)[0], config))


@pytest.mark.parametrize(
    ("tokens", "kind", "message"),
    [
        ([4, END + 1], "unknown", r"x\.npy:1 has the id 321, the vocabulary 321 ids"),
        ([4, 256, 5], "bytes", r"contains 256, which ends documents; set tokenizer\.end_id"),
        ([4, -1, 5], "unknown", r"found the id -1"),
        ([4, 5], "unigram", r"no usable text.*tokenizer\.kind=unknown"),
    ],
)
def test_ids_that_the_vocabulary_does_not_explain_are_refused(tmp_path, tokens, kind, message):
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "x.npy", np.array(tokens))
    tokenizer = replace(UNKNOWN, kind=kind)
    with pytest.raises(DataError, match=message):
        build_corpus(config_for(tmp_path / "in", format="array", tokenizer=tokenizer))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "is missing, the index"),
        (lambda path: path.write_bytes(b"text"), "is not an index of Megatron"),
        (lambda path: path.write_bytes(path.read_bytes()[:-8]), "is not an index of Megatron"),
        (lambda path: _overwrite(path, 17, b"\x06"), "type 6"),
        (lambda path: _overwrite(path, 34, b"\xff\xff\xff\x7f"), "outside of it"),
        (lambda path: _overwrite(path, -8, b"\xff"), "documents are not in order"),
    ],
)
def test_a_wrong_index_is_refused_in_one_line(tmp_path, change, message):
    folder = tmp_path / "in"
    folder.mkdir()
    settings = make_input("megatron", folder)
    change(folder / "x.idx")
    with pytest.raises(DataError, match=message) as error:
        build_corpus(config_for(folder, **settings))
    assert "\n" not in str(error.value)


def _overwrite(path: Path, offset: int, content: bytes) -> None:
    whole = bytearray(path.read_bytes())
    offset %= len(whole)
    whole[offset : offset + len(content)] = content
    path.write_bytes(whole)


@pytest.mark.parametrize("column", ["input_ids", "text", "number"])
@pytest.mark.parametrize("offset", [12800, 2**30, -4])
def test_an_offset_that_leads_out_of_a_table_does_not_end_the_process(tmp_path, column, offset):
    import pyarrow

    (tmp_path / "in").mkdir()
    table = pyarrow.table(
        {"input_ids": [[77, 78, 79], [80], [81, 82]], "text": ["a", "bcde", "f"], "number": [1] * 3}
    )
    path = tmp_path / "in" / "x.arrow"
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    content = path.read_bytes()
    for valid in (struct.pack("<4i", 0, 3, 4, 6), struct.pack("<4i", 0, 1, 5, 6)):
        assert content.count(valid) == 1
        content = content.replace(valid, valid[:8] + struct.pack("<i", offset) + valid[12:])
    path.write_bytes(content)
    config = CorpusConfig(input=(tmp_path / "in",), output=tmp_path / "out", text_field=column)
    expected = r"holds int, expected text" if column == "number" else r"x\.arrow is corrupted"
    with pytest.raises(DataError, match=expected) as error:
        list(read_documents(list_sources(config.input, config)[0], config))
    assert "\n" not in str(error.value)


def test_an_array_of_objects_is_not_unpickled(tmp_path):
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "x.npy", np.array([{"a": 1}], dtype=object))
    with pytest.raises(DataError, match=r"x\.npy is corrupted"):
        build_corpus(config_for(tmp_path / "in", format="array"))
    with pytest.raises(ConfigError, match="token_dtype=float32, expected uint8"):
        config_for(tmp_path / "in", token_dtype="float32")


def test_an_archive_of_arrays_is_refused_under_the_name_of_an_array(tmp_path):
    (tmp_path / "in").mkdir()
    with (tmp_path / "in" / "x.npy").open("wb") as file:
        np.savez(file, np.array([1, 2]))
    with pytest.raises(DataError, match=r"x\.npy is corrupted"):
        build_corpus(config_for(tmp_path / "in", format="array"))
