"""Rewinds after a loss spike: to the checkpoint before the spike, then past the spike's data.

What counts as a spike is a pure function of the losses, so all ranks agree.

A segment's number counts the batches that lanes delivered since the run started. Without rewinds,
step n reads segment n - 1. After a window of skipped segments, steps read later ones. The ledger
has the windows, and the segment of a step is a pure function of them. So a run that resumes from
any step reads the same data, and a rewind needs no other state.
"""

import logging
import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NoReturn

from data_pipeline.lanes.segment_batch import SegmentBatch
from pretrain.checkpoint import retention
from pretrain.checkpoint.facts import Past
from pretrain.checkpoint.replicas import NonFiniteError
from pretrain.checkpoint.resume_point import NO_PAST, find_resume_point
from pretrain.checkpoint.verify import latest_step
from pretrain.config.model import ModelConfig
from pretrain.config.phases import first_step_at
from pretrain.config.run import RunConfig
from pretrain.costs.flops import tail_shares, vocabulary_bins
from pretrain.distributed.collectives import broadcast_value, raise_on_all_ranks
from pretrain.distributed.world import World
from pretrain.errors import TrainingError
from pretrain.rundir.changed_settings import lower_rate
from pretrain.rundir.events import GaveUp, Outcome, Rewind, Spike, UnresolvedSpike
from pretrain.rundir.history import find_events, skipped_windows
from pretrain.rundir.metrics_file import latest_measurements
from pretrain.rundir.run_dir import RunDir
from pretrain.state import TrainState

logger = logging.getLogger(__name__)

SKIP_MARGIN_SEGMENTS = 10
# The smallest deviation to assume, as a fraction of the median: where losses hardly vary, a small
# rise is no spike.
LEAST_DEVIATION = 0.01
# How many previous losses each new one is compared with: few, so that the loss falls little in
# them. A run cannot rewind before it has this many of the same data, or in the warm-up.
WINDOW = 50
SPIKE_STEPS = 20  # anomalous steps in a row that make a spike; a shorter jump does not
DEVIATIONS_PER_MAD = 1.4826  # a normal distribution's standard per median absolute deviation
# A spike starts above the threshold and lasts while losses are above this part of it: losses vary
# more in a spike than before it, so a single one near the threshold is not its end.
STILL_ABOVE = 0.25
MOST_SKIPPED = 0.5  # of the last WINDOW updates; a run that skips more does not learn


def untrained_loss(model: ModelConfig) -> float:
    """Return the loss with all logits 0, as they nearly are in an untrained model.

    It is the logarithm of the vocabulary's size. With an adaptive softmax it is the logarithm of
    the first bin's size, plus each other bin's, weighted by the bin's share of tokens by Zipf's
    law. Z-loss is not included.
    """
    if not model.vocab_size:
        return math.inf
    first, *others = (tokens for tokens, _ in vocabulary_bins(model))
    tails = zip(tail_shares(model)[1:], others, strict=True)
    return math.log(first + len(others)) + sum(share * math.log(size) for share, size in tails)


