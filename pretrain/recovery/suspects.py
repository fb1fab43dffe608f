"""Suspects of a loss spike: the skipped documents that the weights from before it predict worst."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial

import torch

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.audit import ReadSpan, audit_steps
from data_pipeline.lanes.lane_stream import LaneStream
from data_pipeline.lanes.mixture import Mixture
from pretrain.config.phases import first_step_at, lane_seed_at, lanes_since, run_at
from pretrain.config.run import RunConfig
from pretrain.distributed.world import World, broadcast_value, gather_values
from pretrain.engines.engine import Engine
from pretrain.model.lane_state import Memory
from pretrain.recovery.rewind import lane_lengths, segments_consumed
from pretrain.rundir.ledger import events_of, skipped_windows
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.training_events import (
    Rewind,
    SuspectDocument,
    SuspectDocuments,
    WindowDropped,
)
from pretrain.state import TrainState

logger = logging.getLogger(__name__)

NUM_SUSPECTS = 5
NO_STEP = 1 << 62  # beyond every run's last step
LossSums = dict[tuple[str, int], tuple[float, int]]  # (document, lane) -> sum of losses, tokens


def name_suspects(
    run: RunConfig,
    run_dir: RunDir,
    engine: Engine,
    corpus: Corpus | Mixture,
    state: TrainState,
    lanes: range,
) -> None:
    """After a rewind, write to the ledger which skipped documents the weights predict worst.

    `run` has all its phases; `corpus` and `lanes` are those of the state's phase.
    """
    # Rank 0 alone reads the ledger: it has the exit status of every rank of every attempt.
    spans = broadcast_value(_open_case(run_dir) if engine.world.is_main else [], list[list[int]])
    if not spans:
        return
    *earlier, window = [range(*span) for span in spans]
    phase = _segments_of_phase(run, state.step, earlier)
    window = range(max(window.start, phase.start), min(window.stop, phase.stop))
    if not window:
        return  # it is in a later phase
    current, seed = run_at(run, state.step), lane_seed_at(run, state.step)
    length, num_lanes = current.lane_tokens_per_step, current.data.lanes
    stream = LaneStream(corpus, num_lanes, seed, length, lanes, state.cursor)
    for _ in range(segments_consumed(state.step, earlier), window.start):
        next(stream)
    lanes_start = segments_consumed(lanes_since(run, state.step), earlier)
    since_then = range(window.start - lanes_start, window.stop - lanes_start)
    lengths = lane_lengths(run, state.step, earlier)
    spans = audit_steps(corpus, num_lanes, seed, lengths, since_then, lanes)
    sums: LossSums = {}
    # Memories start empty: those of the checkpoint belong to the text before the window.
    memories: list[Memory | None] = [None] * len(state.memories)
    read = partial(engine.evaluate, memory_length=run.model.longest_memory)
    for _ in window:
        losses = []
        for slot, part in enumerate(next(stream).split(len(memories))):
            found = []
            for segment in part.segments(run.optim.gradient_segments):
                nll_BL, memories[slot] = read(segment, memories[slot])
                found.append(nll_BL)
            losses += torch.cat(found, dim=1).flatten().tolist()
        _add_losses(sums, spans, losses)
    _write_suspects(run_dir, engine.world, sums, window)


def _open_case(run_dir: RunDir) -> list[list[int]]:
    """The windows of all rewinds, as [start, stop]; [] unless the last one has no suspects yet."""
    ledger = run_dir.ledger.read()
    events = events_of(ledger, Rewind, WindowDropped, SuspectDocuments)
    if not events or not isinstance(events[-1], Rewind):
        return []
    earlier = skipped_windows([event for event in ledger if event is not events[-1]])
    return [*([window.start, window.stop] for window in earlier), list(events[-1].segments)]


def _segments_of_phase(run: RunConfig, step: int, windows: list[range]) -> range:
    """The segments that the phase reads or skips, counted from the start of the run."""
    next_phase = (phase.from_step for phase in run.data.phases if phase.from_step > step)
    first, last = first_step_at(run, step), next(next_phase, NO_STEP)
    return range(segments_consumed(first, windows), segments_consumed(last, windows))


def _add_losses(sums: LossSums, spans: Iterable[ReadSpan], losses: list[float]) -> None:
    """Add one step's losses, lane after lane, to the sums of the documents they belong to."""
    offset = 0
    for span in spans:
        total, tokens = sums.get((span.document, span.lane), (0.0, 0))
        total += sum(losses[offset : offset + span.tokens])
        sums[span.document, span.lane] = (total, tokens + span.tokens)
        offset += span.tokens
        if offset == len(losses):
            return


def _write_suspects(run_dir: RunDir, world: World, sums: LossSums, window: range) -> None:
    own = [
        SuspectDocument(document=document, lane=lane, loss=total / tokens, tokens=tokens)
        for (document, lane), (total, tokens) in sums.items()
    ]
    gathered = gather_values(_worst(own) if world.counts_lanes else [], list[SuspectDocument])
    if not world.is_main:
        return
    worst = tuple(_worst(each for part in gathered for each in part))
    run_dir.ledger.append(SuspectDocuments(segments=(window.start, window.stop), documents=worst))
    logger.warning(
        "recovery: hardest to predict in the skipped segments: %s", ", ".join(map(str, worst))
    )


def _worst(documents: Iterable[SuspectDocument]) -> list[SuspectDocument]:
    return sorted(documents, key=lambda each: -each.loss)[:NUM_SUSPECTS]
