from __future__ import annotations

from pathlib import Path

import pytest

from data_pipeline.cli import main
from tests.helpers.corpora import some_texts, users_model, write_jsonl


@pytest.mark.parametrize("kind", ["users", "bytes", "unigram"])
def test_a_build_says_which_characters_a_tokenizer_loses(tmp_path: Path, capsys, kind):
    tokenizer = kind
    if kind == "users":  # without newlines, accents, or bytes for them
        model = users_model([text.replace("\n", " ") for text in some_texts(60)])
        (tmp_path / "m.model").write_bytes(model)
        tokenizer = str(tmp_path / "m.model")
    texts = [*some_texts(30), "caf\u00e9\n\u4e2d caf\u00e9\n"]
    source = write_jsonl(tmp_path / "in" / "1.jsonl", texts)
    settings = ["--input", str(source), "--output", str(tmp_path / "out"), "--tokenizer", tokenizer]
    assert main(["build", *settings, "--validation-fraction=0", "tokenizer.vocab_size=320"]) == 0
    said = capsys.readouterr().err
    assert ("the tokenizer alters texts" in said) == (kind == "users")
    assert (r"lost characters: '\n'" in said) == (kind == "users")
