"""A tokenizer of the same kind and size in place of a corpus' own."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_pipeline.builder.build_tokenizer import train_tokenizer
from data_pipeline.cli import main
from data_pipeline.corpora.corpus import Corpus, tokenizer_of
from data_pipeline.corpora.manifest import TOKENIZER_DIRECTORY, Manifest, ShardInfo
from data_pipeline.tokenizer import Tokenizer, read_fingerprint
from foundation import files
from foundation.errors import DataError
from tests.helpers.corpora import make_tiny_corpus, some_texts


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with the tokenizer of another one."""
    root = tmp_path_factory.mktemp("exchanged")
    corpus = make_tiny_corpus(root / "corpus", documents=30, vocabulary="unigram")
    own = tokenizer_of(corpus)
    other = train_tokenizer("unigram", own.vocab_size, some_texts(30, seed=1))
    assert other.vocab_size == own.vocab_size
    other.save(corpus / TOKENIZER_DIRECTORY)
    return corpus


@pytest.mark.parametrize("open_it", [lambda corpus: Corpus.open(corpus / "train"), tokenizer_of])
def test_an_exchanged_tokenizer_is_refused_with_both_files_and_fingerprints(exchanged, open_it):
    with pytest.raises(DataError) as raised:
        open_it(exchanged)
    reason = str(raised.value)
    assert f"tokenizer {exchanged / 'tokenizer'} has fingerprint" in reason
    assert f"{exchanged / 'train' / 'manifest.json'} expects" in reason
    assert "restore the tokenizer" in reason
    assert "\n" not in reason


def test_a_process_hashes_a_tokenizer_once_until_it_changes(tmp_path, monkeypatch):
    corpus = make_tiny_corpus(tmp_path / "corpus", documents=30, vocabulary="unigram")
    monkeypatch.setattr(files, "SETTLED_NS", 0)
    reads: list[Path] = []
    of = read_fingerprint
    monkeypatch.setattr(
        "data_pipeline.corpora.corpus.read_fingerprint",
        lambda path: (reads.append(path), of(path))[1],
    )
    for split in ("train", "validation") * 2:
        Corpus.open(corpus / split)
    assert len(reads) == 1
    train_tokenizer("unigram", 300, some_texts(30, seed=1)).save(corpus / TOKENIZER_DIRECTORY)
    with pytest.raises(DataError, match="has fingerprint"):
        Corpus.open(corpus / "train")
    assert len(reads) == 2


def test_a_manifest_with_more_tokens_than_its_tokenizer_is_refused(tmp_path):
    Tokenizer("bytes").save(tmp_path / "tokenizer")
    shard = ShardInfo("a.mds", 3, 30, 15, 99, "a" * 64, 120, 110, "b" * 64)
    fingerprint = Tokenizer("bytes").fingerprint
    for split in ("train", "validation"):
        (tmp_path / split).mkdir()
    Manifest("uint16", fingerprint, 256, 257, (shard,)).write(tmp_path / "validation")
    assert tokenizer_of(tmp_path).vocab_size == 257
    Manifest("uint16", fingerprint, 65535, 65536, (shard,)).write(tmp_path / "train")
    with pytest.raises(DataError, match="has 65536 tokens of which 65535 ends a document, its tok"):
        tokenizer_of(tmp_path)


@pytest.mark.parametrize("command", ["inspect", "audit", "verify"])
def test_commands_refuse_an_exchanged_tokenizer_in_one_line(exchanged, capsys, command):
    assert main([command, str(exchanged)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: tokenizer ")
    assert "has fingerprint" in last
