"""Rewinding after a loss spike: back to the checkpoint before it, then past its data.

A segment's number counts the batches that lanes delivered since the run started. Without rewinds,
step n reads segment n - 1. A window of segments that a rewind skips shifts all later ones. Windows
are part of the ledger, and the segment of a step is a pure function of them: so a run that is
resumed anywhere reads the same data, and rewinding needs no other state.

Suspects of a loss spike: the skipped documents that the weights from before it predict worst.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from data_pipeline.config import SegmentLengths
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.audit import ReadSpan, audit_steps
from data_pipeline.lanes.lane_stream import LaneStream, SegmentBatch
from data_pipeline.lanes.mixture import Mixture
from foundation.errors import TrainingError
from pretrain.checkpoint import directory as files
from pretrain.checkpoint.resume_point import find_resume_point
from pretrain.config.phases import first_step_at, lane_seed_at, lanes_since, run_at
from pretrain.config.run import RunConfig
from pretrain.distributed.world import World, broadcast_value, gather_values, raise_on_all_ranks
from pretrain.engines.engine import Engine
from pretrain.model.lane_state import Memory
from pretrain.recovery.loss_spikes import MOST_SKIPPED, SpikeDetector
from pretrain.rundir.events import (
    GaveUp,
    Rewind,
    Spike,
    SuspectDocument,
    SuspectDocuments,
)
from pretrain.rundir.ledger import events_of, skipped_windows
from pretrain.rundir.metrics_file import latest_measurements
from pretrain.rundir.run_dir import RunDir
from pretrain.state import TrainState

logger = logging.getLogger(__name__)

SKIP_MARGIN_SEGMENTS = 10


class SpikeFound(Exception):
    """Raised on every rank at the same step."""

    def __init__(self, spike: Spike) -> None:
        super().__init__(str(spike))
        self.spike = spike


class SpikeMonitor:
    """Watches losses and skipped updates of a run.

    Its history is metrics.jsonl, so a resumed run decides alike.
    """

    def __init__(self, run: RunConfig, run_dir: RunDir, world: World, state: TrainState) -> None:
        self._run, self._run_dir, self._world = run, run_dir, world
        self._detector = SpikeDetector(run)
        if world.is_main:
            # The end of a long file is enough: what is usual follows from the last few losses.
            measured = list(latest_measurements(run_dir.metrics))[::-1]
            self._detector.observe(line for line in measured if line["step"] <= state.step)

    @property
    def suspected_since(self) -> int | None:
        """The first step of what may become a spike, on rank 0; a save keeps a checkpoint from
        before it."""
        return self._detector.suspected_since

    def check(self, lines: Iterable[dict[str, Any]], ends_run: bool = False) -> None:
        """Take the metrics of new steps (on rank 0); raise SpikeFound on all ranks at a spike.

        Raises TrainingError on all ranks if too many of the last updates were skipped.
        """
        spike = self._detector.observe(lines) or self._detector.too_many_skipped(ends_run)
        spike = broadcast_value(spike, Spike | None)
        if spike is None:
            return
        if spike.skipped is None:
            raise SpikeFound(spike)
        if self._world.is_main:
            self._run_dir.ledger.append(GaveUp(spike=spike))
        limit = self._run.recovery.skip_grad_norm
        larger = f" or above recovery.skip_grad_norm={limit:g}" if limit else ""
        raise TrainingError(
            f"{spike}, their gradients were not finite{larger}; found more than "
            f"{MOST_SKIPPED:.0%} of the updates, so the run does not learn; lower "
            "optim.learning_rate or clean the data"
        )


def rewind(run: RunConfig, run_dir: RunDir, world: World, spike: Spike) -> None:
    """Let the next start resume from before the spike and skip its data.

    Raises TrainingError after `recovery.max_rewinds` rewinds, or if no checkpoint is from before
    the spike: to start from scratch is for the user to decide. CheckpointError, with nothing
    deleted, if there are checkpoints from before the spike and none of them is valid.
    """
    before = find_resume_point(
        run_dir.checkpoints, world, run_dir.identity.id, spike.first_step, run_dir.patience
    )
    with raise_on_all_ranks():
        if not world.is_main:
            return
        ledger = run_dir.ledger.read()
        rewinds = events_of(ledger, Rewind)  # not windows: those that touch are one
        most = run.recovery.max_rewinds
        if before is None or len(rewinds) >= most:
            run_dir.ledger.append(GaveUp(spike=spike))
            raise TrainingError(_why_no_rewind(run, run_dir, spike, rewinds, before is None))
        # Checkpoints go first. After a crash in between, the run just meets the spike again. In the
        # other order the window could skip segments that the remaining weights have already read.
        files.discard_from(run_dir.checkpoints, spike.first_step)
        window = window_of(spike, skipped_windows(ledger), run, before.step)
        event = Rewind(spike=spike, to_step=before.step, segments=(window.start, window.stop))
        run_dir.ledger.append(event)
        logger.warning(
            "recovery: %s (rewind %d of at most %d)", event.description, len(rewinds) + 1, most
        )


def _why_no_rewind(
    run: RunConfig, run_dir: RunDir, spike: Spike, rewinds: Sequence[Rewind], is_unsaved: bool
) -> str:
    off = "set recovery.spike_threshold=0 to train without rewinding"
    if is_unsaved:
        return (
            f"{spike}; found no checkpoint from before step {spike.first_step} to rewind to; use a "
            f"checkpoint.interval below {run.checkpoint.interval}, lower optim.learning_rate, or "
            f"{off}"
        )
    steps = f", at steps {', '.join(str(event.step) for event in rewinds)}" if rewinds else ""
    return (
        f"{spike}, after {len(rewinds)} rewinds (recovery.max_rewinds={run.recovery.max_rewinds})"
        f"{steps}; lower optim.learning_rate, clean the documents that {run_dir.ledger.path} "
        f"names, raise recovery.max_rewinds, or {off}"
    )


def inherited_windows(run_dir: RunDir, world: World, step: int) -> list[range]:
    """The windows to skip in a run that resumes from `step`, on all ranks; rank 0 logs them."""
    windows = skipped_windows(run_dir.ledger.read()) if world.is_main else []
    reached = segments_consumed(step, windows)
    for window in windows:
        state = "skips" if window.start >= reached else "has skipped"
        logger.info("recovery: the run %s segments %d to %d", state, window.start, window.stop - 1)
    spans = [[window.start, window.stop] for window in windows]
    return [range(*span) for span in broadcast_value(spans, list[list[int]])]


def segments_consumed(step: int, windows: Sequence[range]) -> int:
    """How many segments of every lane a run has read or skipped after `step` updates."""
    count = step
    for window in windows:
        # A window at the very next segment is not consumed yet: the next batch comes after it.
        if count > window.start:
            count += len(window)
    return count


def window_of(spike: Spike, windows: Sequence[range], run: RunConfig, to_step: int) -> range:
    """The segments to skip: from one before the spike to SKIP_MARGIN_SEGMENTS after it.

    One before, because a step's loss shows what the update before it did. None is from before
    step `to_step`, to which the run rewinds, or from before the spike's phase.
    """
    first_phase = first_step_at(run, spike.first_step - 1)
    kept = segments_consumed(max(to_step, first_phase), windows)
    stop = segments_consumed(spike.last_step, windows) + SKIP_MARGIN_SEGMENTS
    return range(max(kept, segments_consumed(spike.first_step, windows) - 2), stop)


def skip_windows(
    batches: Iterable[SegmentBatch], num_consumed: int, windows: Sequence[range]
) -> Iterator[SegmentBatch]:
    """The batches outside `windows`; `num_consumed` segments came before the first.

    After a gap every lane is treated as starting a document: its memory holds another text.
    """
    after_gap = False
    for number, batch in enumerate(batches, num_consumed):
        if any(number in window for window in windows):
            after_gap = True
            continue
        if after_gap:
            batch.starts_BL[:, 0] = True
        after_gap = False
        yield batch


def lane_lengths(run: RunConfig, step: int, windows: Sequence[range]) -> SegmentLengths:
    """How long the segments of the lanes of `step` are, by number since these lanes started."""
    start = lanes_since(run, step)
    first = segments_consumed(start, windows)
    changes = (phase.from_step for phase in run.data.phases if start < phase.from_step <= step)
    lengths = {
        segments_consumed(each, windows) - first: run_at(run, each).lane_tokens_per_step
        for each in (start, *changes)
    }
    return SegmentLengths(lengths.pop(0), tuple(lengths.items()))


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
    events = events_of(ledger, Rewind, SuspectDocuments)
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
    gathered = gather_values(_worst(own), list[SuspectDocument])
    if not world.is_main:
        return
    worst = tuple(_worst(each for part in gathered for each in part))
    run_dir.ledger.append(SuspectDocuments(segments=(window.start, window.stop), documents=worst))
    logger.warning(
        "recovery: hardest to predict in the skipped segments: %s", ", ".join(map(str, worst))
    )


def _worst(documents: Iterable[SuspectDocument]) -> list[SuspectDocument]:
    return sorted(documents, key=lambda each: -each.loss)[:NUM_SUSPECTS]
