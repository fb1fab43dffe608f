from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import pytest

from data_pipeline.builder.build_tokenizer import train_tokenizer
from data_pipeline.cli import main
from data_pipeline.commands.verify import verify_split
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.corpus_identity import tokenizer_of
from data_pipeline.corpora.manifest import (
    TOKENIZER_DIRECTORY,
    FileState,
    Manifest,
    ShardInfo,
    file_state,
)
from data_pipeline.lanes.evaluation_stream import EvaluationStream
from data_pipeline.lanes.lane_stream import LaneStream
from data_pipeline.tokenizer import Tokenizer, read_fingerprint
from foundation import files
from foundation.errors import DataError
from tests.helpers.corpora import make_tiny_corpus, some_texts, write_numbered_corpus


@pytest.fixture
def corpus(tmp_path) -> Corpus:
    return write_numbered_corpus(tmp_path, [[30] * 10] * 4)


def read_an_epoch(corpus: Corpus) -> None:
    stream = LaneStream(Corpus.open(corpus.directory), 2, 1, 8, range(2))
    for _ in range(corpus.num_tokens // 16 + 2):
        next(stream)


def test_a_shard_that_is_replaced_while_it_is_opened_is_checked_as_opened(corpus, monkeypatch):
    path = corpus.directory / "shard.00001.mds"
    valid = corpus.directory / "valid"
    content = bytearray(path.read_bytes())
    valid.write_bytes(content)
    content[-5] ^= 4
    path.write_bytes(content)

    def and_replace(file: BinaryIO) -> FileState:
        state = file_state(file)
        valid.replace(path)
        return state

    monkeypatch.setattr("data_pipeline.corpora.corpus.file_state", and_replace)
    with pytest.raises(DataError, match=r"shard\.00001\.mds"):
        Corpus.open(corpus.directory).shard(1)


def test_opening_names_a_missing_shard_and_a_split_without_shards(corpus):
    (corpus.directory / "shard.00003.mds").unlink()
    with pytest.raises(DataError, match=r"shard\.00003\.mds"):
        Corpus.open(corpus.directory)
    replace(corpus.manifest, shards=()).write(corpus.directory)
    with pytest.raises(DataError, match=str(corpus.directory)):
        Corpus.open(corpus.directory)


def test_a_token_that_the_tokenizer_lacks_is_found_by_all_readers(tmp_path):
    """On a GPU the embedding would fail with an assertion of the device."""
    corpus = write_numbered_corpus(tmp_path / "train", [[30] * 3])
    replace(corpus.manifest, end_id=29, vocab_size=60).write(tmp_path / "train")
    corpus = Corpus.open(tmp_path / "train")
    for read in (
        lambda: list(islice(LaneStream(corpus, 1, 1, 8, range(1)), 20)),
        lambda: list(EvaluationStream(corpus, 1, 8, range(1))),
    ):
        with pytest.raises(DataError, match=r"token \d\d, .* 60") as error:
            read()
        assert "\n" not in str(error.value)
    assert "document 1 " in verify_split(tmp_path / "train", lambda line: None)[0]
    replace(corpus.manifest, end_id=28, vocab_size=29).write(tmp_path / "train")
    assert "document 0 " in verify_split(tmp_path / "train", lambda line: None)[0]


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


def test_a_process_hashes_a_tokenizer_once_until_it_changes(tmp_path, monkeypatch):
    corpus = make_tiny_corpus(tmp_path / "corpus", documents=30, vocabulary="unigram")
    monkeypatch.setattr(files, "SETTLED_NS", 0)
    reads: list[Path] = []
    counted = "data_pipeline.corpora.corpus_identity.read_fingerprint"
    monkeypatch.setattr(counted, lambda path: reads.append(path) or read_fingerprint(path))
    for split in ("train", "validation") * 2:
        Corpus.open(corpus / split)
    assert len(reads) == 1
    train_tokenizer("unigram", 300, some_texts(30, seed=1)).save(corpus / TOKENIZER_DIRECTORY)
    with pytest.raises(DataError):
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
    with pytest.raises(DataError, match="65536"):
        tokenizer_of(tmp_path)


@pytest.mark.parametrize("command", ["inspect", "audit", "verify"])
def test_commands_refuse_an_exchanged_tokenizer_in_one_line(exchanged, capsys, command):
    assert main([command, str(exchanged)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: tokenizer ")
    assert str(exchanged / "tokenizer") in last
    assert "manifest.json" in last


@pytest.mark.parametrize("damage", ["a bit", "the end"])
def test_reading_names_a_shard_in_which_one_bit_flipped_or_whose_end_is_cut(corpus, damage):
    read_an_epoch(corpus)
    path = corpus.directory / "shard.00002.mds"
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content if damage == "a bit" else content[:-100])
    with pytest.raises(DataError, match=r"shard\.00002\.mds"):
        read_an_epoch(corpus)
