from __future__ import annotations

import json
from dataclasses import replace

import pytest

from data_pipeline.corpora.manifest import MANIFEST_NAME, Manifest, ShardInfo, read_manifest
from data_pipeline.errors import DataError

SHARDS = (
    ShardInfo("a.mds", 3, 30, 15, 99, "0a", 120, 110),
    ShardInfo("b.mds", 2, 12, 11, 55, "0b", 40, 40),
)
MANIFEST = Manifest(dtype="uint16", tokenizer="f00", end_id=1, vocab_size=300, shards=SHARDS)


def test_it_reads_back_what_was_written_and_sums_its_shards(tmp_path):
    MANIFEST.write(tmp_path)
    assert read_manifest(tmp_path) == MANIFEST
    assert (MANIFEST.documents, MANIFEST.tokens, MANIFEST.text_bytes, MANIFEST.characters) == (
        5,
        42,
        160,
        150,
    )
    assert MANIFEST.longest_document == 15


@pytest.mark.parametrize(
    "other",
    [
        replace(MANIFEST, shards=SHARDS[::-1]),
        replace(MANIFEST, tokenizer="f01"),
        replace(MANIFEST, shards=(replace(SHARDS[0], sha256="0c"), SHARDS[1])),
    ],
)
def test_its_hash_changes_with_order_tokenizer_and_content(other):
    assert other.hash != MANIFEST.hash


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tree: tree["shards"][0].update(tokens=31), "was changed after it was written"),
        (lambda tree: tree["shards"][0].pop("tokens"), "is corrupted"),
        (lambda tree: tree.pop("dtype"), "is corrupted"),
        (lambda tree: tree.update(format=2), "has format 2, this version reads format 1"),
    ],
)
def test_an_edited_manifest_is_rejected(tmp_path, edit, message):
    MANIFEST.write(tmp_path)
    tree = json.loads((tmp_path / MANIFEST_NAME).read_text())
    edit(tree)
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(tree))
    with pytest.raises(DataError, match=message):
        read_manifest(tmp_path)


def test_a_truncated_or_missing_manifest_is_an_error_with_advice(tmp_path):
    with pytest.raises(
        DataError, match=r"has no manifest.json.*run `data-pipeline build` to its end"
    ):
        read_manifest(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        read_manifest(tmp_path / "nowhere")
    (tmp_path / "train").mkdir()
    MANIFEST.write(tmp_path / "train")
    with pytest.raises(DataError, match="holds the splits train; give one of them"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST_NAME).write_text('{"format": 1, "sha')
    with pytest.raises(DataError, match="is corrupted"):
        read_manifest(tmp_path)
