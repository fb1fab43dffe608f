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


@pytest.mark.parametrize("max_tokens", [100, 1209, 20_000])
def test_heads_of_every_document_are_read_and_told_apart(tmp_path, max_tokens):
    books = write_numbered_corpus(tmp_path, [[9000, 5000], [7000, 20, 11000]])
    lanes = useful_lanes(books, 8, 64, max_tokens, heads=True)
    stream = EvaluationStream(books, lanes, 64, range(lanes), max_tokens, heads=True)
    batches = list(stream)
    valid = np.concatenate([batch.valid_BL.ravel() for batch in batches])
    read, parts = (
        np.concatenate([values_BL.ravel() for values_BL in found])[valid]
        for found in ([b.targets_BL for b in batches], [b.parts_BL for b in batches])
    )
    assert len(read) == max_tokens
    assert stream.num_documents == stream.all_documents == 5
    firsts = [int(books.shard(unit).tokens(d)[0]) for unit, d in ((0, 0), (0, 1), (1, 0), (1, 2))]
    heads = [np.sort(read[(read >= first) & (read < first + 5000)]) for first in firsts]
    for first, head in zip(firsts, heads, strict=True):
        assert np.array_equal(head, first + np.arange(len(head))), "the first tokens, none between"
        assert len(set(parts[np.isin(read, head)])) == 1, "a document is in one part"
    assert max(map(len, heads)) - min(map(len, heads)) < 5, "heads are equally long"


def test_a_split_of_many_documents_is_read_from_as_few_shards_as_have_a_hundred(tmp_path):
    split = write_numbered_corpus(tmp_path, [[30] * 200] * 3)
    stream = EvaluationStream(split, 4, 7, range(4), 1000, heads=True)
    read = np.concatenate([batch.targets_BL[batch.valid_BL] for batch in stream])
    assert (len(read), stream.num_documents) == (1000, 100)
    assert len(set(read // 6000)) == 1
