"""Which documents a step reads, for which lane: LaneStream's own walk, without reading tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from data_pipeline.config import SegmentLengths
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.lane_plan import (
    DocumentSpans,
    LanePlan,
    LaneWalk,
    check_lanes,
    check_range,
)
from data_pipeline.lanes.mixture import Mixture, plan_of
from foundation.errors import DataError


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """Consecutive tokens of one document that one lane reads in one step."""

    step: int
    lane: int
    shard: str
    index: int  # of the document in its shard
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
) -> Iterator[ReadSpan]:
    """Yield what each of `lanes` (all) reads in each of `steps`, by step and lane.

    Step 0 is the lanes' first. DataError if the lanes do not suit the corpus. Finding the first
    step takes a few binary searches per epoch.
    """
    plan = plan_of(corpus, num_lanes, seed)
    check_lanes(plan, corpus.manifest.longest_document)
    lanes = lanes or range(num_lanes)
    check_range(lanes, num_lanes)
    first_token = lengths.tokens_before(steps.start)
    walks = [plan.walk(lane, *plan.locate(lane, first_token)) for lane in lanes]
    for step in steps:
        for walk in walks:
            for spans in walk.take(lengths.at(step)):
                yield from _read_spans(corpus, step, walk.lane, spans)


def find_document(
    corpus: Corpus | Mixture,
    document: str,
    num_lanes: int,
    seed: int,
    lengths: SegmentLengths,
    epochs: int | None = None,
    steps: range | None = None,
) -> Iterator[ReadSpan]:
    """Yield every reading of the documents with this id, by epoch and position.

    Searches as far as both `epochs` and `steps` allow; without either, the first epoch. DataError
    if no document has the id. Searches the headers of all shards; reads no tokens.
    """
    plan = plan_of(corpus, num_lanes, seed)
    check_lanes(plan, corpus.manifest.longest_document)
    found = [
        (unit, index)
        for unit in range(len(plan.unit_tokens))
        for index in _indices_of(corpus, unit, document)
    ]
    if not found:
        raise DataError(
            f"no document of the {corpus.manifest.documents:,} has the id {document!r}; "
            "`inspect` shows some"
        )
    first_tokens = [0] * num_lanes  # of the epoch, in each lane's stream since its start
    for epoch in itertools.count() if epochs is None and steps else range(epochs or 1):
        if steps and min(first_tokens) >= lengths.tokens_before(steps.stop):
            return
        lane_starts = [plan.lane_start(epoch, lane) for lane in range(num_lanes + 1)]
        offsets = (_stream_offsets(plan, epoch, unit, index) for unit, index in found)
        for offset in sorted(itertools.chain.from_iterable(offsets)):
            lane = int(np.searchsorted(lane_starts, offset, "right")) - 1
            walk = plan.walk(lane, epoch, offset - lane_starts[lane])
            reading = _reading(corpus, walk, first_tokens[lane] + walk.position, lengths)
            yield from (span for span in reading if steps is None or span.step in steps)
        shares = np.diff(lane_starts).tolist()
        first_tokens = [sum(pair) for pair in zip(first_tokens, shares, strict=True)]


def _indices_of(corpus: Corpus | Mixture, unit: int, document: str) -> list[int]:
    reader = corpus.shard(unit)
    return [index for index in range(len(reader)) if reader.document_id(index) == document]


def _stream_offsets(plan: LanePlan, epoch: int, unit: int, index: int) -> list[int]:
    """Return where a document starts in the epoch's stream: once per copy of its unit."""
    units, offsets = plan.epoch_order(epoch)
    layout = plan.unit_layout(epoch, unit)
    inside = int(layout.offsets[np.flatnonzero(layout.documents == index)[0]])
    return (offsets[np.flatnonzero(units == unit)] + inside).tolist()


def _reading(
    corpus: Corpus | Mixture, walk: LaneWalk, token: int, lengths: SegmentLengths
) -> Iterator[ReadSpan]:
    """Yield the spans of the document that starts at the walk, the lane's token number `token`."""
    first = walk.take(1)[0]
    remaining = int(corpus.document_lengths(first.unit)[first.documents[0]])
    offset = 0
    while remaining:
        step = lengths.step_of(token)
        count = min(remaining, lengths.tokens_before(step + 1) - token)
        spans = replace(first, offsets=np.array([offset]), lengths=np.array([count]))
        yield from _read_spans(corpus, step, walk.lane, spans)
        token, offset, remaining = token + count, offset + count, remaining - count


def _read_spans(
    corpus: Corpus | Mixture, step: int, lane: int, spans: DocumentSpans
) -> Iterator[ReadSpan]:
    shard = corpus.manifest.shards[spans.unit].path
    reader = corpus.shard(spans.unit)
    for index, offset, count in zip(
        spans.documents.tolist(), spans.offsets.tolist(), spans.lengths.tolist(), strict=True
    ):
        name = reader.document_id(index)
        yield ReadSpan(step, lane, shard, index, name, offset, count, spans.epoch)
