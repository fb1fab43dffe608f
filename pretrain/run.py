"""Everything around the loop: a run's directory, its state, its lanes; and starting over inside this process.

A run goes back in the way it is resumed: everything is built anew from the newest good checkpoint.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch

from data_pipeline.lanes.lane_stream import LaneStream
from data_pipeline.lanes.mixture import open_training_data
from data_pipeline.lanes.prefetch import Prefetcher
from pretrain.checkpoint import marker
from pretrain.checkpoint.checkpointer import Checkpointer
from pretrain.config.phases import (
    begins_phase,
    describe_phase,
    lane_seed_at,
    run_at,
    runs_of_phases,
)
from pretrain.config.run import RunConfig, accumulation_steps, lanes_of_rank
from pretrain.distributed.world import World, broadcast_object, raise_on_all_ranks, sum_over_ranks
from pretrain.engines.engine import Engine, check_precision
from pretrain.evaluation.evaluate import training_evaluator
from pretrain.metrics.recorder import MetricsRecorder
from pretrain.metrics.stragglers import ForwardClock
from pretrain.model.transformer_xl import TransformerXL
from pretrain.recovery.faults import Fault, fault_from_environment
from pretrain.recovery.loss_spikes import (
    memory_settings,
    segments_consumed,
    skip_windows,
    skipped_windows,
    with_fitting_micro_batch,
)
from pretrain.recovery.rewind import SpikeFound, SpikeMonitor, name_suspects, rewind
from pretrain.recovery.stop_requests import StopRequest
from pretrain.rundir.code_version import code_version
from pretrain.rundir.exit_status import EXIT_OUT_OF_MEMORY, EXIT_STOPPED
from pretrain.rundir.fence import VARIABLE, Fence
from pretrain.rundir.heartbeat import Heartbeat
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.training_events import (
    Finished,
    OutOfMemory,
    PhaseFinished,
    Resumed,
    Started,
    Stopped,
)
from pretrain.state import TrainState
from pretrain.train import train
from pretrain.weights.initial_weights import check_initial_weights, load_initial_weights

logger = logging.getLogger(__name__)

SHARDS_BESIDE_LANES = (
    5  # that a rank may have open: two used last in each split, and the one it turns to
)


@dataclass(frozen=True)
class Start:
    """One start of this process as a rank: what stays as it is however often the run begins over in here."""

    config: RunConfig  # with all its phases, as the user wrote it
    run_dir: RunDir
    world: World
    fence: Fence
    stop: StopRequest
    fault: Fault
    heartbeat: Heartbeat


def run_training(config: RunConfig, directory: Path, world: World) -> int:
    """Train or resume the run of this directory; the exit status: 0 finished, 75 stopped, 76 out of memory."""
    check_precision(config.engine.precision, world.device)
    for phase in runs_of_phases(config):
        lanes_of_rank(phase, world.rank, world.world_size)
        accumulation_steps(phase, world.world_size)
    fault = fault_from_environment()
    run_dir = RunDir(directory)
    token = os.environ.get(VARIABLE)
    with contextlib.ExitStack() as stack:
        # Rank 0 opens the directory for all; if it is refused, every rank ends with the same words.
        with raise_on_all_ranks():
            if world.is_main:
                if not run_dir.exists():
                    check_initial_weights(config)
                stack.enter_context(run_dir.locked(is_fenced=token is not None))
                RunDir.create_or_resume(directory, config)
        fence = Fence(run_dir.path, broadcast_object(token or secrets.token_hex(4)))
        if world.is_main and token is None:
            fence.claim()
        stop = StopRequest()
        stack.callback(stop.restore_handlers)
        heartbeat = stack.enter_context(
            Heartbeat(run_dir.heartbeats, world.rank, config.engine.watchdog_timeout_seconds)
        )
        start = Start(config, run_dir, world, fence, stop, fault, heartbeat)
        for number in itertools.count():
            status = _attempt(start, f"{fence.token}.{number}" if number else fence.token)
            if status is not None:
                return status
            gc.collect()  # the engine that was left holds on to itself
    raise AssertionError("attempts are counted without end")


def _attempt(start: Start, attempt: str) -> int | None:
    """Train from the newest checkpoint on; the exit status, or None when this process has to begin over from there."""
    run_dir, world = start.run_dir, start.world
    ledger = broadcast_object(run_dir.ledger.read() if world.is_main else [])
    config = with_fitting_micro_batch(
        run_at(start.config, _step_to_go_on_from(start)), world.world_size, ledger
    )
    try:
        return _train_from_newest(start, config, attempt)
    except SpikeFound as found:
        spike = found.spike
    except torch.OutOfMemoryError as error:
        # A rank that finds no memory leaves the others waiting for it, so together they can only start again.
        _note_out_of_memory(config, run_dir, world, str(error))
        return None if world.world_size == 1 else EXIT_OUT_OF_MEMORY
    rewind(start.config, run_dir, world, spike)
    return None


def _train_from_newest(start: Start, config: RunConfig, attempt: str) -> int | None:
    """As `_attempt`; `config` is the run in the phase that the newest checkpoint begins or is in."""
    run_dir, world, fence = start.run_dir, start.world, start.fence
    engine = start.fault.wrap(build_engine(config, world))
    checkpointer = Checkpointer(
        config, run_dir.checkpoints, world, attempt, run_dir.identity.id, fence.check
    )
    state = checkpointer.restore_latest(engine)
    if state is None:
        state = TrainState.fresh(accumulation_steps(config, world.world_size))
        load_initial_weights(engine, config)
    if world.is_main:
        began = Resumed if state.step else Started
        run_dir.ledger.append(
            began(
                step=state.step,
                world_size=world.world_size,
                attempt=attempt,
                code=code_version(),
            )
        )
    lane_seed = lane_seed_at(config, state.step)
    stream = _open_lanes(start, config, engine, state, lane_seed)
    windows = broadcast_object(skipped_windows(run_dir.ledger.read()) if world.is_main else [])
    batches = skip_windows(stream, segments_consumed(state.step, windows), windows)
    with checkpointer, Prefetcher(batches) as prefetcher:
        start.heartbeat.beat(state.step, "train")
        clock = ForwardClock(engine.module, world.device)
        metrics = MetricsRecorder(config, run_dir, world, state, prefetcher, clock, fence.check)
        spike_monitor = SpikeMonitor(config, run_dir, world, state)
        evaluate = training_evaluator(config, engine)
        try:
            finished = train(
                config, engine, prefetcher, state, checkpointer, metrics, evaluate, spike_monitor,
                start.stop, start.fault, start.heartbeat,
            )  # fmt: skip
        except SpikeFound:
            checkpointer.finish()  # it may be the one to go back to
            raise
        goes_on = (
            begins_phase(config, state.step)
            and not finished
            and not start.stop.requested_on_any_rank()
        )
        metrics.close()
    tokens_of_corpora = _tokens_of_corpora(stream, state, world)
    if world.is_main:
        ended = Finished if finished else PhaseFinished if goes_on else Stopped
        run_dir.ledger.append(
            ended(
                step=state.step,
                world_size=world.world_size,
                attempt=attempt,
                lanes=config.data.lanes,
                lane_seed=lane_seed,
                segment_length=config.data.segment_length,
                tokens_of_corpora=tokens_of_corpora,
            )
        )
        if finished:
            logger.info("finished; metrics in %s", run_dir.metrics)
        elif goes_on:
            logger.info(describe_phase(config, state.step))
        else:
            logger.info("stopped and saved; rerun the command to resume")
    if goes_on:
        return None
    return 0 if finished else EXIT_STOPPED


def _open_lanes(
    start: Start, config: RunConfig, engine: Engine, state: TrainState, seed: int
) -> LaneStream:
    """The lanes of this rank where the state left them, after the suspects of a rewind were named."""
    world, data = start.world, config.data
    corpus = open_training_data(data.path, data.mixture, data.cache)
    lanes = lanes_of_rank(config, world.rank, world.world_size)
    corpus.check_capacity(ranks_here() * (len(lanes) + SHARDS_BESIDE_LANES))
    name_suspects(start.config, start.run_dir, engine, corpus, state, lanes)
    stream = LaneStream(corpus, data.lanes, seed, data.segment_length, lanes, state.cursor)
    if stream.advice and world.is_main:
        logger.warning(stream.advice)
    return stream


def _step_to_go_on_from(start: Start) -> int:
    """The step of the newest good checkpoint, where it matters."""
    if not start.config.data.phases:
        return 0
    run_dir, world = start.run_dir, start.world
    with raise_on_all_ranks():
        good = (
            marker.latest_valid(run_dir.checkpoints, lambda text: None, run_dir.identity.id)
            if world.is_main
            else None
        )
    return broadcast_object(good.index["step"] if good else 0)


def _note_out_of_memory(config: RunConfig, run_dir: RunDir, world: World, error: str) -> None:
    """Let every later start take less at a time."""
    lanes = len(lanes_of_rank(config, world.rank, world.world_size)) // accumulation_steps(
        config, world.world_size
    )
    run_dir.ledger.append(
        OutOfMemory(
            rank=world.rank,
            micro_batch_lanes=lanes,
            settings=memory_settings(config, world.world_size),
            message=error.splitlines()[0],
        )
    )
    logger.warning(
        "recovery: out of memory (OOM) with %d lanes per forward pass; %s from the latest checkpoint "
        "with half as many. Lanes and losses do not change",
        lanes,
        "resuming" if world.world_size == 1 else "the next start resumes",
    )


def _tokens_of_corpora(stream: LaneStream, state: TrainState, world: World) -> dict[str, int]:
    """How many tokens of each corpus all lanes have read since they began, by directory."""
    counts = stream.tokens_read(state.cursor)
    totals = sum_over_ranks(
        torch.tensor(list(counts.values()), dtype=torch.int64, device=world.device)
    )
    return dict(zip(counts, totals.tolist(), strict=True))


def set_threads(config: RunConfig) -> None:
    """Give every rank its share of the cores, more makes ranks wait for each other; and vanishing numbers no time."""
    torch.set_num_threads(config.engine.threads or max(1, (os.cpu_count() or 1) // ranks_here()))
    # Weights below 1e-38, such as alibi's of far keys, cost a CPU a hundred times as much as zeros do.
    torch.set_flush_denormal(True)


def ranks_here() -> int:
    """How many ranks share this machine."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))))


def build_engine(config: RunConfig, world: World) -> Engine:
    """The model with its published initialisation, the same on every rank, inside the engine the run asks for."""
    torch.manual_seed(config.seed)
    engine = config.engine
    build = partial(
        TransformerXL,
        config.model,
        engine.activation_checkpointing,
        engine.attention_kernel,
        engine.logits_chunk_tokens,
        engine.checkpoint_every_n_layers,
    )
    built = _engine_of_kind(config, build, world)
    if not config.optim.ema_decay:
        return built
    from pretrain.engines.ema import EmaEngine

    return cast("Engine", EmaEngine(built, config.optim.ema_decay))


def _engine_of_kind(config: RunConfig, build: Callable[[], TransformerXL], world: World) -> Engine:
    slots = accumulation_steps(config, world.world_size)
    if config.engine.kind == "torch":
        from pretrain.engines.engine import TorchEngine

        return TorchEngine(config, build(), world, slots)
    from pretrain.engines.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(config, build, world, slots)
