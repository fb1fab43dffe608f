"""`pretrain train`: build everything a run needs, then the loop."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.config_loader import load_config
from data_pipeline.errors import UserError
from pretrain.config import RunConfig, accumulation_steps, lanes_of_rank
from pretrain.faults import Fault, fault_from_environment
from pretrain.local_ranks import EXIT_STOPPED
from pretrain.schedule import learning_rate_at

if TYPE_CHECKING:
    from data_pipeline.lanes import LaneStream, SegmentBatch
    from pretrain.checkpoint import Checkpointer
    from pretrain.distributed import World
    from pretrain.engine import Engine
    from pretrain.heartbeat import Heartbeat
    from pretrain.metrics import Metrics
    from pretrain.preemption import StopRequest
    from pretrain.run_dir import RunDir
    from pretrain.state import TrainState


def train(
    run: RunConfig,
    engine: Engine,
    lanes: Iterator[SegmentBatch],
    state: TrainState,
    checkpointer: Checkpointer,
    metrics: Metrics,
    evaluate: Callable[[], dict[str, float]],
    stop: StopRequest,
    fault: Fault,
    heartbeat: Heartbeat,
) -> bool:
    """Train until `optim.steps` (returns True) or until any rank is asked to stop; both leave a checkpoint behind."""
    while state.step < run.optim.steps:
        batch = next(lanes)
        for slot, part in enumerate(batch.split(len(state.memories))):
            # A slot is a fixed group of lanes, so each slot carries its own memory from step to step.
            loss, state.memories[slot] = engine.forward_backward(part, state.memories[slot], state.step)
            metrics.add_loss(loss)
        learning_rate = learning_rate_at(run.optim, state.step)
        with metrics.saving():
            checkpointer.wait_for_copy()  # the update changes what is still being copied
        result = engine.step(learning_rate)
        state.step += 1
        state.tokens_seen += run.tokens_per_step
        state.cursor = batch.cursor
        metrics.end_step(state, result, learning_rate)

        stopping = stop.requested_on_any_rank()
        finished = state.step == run.optim.steps
        saving = finished or stopping or state.step % run.checkpoint.interval == 0
        if saving or state.step % run.metrics.interval == 0:
            metrics.write()
        fault.strike(state.step)
        if finished or (run.evaluation.interval and state.step % run.evaluation.interval == 0):
            heartbeat.beat(state.step, "evaluate")
            metrics.write_evaluation(state.step, evaluate())
        if saving:
            heartbeat.beat(state.step, "save")
            with metrics.saving():
                checkpointer.save(engine, state)
                if finished or stopping:
                    checkpointer.finish()
        if stopping and not finished:
            return False
        heartbeat.beat(state.step, "train")
    return True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `pretrain train`, one rank's program."""
    parser.add_argument("config", type=Path, help="experiment file (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="settings that replace those of the file")
    parser.add_argument(
        "--run-dir", type=Path, required=True, help="where checkpoints and metrics go; resumed if it holds this run"
    )


def run(arguments: argparse.Namespace) -> int:
    """Train or resume the run of this directory as one rank of WORLD_SIZE."""
    config = resolve(load_config(RunConfig, arguments.config, arguments.overrides))
    set_threads(config)
    from pretrain.distributed import init_world, leave_world

    world = init_world()
    try:
        return _train_in(config, arguments.run_dir, world)
    finally:
        leave_world()


def resolve(config: RunConfig) -> RunConfig:
    """Fill in what follows from the corpus, the vocabulary size; refuse a corpus that cannot fill the lanes."""
    from data_pipeline.lanes import LaneStream
    from data_pipeline.mixture import open_training_data
    from data_pipeline.tokenizer import Tokenizer

    corpus = open_training_data(config.data.path, config.data.mixture)
    LaneStream(corpus, config.data.lanes, config.seed, config.data.segment_length, range(1))
    vocab_size = Tokenizer.load(corpus.tokenizer_directory).vocab_size
    if config.model.vocab_size not in (0, vocab_size):
        raise UserError(
            f"model.vocab_size={config.model.vocab_size}, but the tokenizer of {config.data.path} has {vocab_size} "
            "tokens; leave the setting out, it is taken from the corpus"
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))


