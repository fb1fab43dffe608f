"""The paper's data sets, built by their files in configs/data from stand-ins in the same layout.

What the original makes of a file is computed here from its rules: words and line ends in order.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from data_pipeline.cli import main
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.manifest import Manifest
from data_pipeline.tokenizer import Tokenizer
from tests.helpers.corpora import make_text

CONFIGS = Path(__file__).parents[3] / "configs" / "data"


def build(tmp_path: Path, name: str, *arguments: object) -> Path:
    flags = ["build", CONFIGS / f"{name}.yaml", "threads=1", "shard_bytes=2000", *arguments]
    assert main([str(each) for each in [*flags, "--output", tmp_path / "out"]]) == 0
    return tmp_path / "out"


def stream_of(corpus: Path, split: str) -> tuple[list[int], Manifest]:
    """All tokens of a split in the order of storage."""
    opened = Corpus.open(corpus / split)
    shards = [opened.shard(number) for number in range(len(opened.manifest.shards))]
    tokens = [
        token
        for shard in shards
        for document in range(len(shard))
        for token in shard.tokens(document).tolist()
    ]
    return tokens, opened.manifest


def wikitext(articles: int, seed: int) -> str:
    """Articles as in wiki.*.tokens: blank lines, spaces at both ends of each line, sections."""
    generator, lines = random.Random(seed), [" "]
    for number in range(articles):
        lines += [f" = Article {number} of {seed} = ", " ", f" {make_text(generator, 4)} "]
        lines += [" = = A section = = ", " ", f" 1 = 2 <unk> {make_text(generator, 3)} ", " "]
    return "".join(f"{line}\n" for line in "\n".join(lines).split("\n"))


def test_wt103_has_the_words_and_line_ends_of_the_original_in_order(tmp_path):
    train, valid = wikitext(30, 1), wikitext(4, 2)
    (tmp_path / "wiki.train.tokens").write_text(train + " Article 2 4\n")
    (tmp_path / "wiki.valid.tokens").write_text(valid)
    corpus = build(
        tmp_path,
        "wt103",
        *("--input", tmp_path / "wiki.train.tokens"),
        *("--validation-input", tmp_path / "wiki.valid.tokens"),
    )
    train += " Article 2 4\n"
    words = ["<eos>", *(word for word, _ in Counter(train.split()).most_common())]
    ids = {word: number for number, word in enumerate(words)}
    for text, split, articles in ((train, "train", 30), (valid, "validation", 4)):
        expected = [
            ids.get(word, ids["<unk>"])
            for line in text.splitlines()
            for word in [*line.split(), "<eos>"]
        ]
        tokens, manifest = stream_of(corpus, split)
        assert tokens == expected
        assert (manifest.documents, manifest.vocab_size) == (articles, len(words))


def test_lm1b_has_one_sentence_per_document_between_ends_and_words_of_its_vocabulary(tmp_path):
    (tmp_path / "training").mkdir()
    sentences = ["The cat sat .", "A dog barked at it .", "Nobody knew why ."]
    for number, sentence in enumerate(sentences, 1):
        (tmp_path / "training" / f"news.en-{number:05}-of-00100").write_text(f"{sentence}\n" * 2)
    (tmp_path / "heldout").write_text("The dog knew Bob .\n")
    words = ["</S>", "<S>", "<UNK>", *dict.fromkeys(" ".join(sentences).split())]
    (tmp_path / "1b_word_vocab.txt").write_text("".join(f"{word}\n" for word in words))
    corpus = build(
        tmp_path,
        "lm1b",
        f"tokenizer.path={tmp_path / '1b_word_vocab.txt'}",
        *("--input", tmp_path / "training", "--validation-input", tmp_path / "heldout"),
    )
    ids = {word: number for number, word in enumerate(words)}
    lines = [sentence for sentence in sentences for _ in range(2)]
    expected = [ids[word] for line in lines for word in [*line.split(), "<S>"]]
    assert stream_of(corpus, "train")[0] == expected
    held_out = ["The", "dog", "knew", "<UNK>", ".", "<S>"]
    tokens, manifest = stream_of(corpus, "validation")
    assert tokens == [ids[word] for word in held_out]
    assert manifest.documents == 1


@pytest.mark.parametrize("name", ["enwik8", "text8"])
def test_characters_are_those_of_the_original_in_order_and_each_is_a_token(tmp_path, name):
    generator = random.Random(0)
    text = " ".join(make_text(generator, 9) for _ in range(900))
    if name == "text8":
        text = " " + "".join(each for each in text.lower() if each.isalpha() or each == " ")
    else:
        text = text.replace("a grey", "\u00e9 \u6f22\u5b57\n")
    content = text.encode()
    (tmp_path / name).write_bytes(content)
    held_out = ("validation_bytes=5003", "test_bytes=4001")
    corpus = build(tmp_path, name, *held_out, "--input", tmp_path / name)
    vocabulary = Tokenizer.load(corpus / "tokenizer").model
    assert set(vocabulary) == set(content.replace(b"\n", b""))
    splits = {"train": content[: -5003 - 4001], "validation": content[-5003 - 4001 : -4001]}
    for split, part in splits.items():
        tokens, manifest = stream_of(corpus, split)
        symbols = bytes(vocabulary[token] for token in tokens)
        expected = part.decode(errors="ignore").strip(" ").replace("\n", "").encode()
        assert symbols == expected + b" ", "as in the file, and the end of the last document"
        assert manifest.text_bytes == manifest.tokens, "bits per byte are bits per symbol"
        assert (manifest.documents > 1) == (split == "train")


def test_held_out_bytes_are_of_streams_that_have_enough(tmp_path, capsys):
    (tmp_path / "x").write_text("a b c " * 9)
    build = ["build", f"output={tmp_path / 'out'}", "tokenizer.kind=characters"]
    for settings, message in (
        (("format=stream", "test_bytes=60"), "has 54 bytes, expected an unpacked file with more"),
        (("format=text", "test_bytes=6"), "need format=stream"),
    ):
        assert main([*build, *settings, "--input", str(tmp_path / "x")]) == 2
        assert message in capsys.readouterr().err
