"""Which documents a step reads, for which lane, without reading a token: LaneStream's own walk, written down."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from data_pipeline.corpus import Corpus
from data_pipeline.lane_plan import check_lanes
from data_pipeline.lane_tokens import plan_of


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


def audit_steps(corpus: Corpus, num_lanes: int, seed: int, segment_length: int, steps: range) -> Iterator[Piece]:
    """What each lane reads in each of `steps`, in the order of steps and lanes; step 0 is a run's first.

    DataError when the lanes do not suit the corpus. Finding the first step takes a few binary searches per epoch.
    """
    plan = plan_of(corpus, num_lanes, seed)
    check_lanes(plan, corpus.manifest.longest_document)
    walks = [plan.walk(lane, *plan.locate(lane, steps.start * segment_length)) for lane in range(num_lanes)]
    for step in steps:
        for walk in walks:
            for run in walk.take(segment_length):
                shard = corpus.manifest.shards[run.unit]
                reader = corpus.shard(run.unit)
                pieces = zip(run.documents.tolist(), run.offsets.tolist(), run.lengths.tolist(), strict=True)
                for index, offset, count in pieces:
                    name = reader.document_id(index)
                    yield Piece(step, walk.lane, shard.path, index, name, offset, count, run.epoch)
