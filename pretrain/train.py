"""The training loop alone; `pretrain/run.py` builds the objects that it uses."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from data_pipeline.lanes.segment_batch import SegmentBatch
from pretrain.checkpoint.checkpointer import Checkpointer
from pretrain.checkpoint.local_checkpoints import LocalCheckpoints
from pretrain.checkpoint.mirror import Mirror
from pretrain.checkpoint.replicas import NonFiniteError
from pretrain.checkpoint.verify import latest_step
from pretrain.config.run import RunConfig
from pretrain.distributed.world import World
from pretrain.engines.engine import Engine
from pretrain.engines.memory_offload import MemoryOffload
from pretrain.metrics.recorder import MetricsRecorder
from pretrain.metrics.wandb_writer import Copy
from pretrain.model.memory import MemoryLayout
from pretrain.optim.schedule import learning_rate_at
from pretrain.recovery.faults import Fault
from pretrain.recovery.rewind import SpikeMonitor
from pretrain.recovery.stop_requests import Agreement, StopRequest, StopRequested
from pretrain.rundir.changed_settings import lower_rate
from pretrain.rundir.events import Outcome, Spike
from pretrain.rundir.heartbeat import Heartbeat
from pretrain.rundir.lock import Fence
from pretrain.rundir.run_dir import RunDir
from pretrain.state import TrainState, memories_without


@dataclass(frozen=True)
class RankProcess:
    """What a rank keeps for the life of its process, across restarts of the run inside it."""

    config: RunConfig  # the latest, with all phases, as the user wrote it
    run_dir: RunDir
    world: World
    fence: Fence
    stop: StopRequest
    take_requests: Callable[[], set[str]]  # returns users' new requests; on rank 0
    fault: Fault
    heartbeat: Heartbeat
    data: Mapping[str, Any]  # facts about the corpora for the ledger; on rank 0 only
    copy: Copy  # receives the lines of metrics for Weights & Biases


@dataclass(frozen=True)
class Parts:
    """What each start builds from the latest checkpoint, and the next start replaces."""

    config: RunConfig  # at the present step, with a micro-batch that fits
    border: int  # the step at which other settings begin, or the run's last one
    engine: Engine
    state: TrainState
    batches: Iterator[SegmentBatch]
    checkpointer: Checkpointer
    metrics: MetricsRecorder
    spike_monitor: SpikeMonitor
    evaluate: Callable[[], dict[str, float]]
    mirror: Mirror
    local: LocalCheckpoints


def train(parts: Parts, process: RankProcess) -> Outcome:
    """Train until the run or its phase is finished or any rank is asked to stop, then save.

    A request to stop also ends an evaluation; the next attempt repeats the evaluation. Raises
    SpikeFound on every rank at a loss spike, and CheckpointError if storage fails for too long.
    """
    config, state, engine = parts.config, parts.state, parts.engine
    checkpointer, metrics = parts.checkpointer, parts.metrics
    offload = MemoryOffload(process.world.device, config.engine.offload_memories)
    steps = process.config.optim.steps
    if state.step < steps and not _complete_evaluation(parts, process):
        return Outcome.STOPPED
    while state.step < steps:
        # Run forward and backward slot by slot. A slot is a fixed group of lanes, so it continues
        # with the memory that it returned in the last step.
        batch = next(parts.batches)
        memories_before = list(state.memories)
        *slots, last = enumerate(batch.split(len(state.memories)))
        for slot, part in slots:
            _forward_backward(parts, offload, slot, part)
        # Among thousands of ranks the exchange of flags can take longer than the update. With more
        # than one rank it therefore runs in a thread while the last micro-batch computes; a stop
        # signal that arrives meanwhile takes effect one step later.
        answer = process.stop.ask(partial(_own_flags, parts, process))
        _forward_backward(parts, offload, *last)

        # Update the weights in place. A save in progress must have copied the old ones before.
        with metrics.saving():
            checkpointer.wait_for_copy()
            parts.local.wait_for_copy()
        learning_rate = learning_rate_at(config.optim, state.step)
        ends_interval = (state.step + 1) % config.metrics.interval == 0
        result = engine.step(learning_rate, measure_layers=ends_interval)
        if result.skipped and not result.overflowed:
            # The update was skipped for NaN or too large gradients. The hidden states of such a
            # segment could spoil all later steps, so the memories from before it are restored.
            # After an fp16 overflow they stay: the loss scale was too large for the backward pass,
            # but the forward pass was sound.
            offload.wait()
            state.memories = memories_without(MemoryLayout(config.model), batch, memories_before)
        state.advance(batch, config.tokens_per_step)
        metrics.end_step(state, result, learning_rate)

        # Agree with the other ranks on what follows.
        agreed = answer()
        parts.mirror.agree(agreed.upload, checkpointer.last_step)
        if agreed.save_failed:
            checkpointer.finish()  # a collective: gives up the save; `save_again` starts another
        outcome = _outcome_at(state.step, parts.border, steps, agreed.stop)
        asked = agreed.save or agreed.save_again
        saving = outcome is not None or asked or state.step % config.checkpoint.interval == 0
        saves_locally = not saving and parts.local.is_due(state.step)
        evaluates = agreed.evaluate or _evaluates_after(config, state.step)
        if saving or saves_locally or evaluates or state.step % config.metrics.interval == 0:
            offload.wait()
            # Check the losses first: a checkpoint of a spike would be resumed from.
            parts.spike_monitor.check(metrics.write(), ends_run=outcome is Outcome.FINISHED)
        process.fault.trigger(state.step)

        if outcome is Outcome.FINISHED:
            # Save before the last evaluation: if it crashes or runs out of time, no step is lost.
            _save(parts, process, outcome)
            break
        if evaluates and not _evaluate(parts, process):
            outcome = Outcome.STOPPED
            saving = True
        if saving:
            _save(parts, process, outcome)
        elif saves_locally:
            with metrics.saving(), _checked(parts):
                parts.local.save(engine, state, metrics.unwritten)
        if outcome is Outcome.PHASE_FINISHED:
            parts.spike_monitor.check_end(outcome)
        if outcome is not None:
            return outcome
        process.heartbeat.beat(state.step, "train")
    parts.spike_monitor.check_end(Outcome.FINISHED)
    return Outcome.FINISHED if _complete_evaluation(parts, process) else Outcome.STOPPED


def _forward_backward(parts: Parts, offload: MemoryOffload, slot: int, part: SegmentBatch) -> None:
    memories = parts.state.memories
    memory = offload.fetch(slot, memories[slot])
    loss, memory = parts.engine.forward_backward(part, memory, parts.state.step)
    memories[slot] = offload.store(slot, memory)
    parts.metrics.add_loss(loss)


def _own_flags(parts: Parts, process: RankProcess) -> Agreement:
    """Return this rank's flags for saves, uploads and requests; `StopRequest.ask` adds stops."""
    saves, requests = parts.checkpointer, process.take_requests()
    return Agreement(
        save="save" in requests,
        evaluate="evaluate" in requests,
        save_failed=saves.has_failed,
        save_again=saves.is_to_try_again,
        upload=parts.mirror.is_due(saves.published_step),
    )