class SpikeDetector:
    """Takes every step in order, and compares its loss with previous ones that were not anomalous.

    A loss above an untrained model's is anomalous, too, if usual ones are below it. A loss is only
    compared with losses of the same data: the history starts again at each phase. No loss is
    anomalous in the warm-up of the learning rate, and before WINDOW losses are known.
    """

    def __init__(self, run: RunConfig) -> None:
        self._threshold = run.recovery.spike_threshold
        self._untrained_loss = untrained_loss(run.model)
        self._warmup_steps = max(run.optim.schedule.warmup_steps, WINDOW)
        self._data_changes = [phase.from_step for phase in run.data.phases]
        self._usual: deque[float] = deque(maxlen=WINDOW)
        self._suspicion: list[tuple[int, float | None]] = []
        self._skipped: deque[tuple[int, bool]] = deque(maxlen=WINDOW)

    @property
    def suspected(self) -> Spike | None:
        """The latest steps if they are anomalous, and so a spike if more follow; else None."""
        if not self._suspicion:
            return None
        return Spike(
            first_step=self._suspicion[0][0],
            last_step=self._suspicion[-1][0],
            loss=max((loss for _, loss in self._suspicion if loss is not None), default=None),
            usual=statistics.median(self._usual) if self._usual else None,
        )

    @property
    def skipped_last(self) -> Spike | None:
        """The latest steps, if they were skipped."""
        skipped = takewhile(lambda entry: entry[1], reversed(self._skipped))
        steps = [step for step, _ in skipped]
        return Spike(first_step=steps[-1], last_step=steps[0]) if steps else None

    def observe(self, lines: Iterable[Mapping[str, Any]]) -> Spike | None:
        """Take lines of metrics.jsonl; return the spike that they complete, if they do."""
        spike = None
        for line in lines:
            # An fp16 overflow only means that the loss scale is too large for this step.
            if line["kind"] == "train" and not line.get("overflowed"):
                self._skipped.append((line["step"], line["skipped"]))
                loss = None if line["skipped"] else line["loss"]
                spike = self._observe_step(line["step"], loss) or spike
        return spike

    def too_many_skipped(self, ends_run: bool) -> Spike | None:
        """Return the last WINDOW updates (all of a shorter run) if too many were skipped."""
        steps = list(self._skipped)
        skipped = sum(was_skipped for _, was_skipped in steps)
        is_known = self._threshold and (len(steps) == WINDOW or ends_run)
        if not is_known or skipped <= MOST_SKIPPED * len(steps):
            return None
        return Spike(first_step=steps[0][0], last_step=steps[-1][0], skipped=skipped)

    def _observe_step(self, step: int, loss: float | None) -> Spike | None:
        if step - 1 in self._data_changes:
            self._usual.clear()
            self._suspicion.clear()
        if not self._is_suspect(step, loss):
            self._suspicion.clear()
            if loss is not None:
                self._usual.append(loss)
            return None
        self._suspicion.append((step, loss))
        return self.suspected if len(self._suspicion) >= SPIKE_STEPS else None

    def _is_suspect(self, step: int, loss: float | None) -> bool:
        threshold = self._threshold
        if not threshold or step <= self._warmup_steps:
            return False
        if loss is None:
            return True
        if len(self._usual) < WINDOW:
            return False
        if self._suspicion:
            threshold *= STILL_ABOVE
        median = statistics.median(self._usual)
        if loss > self._untrained_loss > median:
            return True
        absolute_deviation = statistics.median(abs(usual - median) for usual in self._usual)
        deviation = max(DEVIATIONS_PER_MAD * absolute_deviation, LEAST_DEVIATION * median)
        return loss - median > threshold * deviation


class SpikeFound(Exception):
    """Raised on every rank at the same step."""

    def __init__(self, spike: Spike) -> None:
        super().__init__(str(spike))
        self.spike = spike


class SpikeMonitor:
    """Watches losses and skipped updates of a run.

    Its history is metrics.jsonl, so a resumed run decides as if it had not been interrupted.
    """

    def __init__(self, run: RunConfig, run_dir: RunDir, world: World, state: TrainState) -> None:
        self._run, self._run_dir, self._world = run, run_dir, world
        self._detector = SpikeDetector(run)
        with raise_on_all_ranks():
            # The end of a long file is enough: what is usual follows from the last few losses.
            latest = list(latest_measurements(run_dir.metrics)) if world.is_main else []
        measured = [line for line in reversed(latest) if line["step"] <= state.step]
        self._detector.observe(measured)

    @property
    def suspected_since(self) -> int | None:
        """The first step of what may be a spike, on rank 0. Saves keep a checkpoint before it."""
        suspected = self._detector.suspected
        return suspected.first_step if suspected else None

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
        self.give_up(
            spike,
            f"their gradients were not finite{self._or_larger}; "
            f"a run that skips more than {MOST_SKIPPED:.0%} does not learn; "
            f"{lower_rate(self._run, self._run_dir.path)} or clean the data",
        )

    def check_end(self, outcome: Outcome) -> None:
        """Warn if the steps before the end, of a phase or the run, may be a spike.

        Raises SpikeFound or TrainingError on all ranks if the last update of the run was skipped.
        """
        skipped = self._detector.skipped_last if outcome is Outcome.FINISHED else None
        if skipped := broadcast_value(skipped, Spike | None):
            advice = f"its gradients were not finite{self._or_larger}, and a run does not end with "
            advice += "skipped updates; raise optim.steps to train on, or clean the data"
            self._rewind_or_give_up(skipped, advice)
        with raise_on_all_ranks():
            if suspected := self._detector.suspected:  # on rank 0
                before = latest_step(self._run_dir.checkpoints, suspected.first_step)
                event = UnresolvedSpike(spike=suspected, before=before or None)
                self._run_dir.ledger.append_if_possible(event)
                logger.warning("recovery: %s", event.description)

    def check_saved(self, step: int, error: NonFiniteError) -> NoReturn:
        """Raise SpikeFound or TrainingError on all ranks, as a save found NaN or inf."""
        # Once a weight is NaN, so is the loss of all steps after.
        skipped = self._detector.skipped_last
        first = broadcast_value(skipped.first_step if skipped else step, int)
        spike = Spike(first_step=first, last_step=step, problem=error.problem)
        advice = lower_rate(self._run, self._run_dir.path)
        self._rewind_or_give_up(spike, f"which is not saved; {advice}")

    def give_up(self, spike: Spike, advice: str) -> NoReturn:
        """Raise TrainingError; the ledger has the reason."""
        with raise_on_all_ranks():
            if self._world.is_main:
                self._run_dir.ledger.append(GaveUp(spike=spike))
        raise TrainingError(f"{spike}, {advice}")

    def _rewind_or_give_up(self, spike: Spike, advice: str) -> NoReturn:
        if self._run.recovery.spike_threshold:
            raise SpikeFound(spike)
        self.give_up(spike, advice)

    @property
    def _or_larger(self) -> str:
        limit = self._run.recovery.skip_grad_norm
        return f" or above recovery.skip_grad_norm={limit:g}" if limit else ""