def set_threads(config: RunConfig) -> None:
    """Give every rank its share of the cores, more makes ranks wait for each other; and vanishing numbers no time."""
    import torch

    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    torch.set_num_threads(config.engine.threads or max(1, (os.cpu_count() or 1) // max(1, ranks_here)))
    # Weights below 1e-38, such as alibi's of far keys, cost a CPU a hundred times as much as zeros do.
    torch.set_flush_denormal(True)


def build_engine(config: RunConfig, world: World) -> Engine:
    """The model with its published initialisation, the same on every rank, inside the engine the run asks for."""
    import torch

    from pretrain.model.transformer_xl import TransformerXL

    torch.manual_seed(config.seed)
    engine = config.engine
    module = TransformerXL(
        config.model, engine.activation_checkpointing, engine.attention_kernel, engine.head_chunk_tokens
    )
    slots = accumulation_steps(config, world.world_size)
    if config.engine.kind == "torch":
        from pretrain.engine import TorchEngine

        return TorchEngine(config, module, world, slots)
    from pretrain.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(config, module, world, slots)


def _train_in(config: RunConfig, directory: Path, world: World) -> int:
    from pretrain.distributed import raise_together
    from pretrain.heartbeat import Heartbeat
    from pretrain.preemption import StopRequest
    from pretrain.run_dir import RunDir

    lanes_of_rank(config, world.rank, world.world_size)
    accumulation_steps(config, world.world_size)
    fault = fault_from_environment()
    run_dir = RunDir(directory)
    with contextlib.ExitStack() as stack:
        # Rank 0 opens the directory for all; if it is refused, every rank ends with the same words.
        with raise_together():
            if world.is_main:
                stack.enter_context(run_dir.locked())
                RunDir.create_or_resume(directory, config)
        stop = StopRequest()
        stack.callback(stop.restore_handlers)
        heartbeat = stack.enter_context(Heartbeat(run_dir.heartbeats, world.rank, config.engine.hang_seconds))
        return _train_locked(config, run_dir, world, stop, fault, heartbeat)


def _train_locked(
    config: RunConfig, run_dir: RunDir, world: World, stop: StopRequest, fault: Fault, heartbeat: Heartbeat
) -> int:
    from data_pipeline.lanes import LaneStream
    from data_pipeline.mixture import open_training_data
    from data_pipeline.prefetch import Prefetcher
    from pretrain.checkpoint import Checkpointer
    from pretrain.distributed import from_main_rank
    from pretrain.evaluate import training_evaluator
    from pretrain.metrics import Metrics
    from pretrain.state import TrainState

    attempt = from_main_rank(os.environ.get("PRETRAIN_ATTEMPT") or secrets.token_hex(4))
    engine = build_engine(config, world)
    checkpointer = Checkpointer(config, run_dir.checkpoints, world, attempt)
    num_slots = accumulation_steps(config, world.world_size)
    state = checkpointer.restore_latest(engine) or TrainState.fresh(num_slots)
    event = {"step": state.step, "world_size": world.world_size, "attempt": attempt}
    if world.is_main:
        run_dir.append_ledger({"event": "resume" if state.step else "start", **event})
    corpus = open_training_data(config.data.path, config.data.mixture)
    lanes = lanes_of_rank(config, world.rank, world.world_size)
    stream = LaneStream(corpus, config.data.lanes, config.seed, config.data.segment_length, lanes, state.cursor)
    if stream.advice and world.is_main:
        print(stream.advice, flush=True)
    with checkpointer, Prefetcher(stream) as prefetcher:
        heartbeat.beat(state.step, "train")
        metrics = Metrics(config, run_dir, world, state, prefetcher)
        evaluate = training_evaluator(config, engine)
        finished = train(config, engine, prefetcher, state, checkpointer, metrics, evaluate, stop, fault, heartbeat)
        metrics.close(finished)
    event |= {"step": state.step, "tokens_of_corpora": _tokens_of_corpora(stream, state, world)}
    if world.is_main:
        run_dir.append_ledger({"event": "finish" if finished else "stop", **event})
    return 0 if finished else EXIT_STOPPED


def _tokens_of_corpora(stream: LaneStream, state: TrainState, world: World) -> dict[str, int]:
    """How many tokens of each corpus all lanes have read since the run began, by directory."""
    import torch

    from pretrain.distributed import sum_over_ranks

    counts = stream.tokens_read(state.cursor)
    totals = sum_over_ranks(torch.tensor(list(counts.values()), dtype=torch.int64, device=world.device))
    return dict(zip(counts, totals.tolist(), strict=True))
