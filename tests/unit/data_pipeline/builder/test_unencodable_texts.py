"""Texts that a tokenizer of others has no ids for are rejects; the build goes on without them."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from data_pipeline.builder import split_writer
from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.config import CorpusConfig, TokenizerConfig
from data_pipeline.corpora.manifest import read_manifest
from data_pipeline.shards.shards import write_shard
from tests.helpers.corpora import documents_of, write_jsonl

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "strike")
TEXTS = [" ".join(WORDS[number % 9 : number % 9 + 3]) + f" {number}" for number in range(60)]
BAD = 41  # the line


def hugging_face(path: Path, model: models.Model) -> TokenizerConfig:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.save(str(path))
    return TokenizerConfig(path=path, end_token="</s>")


def unigram(path: Path) -> TokenizerConfig:
    pieces = [("<unk>", 0.0), ("</s>", -1.0), *((chr(code), -5.0) for code in range(33, 127))]
    return hugging_face(path, models.Unigram([*pieces, ("\u2581", -5.0)], 0, True))


def word_level(path: Path) -> TokenizerConfig:
    tokens = ["</s>", *(f"\u2581{word}" for text in TEXTS for word in text.split())]
    ids = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    return hugging_face(path, models.WordLevel(ids, unk_token="<none>"))


def sentence_piece(path: Path) -> TokenizerConfig:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(path), vocab_size=60, eos_id=-1,
        user_defined_symbols=["<|end|>"], minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    return TokenizerConfig(path=path.with_name(f"{path.name}.model"), end_token="<|end|>")


def tiktoken(path: Path) -> TokenizerConfig:
    import base64

    path = path.with_suffix(".tiktoken")
    lines = [b"%s %d\n" % (base64.b64encode(bytes([value])), value) for value in range(256)]
    path.write_bytes(b"".join(lines))
    return TokenizerConfig(
        path=path, pattern=r" ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
        special_tokens={"<|end|>": 256}, end_token="<|end|>",
    )  # fmt: skip


def killed_write(calls: Iterator[int], *arguments):
    if next(calls, None) is None:
        raise KeyboardInterrupt
    return write_shard(*arguments)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (unigram, "strike <s>out</s> of html"),
        (sentence_piece, "a text about <|end|>"),
        (word_level, "a word that is not in it"),
        (tiktoken, "a" + " " * 1_000_000 + "b"),
    ],
)
def test_a_text_without_ids_is_a_reject_also_where_the_build_was_killed(
    tmp_path, monkeypatch, make, text
):
    texts = [*TEXTS[: BAD - 1], text, *TEXTS[BAD - 1 :]]
    settings = make(tmp_path / "made.json")
    results = []
    for kills in (False, True):
        config = CorpusConfig(
            input=(write_jsonl(tmp_path / "a.jsonl", texts),), output=tmp_path / str(kills),
            tokenizer=settings, validation_fraction=0.0, threads=1, shard_bytes=90,
        )  # fmt: skip
        if kills:
            calls = iter(range(len(results[0]) - 2))
            monkeypatch.setattr(split_writer, "write_shard", partial(killed_write, calls))
            with pytest.raises(KeyboardInterrupt):
                build_corpus(config)
            monkeypatch.undo()
        build_corpus(config)
        rejects = (config.output / "rejects.jsonl").read_text().splitlines()
        assert [json.loads(line)["source"] for line in rejects] == [f"a.jsonl:{BAD}"]
        shards = read_manifest(config.output / "train").shards
        results.append([shard.sha256 for shard in shards])
    assert results[0] == results[1]
    assert len(documents_of(tmp_path / "True" / "train")) == len(TEXTS)


def test_dropout_of_a_tokenizer_is_switched_off(tmp_path):
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"])
    tokenizer.train_from_iterator(TEXTS, trainer)
    path, hashes = tmp_path / "made.json", []
    tokenizer.save(str(path))
    for dropout in (None, 0.3, 0.3):
        tree = json.loads(path.read_text())
        tree["model"]["dropout"] = dropout
        path.write_text(json.dumps(tree))
        config = CorpusConfig(
            input=(write_jsonl(tmp_path / "a.jsonl", TEXTS),), output=tmp_path / f"{len(hashes)}",
            tokenizer=TokenizerConfig(path=path, end_token="</s>"), validation_fraction=0.0,
        )  # fmt: skip
        build_corpus(config)
        hashes.append([shard.sha256 for shard in read_manifest(config.output / "train").shards])
    assert hashes[0] == hashes[1] == hashes[2]
