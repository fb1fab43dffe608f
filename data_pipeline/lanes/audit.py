"""Which documents a step reads, for which lane, without reading a token: LaneStream's own walk, written down."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.errors import DataError
from data_pipeline.lanes.lane_check import check_lanes
from data_pipeline.lanes.lane_plan import LanePlan, LaneWalk, Run
from data_pipeline.lanes.lane_tokens import check_range, plan_of
from data_pipeline.lanes.mixture import Mixture
from data_pipeline.lanes.segment_lengths import SegmentLengths


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one document that one lane reads in one step."""

    step: int
    lane: int
    shard: str
    index: int  # place of the document in its shard
    document: str  # id
    offset: int  # of the first token in the document
    tokens: int
    epoch: int  # of the lane


def audit_steps(
    corpus: Corpus | Mixture,
    num_lanes: int,
    seed: int,
    lengths: SegmentLengths,
    steps: range,
    lanes: range | None = None,
) -> Iterator[Piece]:
    """What each of `lanes` (all) reads in each of `steps`, in the order of steps and lanes; step 0 is the lanes' first.

    DataError when the lanes do not suit the corpus. Finding the first step takes a few binary searches per epoch.
    """
    plan = plan_of(corpus, num_lanes, seed)
    check_lanes(plan, corpus.manifest.longest_document)
    lanes = lanes or range(num_lanes)
    check_range(lanes, num_lanes)
    first_token = lengths.tokens_before(steps.start)
    walks = [plan.walk(lane, *plan.locate(lane, first_token)) for lane in lanes]
    for step in steps:
        for walk in walks:
            for run in walk.take(lengths.at(step)):
                yield from _pieces(corpus, step, walk.lane, run)


def find_document(
    corpus: Corpus | Mixture,
    document: str,
    num_lanes: int,
    seed: int,
    lengths: SegmentLengths,
    epochs: int | None = None,
    steps: range | None = None,
) -> Iterator[Piece]:
    """Every reading of the documents with this id, in the order of epochs and places.

    Looks as far as `epochs` and `steps` both go; with neither, through the first epoch. DataError when no document has
    the id. The headers of all shards are searched, no tokens are read.
    """
    plan = plan_of(corpus, num_lanes, seed)
    check_lanes(plan, corpus.manifest.longest_document)
    places = [
        (unit, index)
        for unit in range(len(plan.unit_tokens))
        for index in _indices_of(corpus, unit, document)
    ]
    if not places:
        raise DataError(
            f"no document of the {corpus.manifest.documents:,} has the id {document!r}; `inspect` shows some"
        )
    token_begins = [0] * num_lanes  # of the epoch, in each lane's stream since the run began
    for epoch in itertools.count() if epochs is None and steps else range(epochs or 1):
        if steps and min(token_begins) >= lengths.tokens_before(steps.stop):
            return
        lane_begins = [plan.lane_begin(epoch, lane) for lane in range(num_lanes + 1)]
        for place in sorted(
            begin for unit, index in places for begin in _stream_places(plan, epoch, unit, index)
        ):
            lane = int(np.searchsorted(lane_begins, place, "right")) - 1
            walk = plan.walk(lane, epoch, place - lane_begins[lane])
            pieces = _reading(corpus, walk, token_begins[lane] + walk.position, lengths)
            yield from (piece for piece in pieces if steps is None or piece.step in steps)
        token_begins = [
            token_begins[lane] + lane_begins[lane + 1] - lane_begins[lane]
            for lane in range(num_lanes)
        ]


def _indices_of(corpus: Corpus | Mixture, unit: int, document: str) -> list[int]:
    reader = corpus.shard(unit)
    return [index for index in range(len(reader)) if reader.document_id(index) == document]


def _stream_places(plan: LanePlan, epoch: int, unit: int, index: int) -> list[int]:
    """Where a document begins in the epoch's stream: once per copy of its unit."""
    units, begins = plan.epoch_order(epoch)
    layout = plan.unit_layout(epoch, unit)
    inside = int(layout.begins[np.flatnonzero(layout.documents == index)[0]])
    return (begins[np.flatnonzero(units == unit)] + inside).tolist()


def _reading(
    corpus: Corpus | Mixture, walk: LaneWalk, token: int, lengths: SegmentLengths
) -> Iterator[Piece]:
    """The pieces of the document that begins at the walk's place, which is token number `token` of the lane."""
    first = walk.take(1)[0]
    remaining = int(corpus.document_lengths(first.unit)[first.documents[0]])
    offset = 0
    while remaining:
        step = lengths.step_of(token)
        count = min(remaining, lengths.tokens_before(step + 1) - token)
        run = replace(first, offsets=np.array([offset]), lengths=np.array([count]))
        yield from _pieces(corpus, step, walk.lane, run)
        token, offset, remaining = token + count, offset + count, remaining - count


def _pieces(corpus: Corpus | Mixture, step: int, lane: int, run: Run) -> Iterator[Piece]:
    shard = corpus.manifest.shards[run.unit]
    reader = corpus.shard(run.unit)
    for index, offset, count in zip(
        run.documents.tolist(), run.offsets.tolist(), run.lengths.tolist(), strict=True
    ):
        yield Piece(
            step, lane, shard.path, index, reader.document_id(index), offset, count, run.epoch
        )
