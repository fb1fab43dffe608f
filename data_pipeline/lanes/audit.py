"""Which documents a step reads, for which lane: LaneStream's own walk, without reading tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.lane_plan import DocumentSpans, check_lanes, check_range
from data_pipeline.lanes.mixture import Mixture, plan_of


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
    segment_length: int,
    steps: range,
    lanes: range | None = None,
) -> Iterator[ReadSpan]:
    """Yield what each of `lanes` (all) reads in each of `steps`, by step and lane.

    Step 0 is the lanes' first. DataError if the lanes do not suit the corpus. Finding the first
    step takes a few binary searches per epoch.
    """
    plan = plan_of(corpus, num_lanes, seed)
    check_lanes(plan, corpus.manifest.longest_whole)
    lanes = lanes or range(num_lanes)
    check_range(lanes, num_lanes)
    first_token = steps.start * segment_length
    walks = [plan.walk(lane, *plan.locate(lane, first_token)) for lane in lanes]
    for step in steps:
        for walk in walks:
            for spans in walk.take(segment_length):
                yield from _read_spans(corpus, step, walk.lane, spans)


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
