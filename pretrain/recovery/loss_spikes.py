"""What is out of line, and what a run passes over because of it: functions of losses and of the ledger. Torch-free.

A segment's number counts the batches of the lanes since the run began. Without rewinds step n reads segment n - 1;
windows of segments that a rewind passes over shift all later ones. They stand in the ledger, so a run that is resumed
anywhere reads the same.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from data_pipeline.config import SegmentLengths
from data_pipeline.errors import ConfigError
from pretrain.config.phases import first_step_at, lanes_since, run_at
from pretrain.config.run import RecoveryConfig, RunConfig, lanes_of_rank
from pretrain.rundir.ledger import events_of
from pretrain.rundir.training_events import Event, OutOfMemory, Rewind, describe_spike

if TYPE_CHECKING:
    from data_pipeline.lanes.lane_stream import SegmentBatch

MIN_HISTORY = 10  # losses, before any is called a spike
# The least deviation that counts as one, as a part of the median: a loss that hardly varies makes nothing a spike.
LEAST_DEVIATION = 0.01
DEVIATIONS_PER_MAD = 1.4826  # of a normal distribution


@dataclass(frozen=True)
class Spike:
    """Steps in a row, the last one just made, whose losses were far above the usual or whose updates were skipped."""

    first_step: int
    last_step: int
    loss: float | None  # the highest; None if every step was skipped
    usual: float | None  # the median before

    def describe(self) -> str:
        return describe_spike(self.first_step, self.last_step, self.loss, self.usual)


class SpikeDetector:
    """Hears of every step in order. Spikes do not enter the losses that later ones are compared with."""

    def __init__(self, settings: RecoveryConfig) -> None:
        self._settings = settings
        self._usual: deque[float] = deque(maxlen=settings.window)
        self._out_of_line: list[tuple[int, float | None]] = []

    def observe(self, step: int, loss: float | None) -> Spike | None:
        """The spike that this step completes; `loss` is None for a skipped step."""
        if loss is not None and not self._is_spike(loss):
            self._usual.append(loss)
            self._out_of_line.clear()
            return None
        self._out_of_line.append((step, loss))
        if (
            len(self._out_of_line) < self._settings.spike_steps
            or not self._settings.spike_threshold
        ):
            return None
        losses = [each for _, each in self._out_of_line if each is not None]
        usual = statistics.median(self._usual) if self._usual else None
        return Spike(self._out_of_line[0][0], step, max(losses, default=None), usual)

    def _is_spike(self, loss: float) -> bool:
        if len(self._usual) < MIN_HISTORY or not self._settings.spike_threshold:
            return False
        median = statistics.median(self._usual)
        deviation = DEVIATIONS_PER_MAD * statistics.median(
            abs(each - median) for each in self._usual
        )
        return loss - median > self._settings.spike_threshold * max(
            deviation, LEAST_DEVIATION * median
        )


def skipped_windows(ledger: Sequence[Event]) -> list[range]:
    """The windows of segments that rewinds took out of the run, in their order, overlapping ones joined."""
    windows: list[range] = []
    for start, stop in sorted(event.segments for event in events_of(ledger, Rewind)):
        if windows and start <= windows[-1].stop:
            start, stop = windows[-1].start, max(stop, windows[-1].stop)
            windows.pop()
        windows.append(range(start, stop))
    return windows


def segments_consumed(step: int, windows: Sequence[range]) -> int:
    """How many segments of every lane lie behind a run after `step` updates, read or passed over."""
    count = step
    for window in windows:
        if count > window.start:
            count += len(window)
    return count


def window_of(spike: Spike, windows: Sequence[range], run: RunConfig, to_step: int) -> range:
    """The segments to pass over: from one before the spike's first to `skip_margin_segments` behind its last.

    None of them lies before step `to_step`, to which the run goes back, or before the phase in which the spike began.
    They are passed over in that phase, so that later ones with longer segments count for more.
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


def lane_lengths(run: RunConfig, step: int, windows: Sequence[range]) -> SegmentLengths:
    """How long the segments of the lanes of `step` are, by their number since these lanes began."""
    begin = lanes_since(run, step)
    lengths = {
        segments_consumed(start, windows) - segments_consumed(begin, windows): run_at(
            run, start
        ).data.segment_length
        for start in (
            begin,
            *(phase.from_step for phase in run.data.phases if begin < phase.from_step <= step),
        )
    }
    return SegmentLengths(lengths.pop(0), tuple(lengths.items()))


def skip_windows(
    batches: Iterable[SegmentBatch], num_behind: int, windows: Sequence[range]
) -> Iterator[SegmentBatch]:
    """The batches without those in `windows`; `num_behind` segments were read or passed over before the first.

    After a gap every lane is taken to begin a document: what its memory holds is another text.
    """
    after_gap = False
    for number, batch in enumerate(batches, num_behind):
        if any(number in window for window in windows):
            after_gap = True
            continue
        if after_gap:
            batch.starts_BL[:, 0] = True
        after_gap = False
        yield batch


def with_fitting_micro_batch(
    config: RunConfig, world_size: int, ledger: Sequence[Event]
) -> RunConfig:
    """The run with a micro-batch below all that found no memory on as many ranks with the same engine.

    ConfigError when a single lane did not fit.
    """
    mine = memory_settings(config, world_size)
    failed = [
        event.micro_batch_lanes
        for event in events_of(ledger, OutOfMemory)
        if event.settings == mine
    ]
    if not failed:
        return config
    if min(failed) == 1:
        raise ConfigError(
            "not even one lane at a time fits into memory; use engine.activation_checkpointing=full, a higher "
            "engine.zero_stage, shorter segments or memories, or more ranks"
        )
    per_rank = len(lanes_of_rank(config, 0, world_size))
    lanes = max(lanes for lanes in range(1, min(failed) // 2 + 1) if per_rank % lanes == 0)
    return dataclasses.replace(
        config, engine=dataclasses.replace(config.engine, micro_batch_lanes=lanes)
    )


def memory_settings(config: RunConfig, world_size: int) -> dict[str, Any]:
    """What decides how much memory a lane takes, but for the model, which a run never changes."""
    engine = config.engine
    return {
        "world_size": world_size,
        "zero_stage": engine.zero_stage,
        "precision": engine.precision,
        "activation_checkpointing": engine.activation_checkpointing,
        "checkpoint_every_n_layers": engine.checkpoint_every_n_layers,
        "offload_optimizer": engine.offload_optimizer,
        "offload_memories": engine.offload_memories,
        "segment_length": config.data.segment_length,
        "logits_chunk_tokens": engine.logits_chunk_tokens,
    }
