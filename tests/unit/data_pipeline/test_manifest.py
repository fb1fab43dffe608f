from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
    assert read_manifest(tmp_path) == MANIFEST
    assert (MANIFEST.documents, MANIFEST.tokens, MANIFEST.text_bytes, MANIFEST.characters) == (
        5,
        42,
        160,
        150,
    )
    assert MANIFEST.longest_whole == 15


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
    with pytest.raises(DataError, match=r"has 67,108,865 bytes, expected at most 67,108,864"):
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
    ("edit", "message"),
    [
        (lambda tree: tree["shards"][0].update(tokens=31), "was changed after it was written"),
        (lambda tree: tree["shards"][0].pop("tokens"), "is corrupted"),
        (lambda tree: tree.pop("dtype"), "is corrupted"),
        (lambda tree: tree["shards"][0].update(sha256="a.1/../x"), r"shards\[0\]\.sha256 is 'a\.1"),
        (lambda tree: tree["shards"][1].update(path="../../etc/x"), "expected a plain file name"),
        (lambda tree: tree["shards"][1].update(path="a\nb"), "expected a plain file name"),
        (lambda tree: tree["shards"][0].update(size=-1), "size is -1, expected an integer from 1"),
        (lambda tree: tree["shards"][0].update(size=1 << 60), "expected an integer from 1 to"),
        (lambda tree: tree["shards"][0].update(tokens=30.0), "tokens is 30.0, expected an integer"),
        (lambda tree: tree["shards"][0].update(documents=True), "documents is True, expected"),
        (lambda tree: tree["shards"][0].update(rank=1), r"'rank' is unknown"),
        (lambda tree: tree.update(shards={}), "shards is {}, expected a list"),
        (lambda tree: tree.update(shards=[3]), r"shards\[0\] is 3, expected an object"),
        *(
            (
                lambda tree, name=name: tree["shards"][0].update(path=name),
                r"shards\[0\]\.path is .*, expected a plain file name",
            )
            for name in ("a\u202esdm.b", "\ud800.mds", "a\u2028b", "a\x85b", "..", "a/b", ".a", "")
        ),
        (lambda tree: tree.update(dtype="object"), "expected uint16 or uint32"),
        (lambda tree: tree.update(vocab_size=70000), "vocab_size is 70000, expected an integer"),
        (lambda tree: tree.update(end_id=300), "end_id is 300, expected an integer from 0 to 299"),
        (lambda tree: tree.update(tokenizer=None), "expected 64 hexadecimal digits"),
        (lambda tree: tree.update(format=4), "has format 4, this version reads format 3"),
        (lambda tree: tree.update(format=True), "has format True, this version reads format"),
        (lambda tree: tree["shards"][0].update(lengths="c"), "expected 64 hexadecimal digits"),
        (lambda tree: tree["shards"][0].update(lengths="e" * 64), "was changed after it was wri"),
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
    expected = f"{tmp_path}/train is one split of a corpus; name the corpus, {tmp_path}"
    with pytest.raises(DataError, match=f"^{expected}$"):
        read_manifest(tmp_path / "train" / "validation")
    (tmp_path / MANIFEST_NAME).write_text('{"format": 1, "sha')
    with pytest.raises(DataError, match="is corrupted"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"format": ' + "9" * 5000 + "}", "[]", "NaN"])
def test_a_manifest_that_is_not_an_object_of_json_is_refused_in_one_line(tmp_path, text):
    (tmp_path / MANIFEST_NAME).write_text(text)
    with pytest.raises(DataError, match=r"manifest\.json (is corrupted|has format)") as error:
        read_manifest(tmp_path)
    assert len(str(error.value)) < 400


def test_a_pipe_in_place_of_a_manifest_is_refused(tmp_path):
    os.mkfifo(tmp_path / MANIFEST_NAME)
    with pytest.raises(DataError, match=r"is corrupted \(it is a pipe, socket or device"):
        read_manifest(tmp_path)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=70),
    lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(max_size=9), items),
    max_leaves=5,
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), value=ANY_JSON)
def test_any_change_of_a_manifest_is_refused_in_one_line_or_read_rightly(tmp_path, data, value):
    if not (tmp_path / "whole").exists():
        MANIFEST.write(tmp_path)
        (tmp_path / MANIFEST_NAME).rename(tmp_path / "whole")
    tree = json.loads((tmp_path / "whole").read_text())
    changed = data.draw(st.sampled_from([tree, tree["shards"], tree["shards"][1]]))
    keys = range(len(changed)) if isinstance(changed, list) else sorted(changed)
    changed[data.draw(st.sampled_from(list(keys)))] = value
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(tree))
    message = ""
    try:
        assert read_manifest(tmp_path) == MANIFEST
    except DataError as error:
        message = str(error)
    assert message.isprintable()
    assert len(message) < 400
