"""A run around its loop: its directory, the objects that the loop uses, restarts, and its end.

The loop also ends at the end of a phase, at a loss spike and, with one rank, when memory runs out.
The run then restarts in the same process as it resumes after a crash: everything is built again
from the latest checkpoint. So there is one way to continue, which every test of a crash covers, and
nothing of the old engine or lanes can leak into what follows.
"""

import contextlib
import gc
import itertools
import logging
import os
import secrets
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data_pipeline.lanes.lane_stream import LaneStream
from data_pipeline.lanes.mixture import open_training_data
from data_pipeline.lanes.prefetcher import Prefetcher
from foundation.files import make_directory
from foundation.settings import assert_never
from pretrain.checkpoint.checkpointer import Checkpointer
from pretrain.checkpoint.disk import Disk
from pretrain.checkpoint.facts import Candidate, Destination, Fact, Past
from pretrain.checkpoint.index import Checkpoint
from pretrain.checkpoint.local_checkpoints import LocalCheckpoints
from pretrain.checkpoint.mirror import Mirror, mirror_url
from pretrain.checkpoint.resume_point import find_resume_point, refuse
from pretrain.checkpoint.storage_retry import StorageRetry, with_retries
from pretrain.checkpoint.verify import latest_step
from pretrain.config.evaluation_sets import check_same_sets, hashes_of_sets, splits_of_sets
from pretrain.config.phases import (
    SettingChange,
    describe_border,
    lane_seed_at,
    mixture_setting,
    next_border,
    run_at,
    runs_of_phases,
)
from pretrain.config.run import RunConfig, accumulation_steps, lanes_of_rank
from pretrain.costs.device_memory import check_host_memory
from pretrain.distributed.collectives import (
    broadcast_value,
    gather_values,
    raise_on_all_ranks,
    read_on_main,
    sum_over_ranks,
)
from pretrain.distributed.threads import keep_freed_memory, set_threads
from pretrain.distributed.world import World, ranks_on_this_node
from pretrain.engines.ema import EmaEngine
from pretrain.engines.engine import Engine, check_precision
from pretrain.engines.torch_engine import TorchEngine
from pretrain.errors import CheckpointError, UnreadableError
from pretrain.evaluation.training_evaluation import (
    check_training_tasks,
    training_evaluator,
    training_tasks,
)
from pretrain.metrics.recorder import MetricsRecorder
from pretrain.metrics.wandb_writer import check_wandb, wandb_copy
from pretrain.model.adopted import LanguageModel, build_adopted
from pretrain.model.parameters import WithoutDrawing
from pretrain.model.transformer_xl import TransformerXL
from pretrain.processes.device import check_tiles, set_determinism, with_precision_of_run
from pretrain.processes.flight_recorder import set_trace_files, write_last_collectives
from pretrain.processes.leaving import end_at_once, end_process
from pretrain.recovery.faults import SHORT_EVALUATION, Fault, fault_from_environment
from pretrain.recovery.faulty_engine import with_fault
from pretrain.recovery.out_of_memory import record_out_of_memory, with_fitting_micro_batch
from pretrain.recovery.rewind import (
    SpikeFound,
    SpikeMonitor,
    inherited_windows,
    rewind,
    segments_consumed,
    skip_windows,
)
from pretrain.recovery.start_record import record_start
from pretrain.recovery.stop_requests import StopRequest, UserRequests
from pretrain.rundir.attempt_files import trace_prefix
from pretrain.rundir.events import (
    ASK,
    Mirrored,
    Outcome,
    Published,
    ResumeFrom,
    Spike,
    TrainingEnded,
)
from pretrain.rundir.exit_statuses import EXIT_OUT_OF_MEMORY, EXIT_STOPPED
from pretrain.rundir.heartbeat import Heartbeat
from pretrain.rundir.history import setting_changes
from pretrain.rundir.lock import VARIABLE, Fence
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.trained_data import checked_data
from pretrain.state import TrainState
from pretrain.train import Parts, RankProcess, train
from pretrain.weights.initial_weights import check_initial_weights, load_initial_weights

logger = logging.getLogger(__name__)

