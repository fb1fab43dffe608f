from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.builder.records import split_text
from data_pipeline.cli import main
from foundation.errors import ConfigError
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


def test_only_the_first_of_equal_texts_is_kept_in_whichever_split_it_is(tmp_path):
    texts = some_texts(40)
    result = build_corpus(config_of(tmp_path, texts + texts[:10] + texts[:1], drop_duplicates=True))
    found = documents_of(tmp_path / "out/train") | documents_of(tmp_path / "out/validation")
    assert found == {f"d{number}": text for number, text in enumerate(texts)}
    assert result.duplicates == 11
    assert json.loads((tmp_path / "out/build.json").read_bytes())["counts"]["duplicates"] == 11


def test_long_documents_become_numbered_parts_in_one_split_and_are_counted(tmp_path, capsys):
    texts = some_texts(40)
    result = build_corpus(config_of(tmp_path, texts, split_characters=150))
    assert result.split_documents == sum(len(text) > 150 for text in texts) > 0
    splits = [documents_of(tmp_path / "out" / split) for split in ("train", "validation")]
    for number, text in enumerate(texts):
        names = (
            [f"d{number}#{part}" for part in range(1, 100)] if len(text) > 150 else [f"d{number}"]
        )
        assert sorted("".join(split.get(name, "") for name in names) for split in splits) == [
            "",
            text,
        ]
    folders = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "two")]
    assert main(["build", *folders, "--tokenizer", "bytes", "--split-characters", "150"]) == 0
    assert "long documents were cut" in capsys.readouterr().out


def test_the_same_command_after_a_finished_build_reports_the_same_counts(tmp_path):
    config = config_of(tmp_path, some_texts(20) * 2, drop_duplicates=True, split_characters=100)
    first, second = build_corpus(config), build_corpus(config)
    assert second.was_finished
    assert (first.duplicates, first.split_documents) == (second.duplicates, second.split_documents)


def test_a_negative_limit_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="split_characters=-1"):
        config_of(tmp_path, ["text"], split_characters=-1)


def test_carriage_returns_are_kept_and_on_demand_made_newlines(tmp_path):
    texts = ["one\r\ntwo\r\n", "one\rtwo", "a\r\nb\rc", "plain\n", *some_texts(20)]
    config = config_of(tmp_path, texts, validation_fraction=0.0)
    flags = ["--input", str(config.input[0]), "--tokenizer=bytes", "--validation-fraction=0"]
    assert main(["build", *flags, "--output", str(tmp_path / "kept")]) == 0
    kept = documents_of(tmp_path / "kept" / "train")
    assert [kept[f"d{number}"] for number in range(24)] == texts
    arguments = [*flags, "--output", str(tmp_path / "made"), "--newlines=normalize"]
    assert main(["build", *arguments]) == 0
    made = documents_of(tmp_path / "made" / "train")
    assert [made[f"d{number}"] for number in range(3)] == ["one\ntwo\n", "one\ntwo", "a\nb\nc"]
    assert made["d4"] == kept["d4"]
