from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import BinaryIO

import pytest

from data_pipeline.commands.verify import verify_split
from data_pipeline.corpora.corpus import Corpus, split_directory
from data_pipeline.corpora.manifest import FileState, Manifest, file_state
from data_pipeline.lanes.evaluation_stream import EvaluationStream
from data_pipeline.lanes.lane_stream import LaneStream
from foundation.errors import DataError
from tests.helpers.corpora import make_tiny_corpus, write_numbered_corpus


@pytest.fixture
def corpus(tmp_path) -> Corpus:
    return write_numbered_corpus(tmp_path, [[30] * 10] * 4)


def read_an_epoch(corpus: Corpus) -> None:
    stream = LaneStream(Corpus.open(corpus.directory), 2, 1, 8, range(2))
    for _ in range(corpus.num_tokens // 16 + 2):
        next(stream)


def test_reading_names_a_shard_in_which_one_bit_flipped(corpus):
    read_an_epoch(corpus)
    path = corpus.directory / "shard.00002.mds"
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)
    with pytest.raises(
        DataError,
        match=r"shard\.00002\.mds is corrupted: its SHA-256 is [0-9a-f]{16}, the manifest expects",
    ):
        read_an_epoch(corpus)


def test_reading_names_a_truncated_shard(corpus):
    path = corpus.directory / "shard.00001.mds"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        DataError, match=r"shard\.00001\.mds is corrupted: it has \d+ bytes, the manifest expects"
    ):
        read_an_epoch(corpus)


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
    with pytest.raises(DataError, match=r"shard\.00001\.mds is corrupted: its SHA-256"):
        Corpus.open(corpus.directory).shard(1)


def test_opening_names_a_missing_shard(corpus):
    (corpus.directory / "shard.00003.mds").unlink()
    with pytest.raises(DataError, match=r"shard\.00003\.mds is missing"):
        Corpus.open(corpus.directory)


def test_an_empty_split_is_rejected(tmp_path):
    Manifest(dtype="uint16", tokenizer="0" * 64, end_id=0, vocab_size=300, shards=()).write(
        tmp_path
    )
    with pytest.raises(DataError, match="lists no shards; the split is empty"):
        Corpus.open(tmp_path)


def test_no_more_than_a_few_shards_stay_open(tmp_path):
    corpus = write_numbered_corpus(tmp_path, [[5] * 4] * 40)
    for index in range(40):
        corpus.shard(index)
    assert len(corpus._open) == 16
    assert 39 in corpus._open


def test_commands_find_the_training_split_of_a_corpus(tmp_path):
    directory = make_tiny_corpus(tmp_path / "corpus")
    assert split_directory(directory) == directory / "train"
    assert split_directory(directory / "validation") == directory / "validation"
    assert (
        Corpus.open(directory / "train").num_bytes
        > Corpus.open(directory / "validation").num_bytes
        > 1000
    )


def test_a_token_that_the_tokenizer_does_not_have_ends_training_and_evaluation_in_one_line(
    tmp_path,
):
    """On a GPU the embedding would fail with an assertion of the device."""
    corpus = write_numbered_corpus(tmp_path / "train", [[30] * 3])
    replace(corpus.manifest, end_id=29, vocab_size=60).write(tmp_path / "train")
    corpus = Corpus.open(tmp_path / "train")
    for read in (
        lambda: list(islice(LaneStream(corpus, 1, 1, 8, range(1)), 20)),
        lambda: list(EvaluationStream(corpus, 1, 8, range(1))),
    ):
        with pytest.raises(DataError, match=r"token \d\d, expected tokens below 60") as error:
            read()
        assert "\n" not in str(error.value)


def test_verify_names_a_document_whose_tokens_the_tokenizer_does_not_have(tmp_path):
    corpus = write_numbered_corpus(tmp_path / "train", [[30] * 3])
    replace(corpus.manifest, end_id=29, vocab_size=60).write(tmp_path / "train")
    problems = verify_split(tmp_path / "train", lambda line: None)
    assert (
        "document 1 has tokens up to 59 and ends with 59, expected tokens below 60 and 29"
        in (problems[0])
    )
    replace(corpus.manifest, end_id=28, vocab_size=29).write(tmp_path / "train")
    problems = verify_split(tmp_path / "train", lambda line: None)
    assert "document 0 has tokens up to 29" in problems[0]
