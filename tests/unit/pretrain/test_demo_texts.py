from __future__ import annotations

import pytest

from benchmarks import texts
from foundation.errors import DataError


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


def test_too_little_text_is_rejected_with_how_much_is_needed(tmp_path):
    with pytest.raises(DataError, match=r"found 0\.00 MB of text in 1 documents .* 2 MB"):
        texts.write_jsonl(tmp_path / "documents.jsonl", [("a", "x" * 1000)])
