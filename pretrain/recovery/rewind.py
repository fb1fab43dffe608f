"""Rewinding after a loss spike: back to the checkpoint before it, then past its data.

A segment's number counts the batches that lanes delivered since the run started. Without rewinds,
step n reads segment n - 1. A window of segments that a rewind skips shifts all later ones. Windows
are part of the ledger, and the segment of a step is a pure function of them: so a run that is
resumed anywhere reads the same data, and rewinding needs no other state.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from data_pipeline.config import SegmentLengths
from data_pipeline.errors import TrainingError
from data_pipeline.lanes.lane_stream import SegmentBatch
from pretrain.checkpoint import directory as files
from pretrain.checkpoint.resume_point import find_resume_point
from pretrain.config.phases import first_step_at, lanes_since, run_at
from pretrain.config.run import RunConfig
from pretrain.distributed.world import World, raise_on_all_ranks
from pretrain.recovery.loss_spikes import Spike
from pretrain.rundir.ledger import events_of
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.training_events import Event, GaveUp, Rewind

logger = logging.getLogger(__name__)


def rewind(run: RunConfig, run_dir: RunDir, world: World, spike: Spike) -> None:
    """Let the next start resume from before the spike and skip its data.

    Raises TrainingError after `recovery.max_rewinds` rewinds. CheckpointError, with nothing
    deleted, if there are checkpoints from before the spike and none of them is valid.
    """
    before = find_resume_point(
        run_dir.checkpoints, world, run_dir.identity.id, before=spike.first_step
    )
    with raise_on_all_ranks():
        if not world.is_main:
            return
        ledger = run_dir.ledger.read()
        num_rewinds = len(events_of(ledger, Rewind))  # windows that touch are one
        at: dict[str, Any] = {
            "first_step": spike.first_step,
            "step": spike.last_step,
            "loss": spike.loss,
            "usual_loss": spike.usual,
        }
        if num_rewinds >= run.recovery.max_rewinds:
            run_dir.ledger.append(GaveUp(**at))
            raise TrainingError(_report(run, spike, ledger))
        # Checkpoints go first. After a crash in between, the run just meets the spike again. In the
        # other order the window could skip segments that the remaining weights have already read.
        files.discard_from(run_dir.checkpoints, spike.first_step)
        step = before.step if before else 0
        window = window_of(spike, skipped_windows(ledger), run, step)
        run_dir.ledger.append(Rewind(**at, to_step=step, segments=(window.start, window.stop)))
        logger.warning(
            "recovery: %s; rewinding to step %d, skipping segments %d to %d "
            "(rewind %d of at most %d)",
            spike.describe(), step, window.start, window.stop - 1, num_rewinds + 1,
            run.recovery.max_rewinds,
        )  # fmt: skip


def skipped_windows(ledger: Sequence[Event]) -> list[range]:
    """The windows of segments that rewinds skip, in order; overlapping ones are joined."""
    windows: list[range] = []
    for start, stop in sorted(event.segments for event in events_of(ledger, Rewind)):
        if windows and start <= windows[-1].stop:
            start, stop = windows[-1].start, max(stop, windows[-1].stop)
            windows.pop()
        windows.append(range(start, stop))
    return windows


def segments_consumed(step: int, windows: Sequence[range]) -> int:
    """How many segments of every lane a run has read or skipped after `step` updates."""
    count = step
    for window in windows:
        # A window at the very next segment is not consumed yet: the next batch comes after it.
        if count > window.start:
            count += len(window)
    return count


def window_of(spike: Spike, windows: Sequence[range], run: RunConfig, to_step: int) -> range:
    """The segments to skip: from one before the spike to `skip_margin_segments` after it.

    One before, because a step's loss shows what the update before it did. None is from before
    step `to_step`, to which the run rewinds, or from before the phase in which the spike started.
    Segments are counted in that phase, so longer ones of a later phase count for several.
    """
    first_phase = first_step_at(run, spike.first_step - 1)
    kept = segments_consumed(max(to_step, first_phase), windows)
    length = run_at(run, first_phase).data.segment_length
    lengths = [
        run_at(run, step - 1).data.segment_length
        for step in range(spike.first_step, spike.last_step + 1)
    ]
    more = max(0, math.ceil(sum(lengths) / length) - len(lengths))
    stop = segments_consumed(spike.last_step, windows) + more + run.recovery.skip_margin_segments
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
        segments_consumed(each, windows) - first: run_at(run, each).data.segment_length
        for each in (start, *changes)
    }
    return SegmentLengths(lengths.pop(0), tuple(lengths.items()))


def _report(run: RunConfig, spike: Spike, ledger: Sequence[Event]) -> str:
    rewinds = [f"\n  step {event.step}: {event.spike}" for event in events_of(ledger, Rewind)]
    return (
        f"{spike.describe()}, after {len(rewinds)} rewinds "
        f"(recovery.max_rewinds={run.recovery.max_rewinds}):{''.join(rewinds)}\n"
        "lower optim.learning_rate or clean the documents that ledger.jsonl names; "
        "to continue anyway, raise recovery.max_rewinds"
    )