# Shards that a rank may have open besides one per lane: the last two of each split, and the next.
SHARDS_BESIDE_LANES = 5
EXIT_STATUSES = {
    Outcome.FINISHED: 0,
    Outcome.STOPPED: EXIT_STOPPED,
    Outcome.OUT_OF_MEMORY: EXIT_OUT_OF_MEMORY,
}


@dataclass(frozen=True)
class Ended:
    """Why an attempt ended, and what the next one needs to know."""

    outcome: Outcome
    failed: Candidate | None = None  # a checkpoint that was verified but could not be loaded
    spike: Spike | None = None


def run_training(
    config: RunConfig,
    directory: Path,
    world: World,
    from_step: int | None = None,
    heartbeat: Heartbeat | None = None,
) -> int:
    """Train or resume the run; returns the exit status: 0 finished, 75 stopped, 76 out of memory.

    With `from_step` a user gives up what the run has published after that step. A `heartbeat` is
    given if it already runs, since before the ranks met.
    """
    config = with_precision_of_run(config, directory, world)
    check_precision(config.engine.number_format, world.device)
    check_tiles(config, world.device)
    on_gpu = world.device.type == "cuda"
    if not on_gpu:
        keep_freed_memory()
    check_host_memory(config, world.world_size, ranks_on_this_node(), on_gpu)
    for phase in runs_of_phases(config):
        accumulation_steps(phase, world.world_size)
    with _rank_process(config, directory, world, from_step, heartbeat) as process:
        failed: list[Candidate] = []
        for number in itertools.count():
            # All ranks share the token of an attempt, and no other attempt has it.
            token = f"{process.fence.token}.{number}" if number else process.fence.token
            ended = _train(process, token, failed)
            gc.collect()  # the old engine, though closed, refers to itself
            if not _continues(process, ended):
                return EXIT_STATUSES[ended.outcome]
            failed = [*failed, ended.failed] if ended.failed else []
    raise AssertionError


def _continues(process: RankProcess, ended: Ended) -> bool:
    """Return whether another attempt follows in this process; after a spike, rewind the run."""
    match ended.outcome:
        case Outcome.FINISHED | Outcome.STOPPED:
            return False
        case Outcome.PHASE_FINISHED | Outcome.UNREADABLE:
            return True
        case Outcome.OUT_OF_MEMORY:
            # Other ranks now wait for this one inside a collective, so only the launcher can
            # restart all of them.
            return process.world.world_size == 1
        case Outcome.DIVERGED:
            assert ended.spike is not None
            past = _past(process)
            rewind(process.config, process.run_dir, process.world, ended.spike, past)
            return True
        case _:
            assert_never(ended.outcome)


@contextlib.contextmanager
def _rank_process(
    config: RunConfig,
    directory: Path,
    world: World,
    from_step: int | None,
    heartbeat: Heartbeat | None,
) -> Iterator[RankProcess]:
    """Open the run's directory on rank 0 for all, and claim the run unless the launcher did."""
    fault = fault_from_environment()
    logs = RunDir(directory).logs
    set_trace_files(os.environ, logs)
    beats, seconds = RunDir(directory).heartbeats, config.engine.watchdog_timeout_seconds
    own = Heartbeat(beats, world.rank, seconds, local_rank=world.local_rank)
    heartbeat = heartbeat or own
    heartbeat.final_report = lambda: write_last_collectives(logs, world.rank, os.environ)
    token, data, take_requests = os.environ.get(VARIABLE), {}, set[str]
    with contextlib.ExitStack() as stack:
        stop = StopRequest()  # before anything waits for storage
        stack.callback(stop.restore_handlers)
        seconds = config.checkpoint.storage_patience_seconds
        retry = StorageRetry(seconds, heartbeat.repeat, lambda: stop.count)
        run_dir = RunDir(directory, retry)
        with raise_on_all_ranks():  # a run directory that is rejected is every rank's error
            if world.is_main:
                check_wandb(config.metrics.wandb_project)
                check_training_tasks(config)
                if not run_dir.exists():
                    run_dir.refuse_other_files()  # before the lock puts a file there
                    check_initial_weights(config)
                stack.enter_context(run_dir.locked(is_fenced=token is not None))
                requests = UserRequests(run_dir.ledger)
                stack.callback(signal.signal, ASK, requests.previous)
                take_requests = requests.take
                RunDir.create_or_resume(directory, config)
                if from_step is not None:
                    run_dir.ask_to_resume_from(from_step)
                make_directory(Path(trace_prefix(logs, "", os.environ)).parent)
                data = checked_data(run_dir, config)
        fence = Fence(run_dir.path, broadcast_value(token or secrets.token_hex(4), str))
        with raise_on_all_ranks():
            if world.is_main and token is None:
                with_retries(retry, fence.claim)
        # Entered before the heartbeat, so the copy ends after it: a long upload is not a hang.
        project = config.metrics.wandb_project if world.is_main else ""
        copy = stack.enter_context(wandb_copy(run_dir, project))
        if heartbeat is own:
            stack.enter_context(heartbeat)
        else:
            stack.push(heartbeat)
        yield RankProcess(
            config, run_dir, world, fence, stop, take_requests, fault, heartbeat, data, copy
        )


