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
    assert sum(map(len, documents.values())) > texts.MIN_BYTES
    assert documents["textwrap.py"].startswith('"""Text wrapping')
    assert max(map(len, documents.values())) <= texts.MAX_CHARACTERS


def test_long_documents_are_read_in_parts_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "MAX_CHARACTERS", 60)
    text = "".join(f"paragraph {number}\nof two lines\n\n" for number in range(20))
    (tmp_path / "book.txt").write_text(text)
    parts = list(texts.documents_of_folder(tmp_path, tmp_path / "demo"))
    assert "".join(part for _, part in parts) == text
    assert len({name for name, _ in parts}) == len(parts) > 5
    assert all(len(part) <= 60 for _, part in parts)


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
    found = texts.documents_of_folder(tmp_path, output=tmp_path / "demo")
    assert sorted(text for _, text in found) == ["first", "second", "third"]


def test_too_little_text_is_rejected_with_how_much_is_needed(tmp_path):
    with pytest.raises(DataError, match=r"found 0\.00 MB of text in 1 documents of notes.* 2 MB"):
        texts.write_jsonl(tmp_path / "documents.jsonl", [("a", "x" * 1000)], "notes")


def test_more_text_than_the_demo_can_read_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "MIN_BYTES", 0)
    monkeypatch.setattr(texts, "MAX_BYTES", 2500)
    documents = ((str(number), "x" * 1000) for number in range(10))
    summary = texts.write_jsonl(tmp_path / "documents.jsonl", documents, "notes")
    assert summary == "2 documents, 0.0 MB, from notes"
    assert len((tmp_path / "documents.jsonl").read_text().splitlines()) == 2


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(DataError, match="no_such is not a folder"):
        list(texts.documents_of_folder(tmp_path / "no_such", tmp_path / "demo"))
