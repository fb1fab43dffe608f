from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from data_pipeline.builder.build_tokenizer import RoundTrip, joined_round_trips
from data_pipeline.cli import main
from data_pipeline.tokenizer import Tokenizer
from tests.helpers.corpora import some_texts, users_model, write_jsonl

TEXTS = [*some_texts(30), "caf\u00e9\n\u4e2d caf\u00e9\n"]


@pytest.fixture
def model(tmp_path) -> Path:
    """The model of a user: without newlines, accents, or bytes for them."""
    path = tmp_path / "m.model"
    path.write_bytes(users_model([text.replace("\n", " ") for text in some_texts(60)]))
    return path


def build(tmp_path: Path, name: str, *flags: str) -> dict:
    """The counts in the build's record."""
    for number in (1, 2):
        write_jsonl(tmp_path / "in" / f"{number}.jsonl", TEXTS)
    settings = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / name)]
    assert main(["build", *settings, "--validation-fraction=0", *flags]) == 0
    return json.loads((tmp_path / name / "build.json").read_bytes())["counts"]["round_trip"]


def test_a_build_says_which_characters_the_tokenizer_of_the_user_loses(tmp_path, model, capsys):
    counts = build(tmp_path, "out", "--tokenizer", str(model))
    assert counts["lost"]["\u00e9"] == 4
    assert counts["lost"]["\u4e2d"] == 2
    newlines = sum(Counter(text)["\n"] for text in TEXTS)
    assert counts["lost"]["\n"] >= newlines, "both files"
    said = capsys.readouterr()
    assert "the tokenizer altered" in said.err, "at once"
    assert f"altered {counts['altered']:,} of 62 sampled texts" in said.out
    assert r"'\n' (" in said.out


@pytest.mark.parametrize("kind", ["bytes", "unigram"])
def test_a_tokenizer_of_our_own_gives_every_sampled_text_back(tmp_path, capsys, kind):
    counts = build(tmp_path, "out", "--tokenizer", kind, "tokenizer.vocab_size=320")
    assert counts == {"sampled": 62, "altered": 0, "lost": {}}
    assert "altered" not in capsys.readouterr().out


def test_counts_of_parts_add_up():
    bytes_tokenizer = Tokenizer("bytes")
    one, two = RoundTrip(), RoundTrip(sampled=3, altered=2, lost={"a": 1, "b": 5})
    one.check("text", bytes_tokenizer)
    assert joined_round_trips([one, two, two]) == RoundTrip(7, 4, {"b": 10, "a": 2})
