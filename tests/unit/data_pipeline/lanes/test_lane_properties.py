"""Invariants of lanes for random corpora, numbers of lanes and ranks, and interruptions."""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.lane_stream import LaneStream
from data_pipeline.lanes.mixture import Mixture
from data_pipeline.lanes.prefetcher import Prefetcher
from data_pipeline.lanes.random_order import key_of, permutation, sort_order
from data_pipeline.lanes.segment_batch import LaneCursor, SegmentBatch
from tests.helpers.corpora import write_numbered_corpus

Shards = list[list[int]]  # lengths of the documents of each shard


@dataclass(frozen=True)
class Session:
    """A run between two interruptions: `steps` are saved, the `lost` ones after them are not."""

    world_size: int
    steps: int
    lost: int
    segment_length: int
    reads_ahead: bool


@st.composite
def runs(draw) -> tuple[int, list[Session]]:
    """A number of lanes, and sessions of ranks among which the lanes divide."""
    num_lanes = draw(st.integers(1, 12))
    divisors = [size for size in range(1, num_lanes + 1) if num_lanes % size == 0]
    session = st.builds(
        Session,
        world_size=st.sampled_from(divisors),
        steps=st.integers(1, 90),
        lost=st.integers(0, 3),
        segment_length=st.integers(1, 17),
        reads_ahead=st.booleans(),
    )
    return num_lanes, draw(st.lists(session, min_size=2, max_size=5))


def expected_lanes(shards: Shards, num_lanes: int, seed: int, epoch: int) -> list[list[int]]:
    """Each lane's tokens of an epoch, by document, from the definition in docs/lanes.md."""
    offsets = np.concatenate([[0], np.cumsum([sum(shard) for shard in shards])]).tolist()
    total, position = offsets[-1], 0
    lanes: list[list[int]] = [[] for _ in range(num_lanes)]
    for unit in permutation(len(shards), key_of(seed, "units", epoch)).tolist():
        key = key_of(seed, "documents", epoch, unit)
        for document in sort_order(len(shards[unit]), key).tolist():
            first = offsets[unit] + sum(shards[unit][:document])
            length = shards[unit][document]
            lane = next(i for i in range(num_lanes) if position < (i + 1) * total // num_lanes)
            lanes[lane] += range(first, first + length)
            position += length
    return lanes


def expected_shares(shards: Shards, num_lanes: int) -> list[list[int]]:
    """Each lane's tokens of a stream, in every epoch: an even cut of it."""
    total = sum(map(sum, shards))
    cuts = [lane * total // num_lanes for lane in range(num_lanes + 1)]
    return [list(range(start, end)) for start, end in pairwise(cuts)]


def batches_of(stream: LaneStream, session: Session) -> Iterator[SegmentBatch]:
    """The saved steps of a stream that may have prefetched more; then the lost ones."""
    count = session.steps + session.lost
    if not session.reads_ahead:
        return iter([next(stream) for _ in range(count)])
    with Prefetcher(stream) as prefetcher:
        return iter([next(prefetcher) for _ in range(count)])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    shards=st.lists(st.lists(st.integers(1, 25), min_size=2, max_size=20), min_size=3, max_size=8),
    seed=st.integers(0, 1 << 40),
    run=runs(),
    shard_format=st.sampled_from(["mds", "webdataset"]),
    is_stream=st.booleans(),
)
def test_lanes_read_each_token_once_though_interrupted(shards, seed, run, shard_format, is_stream):
    num_lanes, sessions = run
    total = sum(map(sum, shards))
    assume(total // num_lanes >= (1 if is_stream else max(map(max, shards))))
    starts = np.cumsum([0] + [length for shard in shards for length in shard])
    shares = expected_shares(shards, num_lanes) if is_stream else []
    if is_stream:
        starts = np.array([share[0] for share in shares])
    with tempfile.TemporaryDirectory() as directory:
        corpus = write_numbered_corpus(Path(directory), shards, shard_format, is_stream)
        read, cursor = read_in_sessions(corpus, num_lanes, seed, sessions, starts)
    epochs = cursor.epochs_B.tolist()
    assert len({len(tokens) for tokens in read}) == 1, "lanes go in lock step"
    ordered = range(max(epochs) + 1)
    by_epoch = [shares or expected_lanes(shards, num_lanes, seed, epoch) for epoch in ordered]
    for lane, tokens in enumerate(read):
        expected = [token for lanes in by_epoch[: epochs[lane] + 1] for token in lanes[lane]]
        assert tokens == expected[: len(tokens)]
    for lanes in by_epoch:
        assert sorted(token for lane in lanes for token in lane) == list(range(total))


def read_in_sessions(
    corpus: Corpus | Mixture,
    num_lanes: int,
    seed: int,
    sessions: list[Session],
    starts: np.ndarray | None = None,
) -> tuple[list[list[int]], LaneCursor]:
    """All that each lane has read when the last session ends, and the cursor of the run then.

    `starts` are the tokens that begin a document or a lane.
    """
    read: list[list[int]] = [[] for _ in range(num_lanes)]
    next_tokens: dict[int, int] = {}  # the last target of each lane: its next token
    cursor = None
    for session in sessions:
        per_rank, cursors = num_lanes // session.world_size, []
        for first in range(0, num_lanes, per_rank):
            lanes = range(first, first + per_rank)
            stream = LaneStream(corpus, num_lanes, seed, session.segment_length, lanes, cursor)
            batches = list(batches_of(stream, session))[: session.steps]
            for batch in batches:
                assert batch.lanes == lanes
                if starts is not None:
                    assert np.array_equal(batch.starts_BL, np.isin(batch.tokens_BL, starts))
                rows = zip(lanes, batch.tokens_BL, batch.targets_BL, strict=True)
                for lane, tokens_L, targets_L in rows:
                    assert tokens_L[1:].tolist() == targets_L[:-1].tolist()
                    assert next_tokens.get(lane, tokens_L[0]) == tokens_L[0]
                    read[lane] += tokens_L.tolist()
                    next_tokens[lane] = targets_L[-1]
            cursors.append(batches[-1].cursor)
        cursor = LaneCursor.from_tree(json.loads(json.dumps(LaneCursor.join(cursors).to_tree())))
    assert cursor is not None
    return read, cursor
