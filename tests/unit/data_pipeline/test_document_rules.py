from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.builder.records import split_text
from data_pipeline.cli import main
from tests.helpers.corpora import config_of, documents_of, some_texts


@given(text=st.text(alphabet="ab \n", min_size=1, max_size=200), limit=st.integers(1, 40))
def test_parts_join_to_the_text_and_none_is_empty_or_too_long(text, limit):
    parts = list(split_text(text, limit))
    assert "".join(parts) == text
    assert all(0 < len(part) <= limit for part in parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "one two\n\nthree\nfour",
            ["one two\n\n", "three\nfour"],
        ),  # a paragraph before a later line
        ("one two\nthree four", ["one two\n", "three four"]),
        ("one two threes", ["one two ", "threes"]),
        ("onetwothreefour", ["onetwothreefo", "ur"]),
    ],
)
def test_a_text_is_cut_after_a_paragraph_else_a_line_else_a_word(text, parts):
    assert list(split_text(text, 13)) == parts


def test_long_documents_become_numbered_parts_in_one_split(tmp_path):
    texts = some_texts(40)
    build_corpus(config_of(tmp_path, texts, split_characters=150))
    splits = [documents_of(tmp_path / "out" / split) for split in ("train", "validation")]
    for number, text in enumerate(texts):
        names = (
            [f"d{number}#{part}" for part in range(1, 100)] if len(text) > 150 else [f"d{number}"]
        )
        assert names[0] in splits[0] or names[0] in splits[1]
        found = ("".join(split.get(name, "") for name in names) for split in splits)
        assert sorted(found) == ["", text]


def test_carriage_returns_are_kept_and_on_demand_made_newlines(tmp_path):
    texts = ["one\r\ntwo\r\n", "one\rtwo", "a\r\nb\rc", "plain\n", *some_texts(20)]
    config = config_of(tmp_path, texts, validation_fraction=0.0)
    flags = ["--input", str(config.input[0]), "tokenizer.kind=bytes", "validation_fraction=0"]
    assert main(["build", *flags, "--output", str(tmp_path / "kept")]) == 0
    kept = documents_of(tmp_path / "kept" / "train")
    assert [kept[f"d{number}"] for number in range(24)] == texts
    arguments = [*flags, "--output", str(tmp_path / "made"), "newlines=normalize"]
    assert main(["build", *arguments]) == 0
    made = documents_of(tmp_path / "made" / "train")
    assert [made[f"d{number}"] for number in range(3)] == ["one\ntwo\n", "one\ntwo", "a\nb\nc"]
    assert made["d4"] == kept["d4"]