def _train(process: RankProcess, token: str, failed: Sequence[Candidate]) -> Ended:
    """Build everything from the checkpoint that the attempt starts with, and train.

    Checkpoints that have `failed` in this process are not tried again.
    """
    run_dir, world = process.run_dir, process.world
    set_determinism(process.config, world.device)  # a backward pass that failed may leave it strict
    past = _past(process)

    def tell(step: int, where: Destination) -> None:
        event = Published(step=step, attempt=token, destination=where)
        run_dir.ledger.append_if_possible(event)

    root, run_id, retry = run_dir.checkpoints, run_dir.identity.id, run_dir.retry
    disk = Disk(root, token, run_id, process.fence.check, run_dir.metrics, tell)
    local = LocalCheckpoints(process.config, disk, world, past.history)
    try:
        checkpoint = find_resume_point(root, world, run_id, None, retry, past, local, failed)
    except CheckpointError as error:
        is_final = past.asked is not None and not isinstance(error, UnreadableError)
        if is_final and world.is_main:  # withdraw the request, so that the next start can choose
            run_dir.ledger.append_if_possible(ResumeFrom())
        raise
    step = checkpoint.step if checkpoint else 0
    with raise_on_all_ranks():
        if world.is_main:
            run_dir.change_settings(process.config, step)
    changes = read_on_main(
        world, lambda: setting_changes(run_dir.ledger.read()), list[SettingChange]
    )
    config = run_at(process.config, step, changes)
    config = with_fitting_micro_batch(config, world.world_size, past.shortages)
    try:
        # The mirror uploads only what is in the run directory, no local checkpoints.
        saved = step
        if checkpoint and checkpoint.is_local:
            saved = read_on_main(world, lambda: latest_step(root, step), int)
        with (
            _mirror(process, disk, step, saved, past) as mirror,
            local,
            contextlib.closing(build_engine(config, world, draws=checkpoint is None)) as engine,
        ):
            try:
                outcome = _train_from(
                    engine, checkpoint, process, config, past, disk, mirror, local, changes
                )
            except (RuntimeError, MemoryError) as error:
                if world.world_size > 1:  # closing the engine could wait for the other ranks
                    if record_out_of_memory(config, run_dir, world, error):
                        end_process(EXIT_OUT_OF_MEMORY)
                    end_at_once(1)
                raise
            if outcome is not Outcome.PHASE_FINISHED:  # the next phase continues the upload
                mirror.finish(process.heartbeat.repeat, lambda: process.stop.count)
            return Ended(outcome)
    except UnreadableError as error:
        if checkpoint is None:
            raise
        refuse(checkpoint.directory, str(error), "another", world)
        where = Destination.NODES if checkpoint.is_local else Destination.RUN_DIRECTORY
        return Ended(Outcome.UNREADABLE, Candidate(checkpoint.step, where, problem=str(error)))
    except SpikeFound as raised:
        return Ended(Outcome.DIVERGED, spike=raised.spike)
    except (RuntimeError, MemoryError, OSError) as error:
        if not record_out_of_memory(config, run_dir, world, error):
            raise
        return Ended(Outcome.OUT_OF_MEMORY)


