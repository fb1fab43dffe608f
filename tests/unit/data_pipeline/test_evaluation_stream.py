from __future__ import annotations

import numpy as np
import pytest

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.evaluation_stream import EvaluationStream, evaluated_lanes, useful_lanes
from tests.helpers.corpora import write_numbered_corpus

LENGTHS = np.random.default_rng(1).integers(1, 60, (4, 17)).tolist()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    return write_numbered_corpus(tmp_path_factory.mktemp("validation"), LENGTHS)


@pytest.fixture(scope="module")
def stream(tmp_path_factory) -> Corpus:
    return write_numbered_corpus(tmp_path_factory.mktemp("stream"), LENGTHS, is_stream=True)


def evaluated(corpus, num_lanes, world_size, max_tokens=0, segment_length=7):
    """All valid targets of all ranks; checks what holds for every batch on the way."""
    targets, batches = [], set()
    for rank in range(world_size):
        lanes = evaluated_lanes(num_lanes, rank, world_size)
        assert len(lanes) in (num_lanes // world_size, -(-num_lanes // world_size))
        if not lanes:
            continue
        stream = EvaluationStream(corpus, num_lanes, segment_length, lanes, max_tokens)
        before_B = np.full(len(lanes), corpus.manifest.end_id)  # each lane begins with one
        count = 0
        for batch in stream:
            count += 1
            assert batch.tokens_BL[:, 0].tolist() == before_B.tolist()
            assert np.array_equal(batch.tokens_BL[:, 1:], batch.targets_BL[:, :-1])
            before_B = batch.targets_BL[:, -1]
            targets += batch.targets_BL[batch.valid_BL].tolist()
        assert count == len(stream)
        batches.add(count)
    assert len(batches) == 1, "else ranks would wait for each other forever"
    return targets


@pytest.mark.parametrize("num_lanes", [1, 3, 8, 21, 128])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_token_is_a_target_exactly_once(corpus, stream, num_lanes, world_size):
    assert len(EvaluationStream(stream, 16, 7, range(16))) == -(-stream.num_tokens // (16 * 7))
    for split in (corpus, stream):
        assert sorted(evaluated(split, num_lanes, world_size)) == list(range(corpus.num_tokens))


@pytest.mark.parametrize("max_tokens", [1, 100, 1001])
def test_a_token_limit_selects_the_same_tokens_for_any_number_of_lanes(corpus, max_tokens):
    targets = [sorted(evaluated(corpus, lanes, 1, max_tokens)) for lanes in (1, 3, 8)]
    assert len(targets[0]) == max_tokens
    assert targets[0] == targets[1] == targets[2]


def test_starts_mark_the_inputs_that_begin_a_document_or_the_stream(corpus):
    firsts = {int(corpus.shard(unit).tokens(d)[0]) for unit in range(4) for d in range(17)}
    for number, batch in enumerate(EvaluationStream(corpus, 2, 7, range(2))):
        assert batch.valid_BL is not None
        known_BL = np.pad(batch.valid_BL[:, :-1], ((0, 0), (1, 0)), constant_values=number > 0)
        expected_BL = np.isin(batch.tokens_BL, sorted(firsts)) & known_BL
        if number == 0:
            expected_BL[:, 0] = True
        # A finished lane's first input is a real token or padding.
        rows = batch.valid_BL.any(axis=1)
        assert np.array_equal(batch.starts_BL[rows], expected_BL[rows])


def test_lanes_that_long_documents_would_leave_empty_are_not_used(corpus, tmp_path):
    assert useful_lanes(corpus, 8, 7) == 8
    books = write_numbered_corpus(tmp_path, [[9000, 10], [10, 9000, 10]])
    assert useful_lanes(books, 16, 7) == 2
    assert useful_lanes(books, 16, 7, max_tokens=500) == 1
