"""Lengths of documents in their own files: what is planned with them, who finds wrong ones."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from data_pipeline.commands.verify import verify_split
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.lengths import write_lengths
from data_pipeline.lanes.evaluation_stream import EvaluationStream
from data_pipeline.lanes.lane_stream import LaneStream
from foundation.errors import DataError
from tests.helpers.corpora import make_tiny_corpus, write_numbered_corpus
from tests.helpers.stores import FileServer
from tests.unit.data_pipeline.corpora.test_remote_corpus import remote

SEED, LENGTH = 3, 16
DOCUMENTS = [[400, 700, 820, 480]] * 40
NAME = "shard.00000.mds.lengths"


@pytest.fixture(scope="module")
def numbered(tmp_path_factory) -> Corpus:
    return write_numbered_corpus(tmp_path_factory.mktemp("numbered"), DOCUMENTS)


@pytest.fixture
def corpus(numbered, tmp_path) -> Corpus:
    shutil.copytree(numbered.directory, tmp_path / "train")
    return Corpus.open(tmp_path / "train")


def tokens_of(corpus: Corpus, lanes: int, own: range, batches: int = 20) -> np.ndarray:
    stream = LaneStream(corpus, lanes, SEED, LENGTH, own)
    return np.concatenate([next(stream).tokens_BL for _ in range(batches)], axis=1)


def test_a_build_writes_the_lengths_of_each_shard(tmp_path):
    directory = make_tiny_corpus(tmp_path / "corpus") / "train"
    corpus = Corpus.open(directory)
    for number, info in enumerate(corpus.manifest.shards):
        read = corpus.document_lengths(number)
        assert not corpus._open, "the shard was not opened"
        assert read.tolist() == Corpus.open(directory).shard(number).lengths.tolist()
        assert (directory / f"{info.path}.lengths").stat().st_size == 72 + 4 * info.documents


def test_a_node_fetches_lengths_to_plan_and_only_the_shards_that_its_lanes_read(numbered, tmp_path):
    expected = tokens_of(numbered, 20, range(7, 8))
    with FileServer(numbered.directory) as server:
        found = tokens_of(remote(numbered, server.url, tmp_path), 20, range(7, 8))
        assert (found == expected).all()
        fetched = sorted(name.rpartition(".")[2] for name in server.requests)
        # A share of two shards is in three: it starts in one and ends in another. The last is
        # prefetched when the lane enters the one before it.
        assert fetched.count("lengths") <= 3
        assert fetched.count("mds") <= 3
    with FileServer(numbered.directory) as server:
        other = remote(numbered, server.url, tmp_path / "2")
        stream = EvaluationStream(other, 20, LENGTH, range(1))
        assert len(stream) == len(EvaluationStream(numbered, 20, LENGTH, range(1)))
        fetched = [name.rpartition(".")[2] for name in server.requests]
        assert fetched.count("lengths") >= 20 - 3, "of the borders of all lanes"
        assert fetched.count("mds") <= 2


def test_lengths_that_the_cache_has_wrong_are_fetched_again(numbered, tmp_path):
    with FileServer(numbered.directory) as server:
        for number in (1, 2):
            lengths = remote(numbered, server.url, tmp_path).document_lengths(0)
            assert lengths.tolist() == DOCUMENTS[0]
            assert server.requests == {NAME: number}
            path = tmp_path / "shards" / numbered.manifest.shards[0].lengths
            path.write_bytes(path.read_bytes()[:-1] + b"x")


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[:-4],
        lambda content: content + bytes(4),
        lambda content: content[:-4] + bytes(4),
        lambda content: b"Y" + content[1:],
        None,
    ],
)
def test_wrong_lengths_are_refused_and_named_by_verify(corpus, change):
    path = corpus.directory / NAME
    path.write_bytes(change(path.read_bytes())) if change else path.unlink()
    with pytest.raises(DataError, match=NAME):
        corpus.document_lengths(0)
    problems = verify_split(corpus.directory, lambda line: None)
    assert sum(NAME in problem for problem in problems) == 1


@pytest.mark.parametrize(
    "lengths", [[400, 700, 821, 480], [0, 1100, 820, 480], [700, 400, 820, 480]]
)
def test_lengths_that_the_manifest_lists_but_not_the_shard_are_refused(corpus, lengths):
    info = corpus.manifest.shards[0]
    listed = write_lengths(corpus.directory / info.path, info.sha256, lengths)
    shards = (replace(info, lengths=listed), *corpus.manifest.shards[1:])
    replace(corpus.manifest, shards=shards).write(corpus.directory)
    with pytest.raises(DataError, match=info.path):
        tokens_of(Corpus.open(corpus.directory), 1, range(1), 2 * corpus.num_tokens // LENGTH)
