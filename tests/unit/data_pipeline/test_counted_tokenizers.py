"""Words and characters, whose vocabulary is counted; compared with the rules of the original."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.builder.build_tokenizer import given_tokenizer, make_tokenizer
from data_pipeline.config import TokenizerConfig
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.tokenizer import Tokenizer
from foundation.errors import ConfigError, DataError
from tests.helpers.corpora import config_of, some_texts, stored

WORDS = TokenizerConfig(kind="words", vocab_size=10_000)
CHARACTERS = TokenizerConfig(kind="characters")
LINES = " = Title = \n\n the  cat sat .\n the dog sat .\n the cat ran .\n"


def test_words_have_the_ids_of_the_original_by_count_and_then_by_place():
    tokenizer = make_tokenizer(WORDS, [LINES])
    expected = ["<eos>"]
    expected += [word for word, _ in Counter(LINES.split()).most_common()]
    assert tokenizer.model.decode().split("\n") == expected
    ids = {word: number for number, word in enumerate(expected)}
    stream = [*tokenizer.encode(LINES).tolist(), tokenizer.end_id]
    assert stream == [
        ids[symbol] for line in LINES.splitlines() for symbol in [*line.split(), "<eos>"]
    ], "one <eos> per line, and the last of them ends the document"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.sampled_from(["the", "cat", "sat", "."]), max_size=4), min_size=1))
def test_words_come_back_with_one_space_between_them(lines):
    tokenizer = make_tokenizer(WORDS, [LINES])
    text = "\n".join("  ".join(line) for line in lines)
    assert tokenizer.decode(tokenizer.encode(text)) == tokenizer.normalized(text)
    assert tokenizer.normalized(text).split() == text.split()


def test_a_word_outside_of_the_vocabulary_is_unknown_or_an_error():
    few = make_tokenizer(TokenizerConfig(kind="words", vocab_size=300), [f"{LINES} {range(9)}"])
    with pytest.raises(DataError, match="the word 'bird' is not in the vocabulary"):
        few.encode("the bird")
    counts = {f"w{number}": 400 - number for number in range(400)}
    text = " ".join(word for word, count in counts.items() for _ in range(count))
    small = make_tokenizer(TokenizerConfig(kind="words", vocab_size=300), [text])
    assert small.vocab_size == 300
    assert small.decode(small.encode("w0 w1\nw2 w399 w3")) == "w0 w1\nw2 <unk> w3"


def test_a_vocabulary_file_gives_the_ids_of_its_lines_also_with_counts(tmp_path):
    path = tmp_path / "1b_word_vocab.txt"
    path.write_text("<S> 30301028\n<UNK> 7\nthe 20\ncat 3\nthe 1\n")
    lm1b = given_tokenizer(path, TokenizerConfig(kind="words", end_token="<S>"))
    assert lm1b.encode("the cat bird").tolist() == [2, 3, 1]
    assert (lm1b.end_id, lm1b.vocab_size) == (0, 4)
    without = given_tokenizer(path, WORDS)
    assert (without.end_id, without.vocab_size) == (0, 5), "the end is the first, as in wt103"
    lm1b.save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").fingerprint == lm1b.fingerprint


def test_characters_are_the_bytes_that_occur_and_a_space_ends_a_document():
    text = "one caf\u00e9 two"
    tokenizer = make_tokenizer(CHARACTERS, [text])
    assert tokenizer.vocab_size == len(set(text.encode()))
    assert [*tokenizer.encode("one"), tokenizer.end_id] == tokenizer.encode("one ").tolist()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(DataError, match=f"byte {ord('x')} of a text is not in the vocabulary"):
        tokenizer.encode("x")


@pytest.mark.parametrize("config", [WORDS, CHARACTERS], ids=lambda config: config.kind)
def test_sizes_of_a_corpus_are_those_of_its_tokens(config, tmp_path):
    texts = [" ".join(text.split()) for text in some_texts(20)]
    settings = config_of(tmp_path, texts, tokenizer=config, validation_fraction=0)
    build_corpus(settings)
    corpus = Corpus.open(tmp_path / "out" / "train")
    bytes_V, characters_V = Tokenizer.load(corpus.tokenizer_directory).text_sizes()
    ids = [tokens for _, tokens in stored(corpus.directory)]
    assert sum(bytes_V[each].sum() for each in ids) == corpus.num_bytes
    assert sum(characters_V[each].sum() for each in ids) == corpus.num_characters
    assert corpus.num_bytes == sum(len(text) + 1 for text in texts)


def test_an_unknown_tokenizer_writes_ids():
    config = TokenizerConfig(kind="unknown", vocab_size=500, end_id=499)
    tokenizer = make_tokenizer(config, [])
    assert tokenizer.encode(" 7 12\n498 ").tolist() == [7, 12, 498]
    assert tokenizer.decode([7, 12, 499]) == "7 12 "
    for text in ("word", "500", "-1", "1" * 5000):
        with pytest.raises(DataError, match="expected ids below 500"):
            tokenizer.encode(text)
    with pytest.raises(DataError, match="contains token 499, which ends documents"):
        tokenizer.encode("499")
    with pytest.raises(ConfigError, match=r"needs tokenizer\.end_id"):
        make_tokenizer(TokenizerConfig(kind="unknown"), [])