def _past(process: RankProcess) -> Past:
    mirror = process.config.checkpoint.mirror
    return read_on_main(process.world, lambda: process.run_dir.past(mirror), Past)


def _mirror(
    process: RankProcess, disk: Disk, resumed_step: int, saved_step: int, past: Past
) -> Mirror:
    """Return the run's mirror, which records in the ledger what becomes of uploads."""
    ledger, world, url = process.run_dir.ledger, process.world, mirror_url(process.config)
    history = past.history if past.asked is None else None
    uploaded = saved_step if past.stored == Fact(saved_step, Destination.STORE, url) else 0

    def note(step: int, result: float | str) -> None:
        problem, seconds = (result, 0.0) if isinstance(result, str) else ("", result)
        ledger.append_if_possible(Mirrored(step=step, url=url, seconds=seconds, problem=problem))

    return Mirror(process.config, disk, world, resumed_step, uploaded, note, history, saved_step)


def _train_from(
    engine: Engine,
    checkpoint: Checkpoint | None,
    process: RankProcess,
    config: RunConfig,
    past: Past,
    disk: Disk,
    mirror: Mirror,
    local: LocalCheckpoints,
    changes: Sequence[SettingChange],
) -> Outcome:
    """Build what the loop works with and run it; `config` is the run at the present step."""
    run_dir, world = process.run_dir, process.world
    engine = with_fault(engine, process.fault)
    checkpointer = Checkpointer(config, disk, world, run_dir.retry, mirror.held)
    if checkpoint is not None:
        state = checkpointer.restore(engine, checkpoint)
    else:
        state = TrainState.fresh(accumulation_steps(config, world.world_size))
        load_initial_weights(engine, config)
    where: dict[str, Any] = {"world_size": world.world_size, "attempt": disk.attempt}
    is_local = checkpoint is not None and checkpoint.is_local
    before = past.environment
    record_start(run_dir, world, config, state.step, process.data, where, before, is_local)
    windows = inherited_windows(past, world, state.step)
    lane_seed = lane_seed_at(config, state.step)
    stream = _open_lanes(process, config, state)
    batches = skip_windows(stream, segments_consumed(state.step, windows), windows)
    with checkpointer, Prefetcher(batches) as prefetcher:
        process.heartbeat.beat(state.step, "train")
        may_write, copy = process.fence.check, process.copy
        metrics = MetricsRecorder(
            config, run_dir, world, state, prefetcher, engine.module, may_write, copy
        )
        parts = Parts(
            config=config,
            border=next_border(process.config, state.step, changes),
            engine=engine,
            state=state,
            batches=prefetcher,
            checkpointer=checkpointer,
            metrics=metrics,
            spike_monitor=SpikeMonitor(config, run_dir, world, state),
            evaluate=_evaluator(process, config, engine, state),
            mirror=mirror,
            local=local,
        )
        try:
            outcome = train(parts, process)
        except SpikeFound:
            checkpointer.finish()  # a save in progress may be the one to rewind to
            raise
        if outcome is Outcome.PHASE_FINISHED and process.stop.requested_on_any_rank():
            outcome = Outcome.STOPPED  # asked for while the phase's last checkpoint was written
        metrics.close()
    tokens_of_corpora = _tokens_of_corpora(stream, state, world)
    if outcome is Outcome.FINISHED:
        local.remove()
    with raise_on_all_ranks():
        if world.is_main:
            event = TrainingEnded(
                outcome=outcome,
                step=state.step,
                lanes=config.data.lanes,
                lane_seed=lane_seed,
                segment_length=config.data.segment_length,
                tokens_of_corpora=tokens_of_corpora,
                **where,
            )
            run_dir.ledger.append(event)
            if outcome is Outcome.FINISHED:
                logger.info("finished; metrics in %s", run_dir.metrics)
            elif outcome is Outcome.STOPPED:
                logger.info("stopped and saved; rerun the command to resume")
            else:
                logger.info(describe_border(process.config, state.step, changes))
    return outcome