def rewind(
    run: RunConfig, run_dir: RunDir, world: World, spike: Spike, past: Past = NO_PAST
) -> None:
    """Make the next start resume from before the spike and skip the spike's data.

    TrainingError after `recovery.max_rewinds` rewinds, or without a checkpoint from before the
    spike: to start from scratch is for the user to decide. CheckpointError, with nothing deleted,
    if no such checkpoint is valid.
    """
    root, run_id, first_step = run_dir.checkpoints, run_dir.identity.id, spike.first_step
    before = find_resume_point(root, world, run_id, first_step, run_dir.retry, past)
    with raise_on_all_ranks():
        if not world.is_main:
            return
        ledger = run_dir.ledger.read()
        rewinds = find_events(ledger, Rewind)  # more than windows, if some are joined
        most = run.recovery.max_rewinds
        if before is None or len(rewinds) >= most:
            run_dir.ledger.append(GaveUp(spike=spike))
            step = before.step if before else 0
            raise TrainingError(_why_no_rewind(run, run_dir, spike, rewinds, step))
        window = rewind_window(spike, skipped_windows(ledger), run, before.step)
        event = Rewind(spike=spike, to_step=before.step, segments=(window.start, window.stop))
        # Record the event first: it takes later steps out of the run's history, even if a crash now
        # leaves their files. If files were removed first, a crash would make steps look lost.
        run_dir.ledger.append(event)
        retention.discard_from(run_dir.checkpoints, spike.first_step)
        logger.warning(
            "recovery: %s (rewind %d of at most %d)", event.description, len(rewinds) + 1, most
        )


def _why_no_rewind(
    run: RunConfig, run_dir: RunDir, spike: Spike, rewinds: Sequence[Rewind], before: int
) -> str:
    lower = lower_rate(run, run_dir.path, before)
    off = "set recovery.spike_threshold=0 to train without rewinding"
    if spike.problem:
        off = "start another run with other settings"
    if not before:
        return (
            f"{spike}; found no checkpoint from before step {spike.first_step} to rewind to; use a "
            f"checkpoint.interval below {run.checkpoint.interval}, {lower}, or {off}"
        )
    ends = ", ".join(str(event.step) for event in rewinds)
    steps = f", at steps {ends}" if ends else ""
    return (
        f"{spike}, after {len(rewinds)} rewinds (recovery.max_rewinds={run.recovery.max_rewinds})"
        f"{steps}; {lower}, clean the documents of the segments in "
        f"{run_dir.ledger.path} ('data-pipeline audit'), raise recovery.max_rewinds, or {off}"
    )


def inherited_windows(past: Past, world: World, step: int) -> list[range]:
    """Return the windows to skip after a resume from `step`; rank 0 logs them."""
    windows = [range(*span) for span in past.windows]
    reached = segments_consumed(step, windows)
    for window in windows if world.is_main else ():
        state = "skips" if window.start >= reached else "has skipped"
        logger.info("recovery: the run %s segments %d to %d", state, window.start, window.stop - 1)
    return windows


def segments_consumed(step: int, windows: Sequence[range]) -> int:
    """Return how many segments of every lane a run has read or skipped after `step` updates."""
    count = step
    for window in windows:
        # A window at the very next segment is not consumed yet: the next batch comes after it.
        if count > window.start:
            count += len(window)
    return count


def rewind_window(spike: Spike, windows: Sequence[range], run: RunConfig, to_step: int) -> range:
    """Return the segments to skip: from one before the spike to SKIP_MARGIN_SEGMENTS after it.

    One before, because a step's loss shows what the previous update did; but not before the step
    that the run rewinds to, nor before the spike's phase.
    """
    first_phase = first_step_at(run, spike.first_step - 1)
    kept = segments_consumed(max(to_step, first_phase), windows)
    stop = segments_consumed(spike.last_step, windows) + SKIP_MARGIN_SEGMENTS
    return range(max(kept, segments_consumed(spike.first_step, windows) - 2), stop)


def skip_windows(
    batches: Iterable[SegmentBatch], num_consumed: int, windows: Sequence[range]
) -> Iterator[SegmentBatch]:
    """Yield the batches outside `windows`; `num_consumed` segments came before the first.

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
