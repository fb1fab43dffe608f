from __future__ import annotations

import gzip
import json

import pytest

from data_pipeline.errors import DataError
from pretrain.demo import texts


def test_the_standard_library_is_text_enough_without_its_tests():
    documents = dict(texts.standard_library())
    assert "textwrap.py" in documents
    assert "json/decoder.py" in documents
    assert not any(
        name.startswith(("test/", "site-packages/")) or "/tests/" in name for name in documents
    )
    assert sum(map(len, documents.values())) > texts.FEWEST_BYTES
    assert documents["textwrap.py"].startswith('"""Text wrapping')
    assert max(map(len, documents.values())) <= texts.LONGEST_CHARACTERS


def test_long_documents_are_cut_at_paragraphs_and_nothing_is_lost(monkeypatch):
    monkeypatch.setattr(texts, "LONGEST_CHARACTERS", 60)
    text = "".join(f"paragraph {number}\nof two lines\n\n" for number in range(20))
    parts = list(texts.in_parts("book", text))
    assert "".join(part for _, part in parts) == text
    assert len(parts) > 5
    assert all(len(part) <= 60 for _, part in parts)
    assert all(part.endswith("\n\n") for _, part in parts)
    assert len({name for name, _ in parts}) == len(parts)
    assert list(texts.in_parts("note", "short")) == [("note", "short")]
    assert "".join(part for _, part in texts.in_parts("wall", "x" * 173)) == "x" * 173


def test_a_users_folder_may_mix_text_and_compressed_jsonl(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "one.txt").write_text("first")
    with gzip.open(tmp_path / "more.jsonl.gz", "wt") as file:
        file.write(
            json.dumps({"id": "a", "text": "second"})
            + "\n"
            + json.dumps({"id": "b", "text": "third"})
            + "\n"
        )
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "report.txt").write_text("the demo's own")
    found = texts.folder_of_text(tmp_path, output=tmp_path / "demo")
    assert sorted(text for _, text in found) == ["first", "second", "third"]


def test_too_little_text_is_refused_with_how_much_is_needed(tmp_path):
    written = texts.write_jsonl(tmp_path / "documents.jsonl", [("a", "x" * 1000)])
    assert written == {"documents": 1, "bytes": 1000}
    with pytest.raises(DataError, match=r"--corpus notes holds 0\.00 MB .* needs 2 MB"):
        texts.refuse_too_little(written, "--corpus notes")


def test_more_text_than_the_demo_can_read_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "MOST_BYTES", 2500)
    written = texts.write_jsonl(
        tmp_path / "documents.jsonl", ((str(n), "x" * 1000) for n in range(10))
    )
    assert written == {"documents": 2, "bytes": 2000}


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(DataError, match="no_such is no folder"):
        list(texts.folder_of_text(tmp_path / "no_such", tmp_path / "demo"))
