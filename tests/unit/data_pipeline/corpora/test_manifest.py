import json
import os
from dataclasses import replace

import pytest

from data_pipeline.corpora.manifest import MANIFEST_NAME, Manifest, ShardInfo, read_manifest
from foundation import files
from foundation.errors import DataError

SHARDS = (
    ShardInfo("a.mds", 3, 30, 15, 99, "a" * 64, 120, 110, "c" * 64),
    ShardInfo("b.mds", 2, 12, 11, 55, "b" * 64, 40, 40, "d" * 64),
)
MANIFEST = Manifest(dtype="uint16", tokenizer="e" * 64, end_id=1, vocab_size=300, shards=SHARDS)


def test_it_reads_back_what_was_written_and_sums_its_shards(tmp_path):
    MANIFEST.write(tmp_path)
    read = read_manifest(tmp_path)
    assert read == MANIFEST
    assert (read.documents, read.tokens, read.text_bytes, read.characters) == (5, 42, 160, 150)
    assert read.longest_whole == 15


def test_a_process_parses_a_manifest_once_until_it_changes(tmp_path, monkeypatch):
    MANIFEST.write(tmp_path)
    monkeypatch.setattr(files, "SETTLED_NS", 0)
    first = read_manifest(tmp_path)
    assert read_manifest(tmp_path) is first
    replace(MANIFEST, end_id=2).write(tmp_path)
    assert read_manifest(tmp_path).end_id == 2
    monkeypatch.setattr(files, "SETTLED_NS", 1 << 62)
    assert read_manifest(tmp_path) is not read_manifest(tmp_path)


def test_a_manifest_too_large_for_memory_is_refused_by_its_size(tmp_path):
    with open(tmp_path / MANIFEST_NAME, "wb") as file:
        file.truncate((1 << 26) + 1)  # a hole: it takes no space
    with pytest.raises(DataError, match="67,108,865"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "other",
    [
        replace(MANIFEST, shards=SHARDS[::-1]),
        replace(MANIFEST, tokenizer="f" * 64),
        replace(MANIFEST, shards=(replace(SHARDS[0], sha256="c" * 64), SHARDS[1])),
        replace(MANIFEST, shards=(replace(SHARDS[0], lengths="e" * 64), SHARDS[1])),
    ],
)
def test_its_hash_changes_with_order_tokenizer_and_content(other):
    assert other.hash != MANIFEST.hash


@pytest.mark.parametrize(
    "edit",
    [
        lambda tree: tree["shards"][0].update(tokens=31),
        lambda tree: tree["shards"][0].pop("tokens"),
        lambda tree: tree.pop("dtype"),
        lambda tree: tree["shards"][0].update(sha256="a.1/../x"),
        lambda tree: tree["shards"][1].update(path="../../etc/x"),
        lambda tree: tree["shards"][1].update(path="a\nb"),
        lambda tree: tree["shards"][0].update(size=-1),
        lambda tree: tree["shards"][0].update(size=1 << 60),
        lambda tree: tree["shards"][0].update(tokens=30.0),
        lambda tree: tree["shards"][0].update(documents=True),
        lambda tree: tree["shards"][0].update(rank=1),
        lambda tree: tree.update(shards={}),
        lambda tree: tree.update(shards=[3]),
        *(
            lambda tree, name=name: tree["shards"][0].update(path=name)
            for name in ("a\u202esdm.b", "\ud800.mds", "a\u2028b", "a\x85b", "..", "a/b", ".a", "")
        ),
        lambda tree: tree.update(dtype="object"),
        lambda tree: tree.update(vocab_size=70000),
        lambda tree: tree.update(end_id=300),
        lambda tree: tree.update(tokenizer=None),
        lambda tree: tree.update(format=4),
        lambda tree: tree.update(format=True),
        lambda tree: tree["shards"][0].update(lengths="c"),
        lambda tree: tree["shards"][0].update(lengths="e" * 64),
    ],
)
def test_an_edited_manifest_is_rejected(tmp_path, edit):
    MANIFEST.write(tmp_path)
    tree = json.loads((tmp_path / MANIFEST_NAME).read_text())
    edit(tree)
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(tree))
    with pytest.raises(DataError):
        read_manifest(tmp_path)


def test_a_missing_manifest_names_what_to_give_instead(tmp_path):
    for directory in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError, match=str(directory)):
            read_manifest(directory)
    (tmp_path / "train").mkdir()
    MANIFEST.write(tmp_path / "train")
    with pytest.raises(DataError, match="train"):
        read_manifest(tmp_path)
    with pytest.raises(DataError, match=f"{tmp_path}$"):
        read_manifest(tmp_path / "train" / "validation")


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, '{"format": ' + "9" * 5000 + "}", "[]", "NaN", '{"format": 1, "sha', None],
)
def test_what_is_not_a_file_of_one_object_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / MANIFEST_NAME
    os.mkfifo(path) if text is None else path.write_text(text)
    with pytest.raises(DataError, match=r"manifest\.json") as error:
        read_manifest(tmp_path)
    assert len(str(error.value)) < 400
