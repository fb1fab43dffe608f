"""From a lane plan's runs to tokens: the shards of a corpus are the plan's units."""

from __future__ import annotations

from functools import partial

import numpy as np

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.errors import ConfigError
from data_pipeline.lanes.lane_plan import LanePlan, Run
from data_pipeline.lanes.mixture import Mixture
from data_pipeline.shards.shards import ShardReader


def plan_of(corpus: Corpus | Mixture, num_lanes: int, seed: int) -> LanePlan:
    """The lane plan whose units are the shards of `corpus`, or of all corpora of a mixture."""
    unit_tokens = [shard.tokens for shard in corpus.manifest.shards]
    units_at = partial(corpus.units_at, seed=seed) if isinstance(corpus, Mixture) else None
    return LanePlan(unit_tokens, num_lanes, seed, corpus.document_lengths, units_at)


def check_range(lanes: range, num_lanes: int) -> None:
    if not lanes or lanes.step != 1 or lanes.start < 0 or lanes.stop > num_lanes:
        raise ConfigError(
            f"lanes {lanes.start} to {lanes.stop - 1} are not among the {num_lanes} lanes of the run"
        )


def copy_run(reader: ShardReader, run: Run, out: memoryview) -> None:
    """Copy the pieces of `run` one behind the other to the begin of `out`."""
    itemsize, memory = reader.itemsize, reader.view
    begins = (reader.token_begins[run.documents] + run.offsets * itemsize).tolist()
    place = 0
    for begin, size in zip(begins, (run.lengths * itemsize).tolist(), strict=True):
        out[place : place + size] = memory[begin : begin + size]
        place += size


def read_runs(corpus: Corpus | Mixture, runs: list[Run]) -> np.ndarray:
    """The tokens of some runs, joined."""
    parts = []
    for run in runs:
        tokens = np.empty(run.num_tokens, corpus.manifest.dtype)
        copy_run(corpus.shard(run.unit), run, tokens.data.cast("B"))
        parts.append(tokens)
    return np.concatenate(parts) if parts else np.zeros(0, corpus.manifest.dtype)
