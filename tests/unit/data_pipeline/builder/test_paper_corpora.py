"""The paper's data sets, built by their files in configs/data from stand-ins in the same layout.

What the original makes of a file is computed here from its rules: words and line ends in order.
"""

import gzip
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from data_pipeline.cli import main
from data_pipeline.corpora.manifest import SPLITS, Manifest, read_manifest
from data_pipeline.tokenizer import Tokenizer
from tests.helpers.corpora import make_text, stored

CONFIGS = Path(__file__).parents[4] / "configs" / "data"


def build(tmp_path: Path, name: str, *arguments: object) -> Path:
    flags = ["build", CONFIGS / f"{name}.yaml", "threads=1", "shard_bytes=2000", *arguments]
    assert main([str(each) for each in [*flags, "--output", tmp_path / "out"]]) == 0
    return tmp_path / "out"


def stream_of(corpus: Path, split: str) -> tuple[list[int], Manifest]:
    """All tokens of a split in the order of storage."""
    tokens = [token for _, tokens in stored(corpus / split) for token in tokens]
    return tokens, read_manifest(corpus / split)


def wikitext(articles: int, seed: int) -> str:
    """Articles as in wiki.*.tokens: blank lines, spaces at both ends of each line, sections."""
    generator, lines = random.Random(seed), [" "]
    for number in range(articles):
        lines += [f" = Article {number} of {seed} = ", " ", f" {make_text(generator, 4)} "]
        lines += [" = = A section = = ", " ", f" 1 = 2 <unk> {make_text(generator, 3)} ", " "]
    return "".join(f"{line}\n" for line in "\n".join(lines).split("\n"))


def test_wt103_has_the_words_and_line_ends_of_the_original_in_order(tmp_path):
    train, valid = wikitext(30, 1), wikitext(4, 2)
    train += " Article 2 4\n"
    source, held_out = tmp_path / "wiki.train.tokens", tmp_path / "wiki.valid.tokens"
    source.write_text(train)
    held_out.write_text(valid)
    corpus = build(tmp_path, "wt103", "--input", source, f"validation_input={held_out}")
    words = ["<eos>", *(word for word, _ in Counter(train.split()).most_common())]
    ids = {word: number for number, word in enumerate(words)}
    for text, split, articles in ((train, "train", 30), (valid, "validation", 4)):
        found = (word for line in text.splitlines() for word in [*line.split(), "<eos>"])
        expected = [ids.get(word, ids["<unk>"]) for word in found]
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
    vocabulary = tmp_path / "1b_word_vocab.txt"
    vocabulary.write_text("".join(f"{word} 7\n" for word in words))
    more = (f"validation_input={tmp_path / 'heldout'}", f"tokenizer.path={vocabulary}")
    corpus = build(tmp_path, "lm1b", "--input", tmp_path / "training", *more)
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
    held_out = (f"validation_fraction={5003 / len(content)}", "test_bytes=4001")
    corpus = build(tmp_path, name, *held_out, "--input", tmp_path / name)
    vocabulary = Tokenizer.load(corpus / "tokenizer").model
    assert set(vocabulary) == set(content.replace(b"\n", b""))
    # A word that a cut would part belongs to what is before it.
    end = re.compile(b"[ \n]").search(content, len(content) - 4001 - 1).end()
    start = re.compile(b"[ \n]").search(content, end - 5003 - 1).end()
    for split, part in {"train": content[:start], "validation": content[start:end]}.items():
        tokens, manifest = stream_of(corpus, split)
        symbols = bytes(vocabulary[token] for token in tokens)
        assert symbols == part.replace(b"\n", b"") + b" ", "as in the file, and the end of it"
        assert manifest.text_bytes == manifest.tokens, "bits per byte are bits per symbol"
        assert (manifest.documents > 1) == (split == "train")


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_a_stream_is_the_text_in_its_order(tmp_path, kind):
    generator = random.Random(3)
    lines = [generator.choice(["ROMEO:", "", make_text(generator, 1)]) for _ in range(72_000)]
    text = "\n".join(lines)[:1_000_000]  # as tinyshakespeare: short lines, ten parts of a stream
    (tmp_path / "play.txt").write_text(text)
    settings = ("format=stream", "validation_fraction=0.1", f"tokenizer.kind={kind}", "threads=1")
    flags = ["build", *settings, "shard_bytes=100000", "tokenizer.vocab_size=100000"]
    corpus = tmp_path / "out"
    assert main([*flags, "--input", str(tmp_path / "play.txt"), "--output", str(corpus)]) == 0
    tokenizer = Tokenizer.load(corpus / "tokenizer")
    (tokens, manifest), (held_out, _) = (stream_of(corpus, split) for split in SPLITS)
    whole = [*tokens[:-1], *([tokenizer.end_id] if kind == "words" else []), *held_out[:-1]]
    assert whole == tokenizer.encode(text).tolist(), "nothing is lost or added, but two ends"
    assert len(held_out) == pytest.approx(len(tokens) / 9, rel=0.01)
    assert manifest.is_stream
    assert len(manifest.shards) > 2


def test_held_out_bytes_are_of_streams_that_have_enough(tmp_path, capsys):
    (tmp_path / "x").write_text("a b c " * 9)
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"d e f " * 9))
    build = ["build", f"output={tmp_path / 'out'}", "tokenizer.kind=characters"]
    for settings, culprit in (
        (("format=stream", "test_bytes=60"), "54"),
        (("format=stream", f"validation_input=[{tmp_path / 'x.gz'}]"), "x.gz"),
        (("format=text", "test_bytes=6"), "test_bytes"),
        (("format=stream", "shuffle_seed=1"), "shuffle_seed"),
        (("tokenizer.pattern=x",), "tokenizer.pattern"),
    ):
        assert main([*build, *settings, "--input", str(tmp_path / "x")]) == 2
        assert culprit in capsys.readouterr().err