def _outcome_at(step: int, border: int, steps: int, stopping: bool) -> Outcome | None:
    """Return how the loop ends after this step of `steps`; None if it continues."""
    if step == steps:
        return Outcome.FINISHED
    if stopping:
        return Outcome.STOPPED
    return Outcome.PHASE_FINISHED if step == border else None


def _evaluates_after(config: RunConfig, step: int) -> bool:
    """Return whether the validation loss is measured after this step."""
    interval = config.evaluation.interval
    return step == config.optim.steps or bool(step and interval and step % interval == 0)


def _evaluate(parts: Parts, process: RankProcess) -> bool:
    """Measure and write the validation loss; return False if a stop request ended it.

    Raises TrainingError on every rank if the loss after the run's last step is not finite.
    """
    process.heartbeat.beat(parts.state.step, "evaluate")
    try:
        evaluation = parts.evaluate()
    except StopRequested:
        return False
    step = parts.state.step
    parts.metrics.write_evaluation(step, evaluation)
    if step == parts.config.optim.steps and not math.isfinite(evaluation["loss"]):
        spike = Spike(step, step, problem="the validation loss is not finite")
        before = latest_step(process.run_dir.checkpoints, step)
        advice = lower_rate(process.config, process.run_dir.path, before)
        parts.spike_monitor.give_up(
            spike, "so the run is not finished; its weights are finite: evaluate them with "
            f"engine.precision=fp32, or {advice}",
        )  # fmt: skip
    return True


def _complete_evaluation(parts: Parts, process: RankProcess) -> bool:
    """Evaluate the present step if that is due and not done; return False if asked to stop."""
    step = parts.state.step
    if not _evaluates_after(parts.config, step) or parts.metrics.has_evaluation(step):
        return True
    return _evaluate(parts, process)


@contextlib.contextmanager
def _checked(parts: Parts) -> Iterator[None]:
    """Rewind the run or give up, on every rank, if the block finds NaN or inf in what it saves."""
    try:
        yield
    except NonFiniteError as error:
        parts.spike_monitor.check_saved(parts.state.step, error)


def _save(parts: Parts, process: RankProcess, outcome: Outcome | None) -> None:
    """Start a checkpoint of this step; if the loop ends here, wait until it is published."""
    process.heartbeat.beat(parts.state.step, "save")
    with parts.metrics.saving(), _checked(parts):
        # No checkpoint before its metrics are on disk (`obstacle`): a run that resumes from it
        # would never write them again.
        save = partial(
            parts.checkpointer.save,
            parts.engine,
            parts.state,
            obstacle=parts.metrics.unwritten,
            suspected_since=parts.spike_monitor.suspected_since,
        )
        if outcome is None:
            save()
        else:
            parts.checkpointer.until_published(save)
    if outcome is not None:
        # No next step will exchange flags, so agree on the upload here. It runs during the last
        # evaluation; the next phase continues it, and after a stop the run waits for it (`run.py`).
        agreed = _own_flags(parts, process).agreed()
        parts.mirror.agree(agreed.upload, parts.checkpointer.last_step)