def _evaluator(
    process: RankProcess, config: RunConfig, engine: Engine, state: TrainState
) -> Callable[[], dict[str, Any]]:
    """Return a function that measures the losses of all validation sets and, when due, tasks."""

    def beat() -> None:
        process.heartbeat.beat(state.step, "evaluate")

    def before_texts() -> None:
        beat()
        process.stop.raise_if_requested()

    with raise_on_all_ranks():
        sets = splits_of_sets(process.config)
    check_same_sets(gather_values(hashes_of_sets(sets), dict[str, str]))
    losses = training_evaluator(config, engine, sets, beat, process.stop.raise_if_requested)
    tasks = None
    if config.evaluation.tasks:
        tasks = training_tasks(config, engine, before_texts)

    def measure() -> dict[str, Any]:
        is_short = process.fault == Fault(state.step, SHORT_EVALUATION)
        is_last = state.step == config.optim.steps and not is_short
        measured = losses(config.evaluation.scored_tokens(is_last))
        return measured | tasks(state.step) if tasks else measured

    return measure


def _open_lanes(process: RankProcess, config: RunConfig, state: TrainState) -> LaneStream:
    """Open this rank's lanes from the state's cursor on."""
    world, data, seed = process.world, config.data, lane_seed_at(config, state.step)
    setting = mixture_setting(process.config, state.step)
    corpus = open_training_data(data.path, data.mixture, data.cache, data.manifest_hashes, setting)
    lanes = lanes_of_rank(config, world.rank, world.world_size)
    corpus.check_capacity(ranks_on_this_node() * (len(lanes) + SHARDS_BESIDE_LANES))
    length = config.lane_tokens_per_step
    stream = LaneStream(corpus, data.lanes, seed, length, lanes, state.cursor)
    if stream.advice and world.is_main:
        logger.warning(stream.advice)
    return stream


def _tokens_of_corpora(stream: LaneStream, state: TrainState, world: World) -> dict[str, int]:
    """Return how many tokens of each corpus, by directory, all lanes have read by now."""
    counts = stream.tokens_read(state.cursor)
    own = torch.tensor(list(counts.values()), dtype=torch.int64, device=world.device)
    total = sum_over_ranks(own)
    return dict(zip(counts, total.tolist(), strict=True))


def set_threads_of_rank() -> None:
    """Set this rank's CPU threads: OMP_NUM_THREADS, or an equal part of the node's cores."""
    # More threads than cores make ranks wait for each other inside every operation. A rank may be
    # bound to fewer cores than its part.
    cores = max(1, (os.cpu_count() or 1) // ranks_on_this_node())
    cores = min(cores, len(os.sched_getaffinity(0)))
    set_threads(0 if "OMP_NUM_THREADS" in os.environ else cores)
    # Processes of torch's compiler, which otherwise takes all cores for each rank.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(cores))


def build_engine(config: RunConfig, world: World, draws: bool = True) -> Engine:
    """Return the engine of the run, with the same published initialization on every rank.

    Without `draws` its matrices are zero, for a checkpoint to replace.
    """
    torch.manual_seed(config.seed)
    engine = config.engine
    build: Callable[[], LanguageModel] = partial(
        TransformerXL,
        config.model,
        engine.activation_checkpointing,
        engine.attention_kernel,
        engine.logits_chunk_tokens,
        engine.compiles,
    )
    if config.model.adopted:
        build = partial(build_adopted, config.model)
    with contextlib.nullcontext() if draws else WithoutDrawing():
        built = _engine_of_kind(config, build, world)
    if not config.optim.ema_decay:
        return built
    return EmaEngine(built, config.optim.ema_decay)


def _engine_of_kind(config: RunConfig, build: Callable[[], LanguageModel], world: World) -> Engine:
    slots = accumulation_steps(config, world.world_size)
    match config.engine.kind:
        case "torch":
            return TorchEngine(config, build(), world, slots)
        case "deepspeed":
            from pretrain.engines.deepspeed_engine import DeepSpeedEngine

            return DeepSpeedEngine(config, build, world, slots)
        case _:
            assert_never(config.engine.kind)
