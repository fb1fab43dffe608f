"""What a start of a run checks and records besides its settings: data, environment, and memory.

What the bits of a result depend on besides the settings: versions, devices, threads.

A resume is bitwise only in the same environment: other versions, instruction sets, GPUs and numbers
of threads add in another order.

Where memory runs out (OOM), the ledger records it, and the run starts with a smaller micro-batch:
half as many lanes per forward pass and twice as many accumulation slots, which are the same lanes
and, up to rounding, the same losses.
"""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import takewhile
from typing import Any

import torch

from data_pipeline.corpora.corpus import VALIDATION, corpus_hash, split_hash, tokenizer_of
from data_pipeline.corpora.manifest import TOKENIZER_DIRECTORY
from data_pipeline.corpora.remote_corpus import local_corpus_directory
from foundation.errors import ConfigError, DataError
from foundation.files import path_text
from pretrain.config.engine import DeltaRule
from pretrain.config.evaluation_sets import hashes_of_sets, splits_of_sets
from pretrain.config.phases import runs_of_phases
from pretrain.config.run import RunConfig, accumulation_steps, lanes_of_rank
from pretrain.distributed.collectives import gather_values, raise_on_all_ranks
from pretrain.distributed.threads import describe_waiting
from pretrain.distributed.world import World
from pretrain.engines.engine import is_out_of_memory
from pretrain.kernels.delta_rule import delta_rule_here, fingerprint
from pretrain.kernels.triton.tiling import table_name
from pretrain.optim.schedule import learning_rate_at
from pretrain.rundir.events import Event, OutOfMemory, TrainingBegan, not_bitwise
from pretrain.rundir.ledger import events_of, last_of
from pretrain.rundir.metrics_file import latest_measurements
from pretrain.rundir.run_dir import RunDir, code_version

PACKAGES = ("torch", "numpy", "deepspeed")
# NCCL may sum in another order on other hosts of the same kind, by where they are in the network.
HOSTS_NAME = "hosts of NCCL"
WAITING_NAME = "threads wait"  # changes speed, but no bit of a result


def environment_of_rank(device: torch.device, run: RunConfig) -> dict[str, str]:
    """Return the environment of this process, by name."""
    kernel, is_half = run.engine.attention_kernel, run.engine.number_format != "fp32"
    on_gpu = device.type == "cuda" and bool(run.model.num_deltanet_layers)
    rule, _ = delta_rule_here(kernel, run.model, on_gpu=on_gpu, is_half=is_half)
    return {
        **{package: version(package) for package in PACKAGES},
        "CUDA": (torch.version.cuda or "unknown") if device.type == "cuda" else "none",
        "GPU": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "attention tiles": table_name() if device.type == "cuda" else "none",
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "delta rule": fingerprint() if rule is DeltaRule.FLA else "none",
        HOSTS_NAME: socket.gethostname() if device.type == "cuda" else "none",
        WAITING_NAME: describe_waiting(),
    }


def environment_of_ranks(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the environment of a start, with all values where its ranks differ.

    A single host sums in the same order as any other with its GPUs, so it has no name.
    """
    environment = {name: ", ".join(sorted({each[name] for each in ranks})) for name in ranks[0]}
    if environment[HOSTS_NAME] == ranks[0][HOSTS_NAME]:
        environment[HOSTS_NAME] = "one"
    return environment


def environment_changes(
    before: Mapping[str, str], now: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Return what differs and may change bits: name -> (before, now); nothing where one of them is
    unknown."""
    return {
        name: (before[name], now[name])
        for name in now
        if name in before and before[name] != now[name] and name != WAITING_NAME
    }


logger = logging.getLogger(__name__)


def checked_data(run_dir: RunDir, config: RunConfig) -> dict[str, Any]:
    """Return what a start records of its data, by the names of the event's fields.

    DataError if the run has trained with another tokenizer, or was evaluated on another validation
    split or on another set of that name. Cursors would notice another training split, but lanes
    that start again have none.
    """
    directory = config.data.directory()
    tokenizer, validation = tokenizer_of(directory).fingerprint, split_hash(directory, VALIDATION)
    sets = hashes_of_sets(splits_of_sets(config))
    before: dict[str, str] = {}
    for event in events_of(run_dir.ledger.read(), TrainingBegan):
        before |= {"": event.tokenizer, "/": event.validation, **event.sets}  # no names of sets
    validated = f"the validation split of {path_text(config.data.path)}"
    for key, what, own in (
        ("", f"tokenizer {directory / TOKENIZER_DIRECTORY}", tokenizer),
        ("/", validated, validation),
        *((name, f"evaluation.sets.{name}", each) for name, each in sets.items()),
    ):
        if before.get(key, "") not in ("", own):
            raise DataError(
                f"{what} has the hash {own[:16] or 'of none'}, the run in {run_dir.path} had "
                f"{before[key][:16]}; restore it, or choose another run directory"
            )
    parts = [part for phase in runs_of_phases(config) for part in phase.data.mixture]
    paths = {path_text(each.path): each.path for each in (config.data, *parts)}
    corpora = {
        name: corpus_hash(local_corpus_directory(path, config.data.cache))
        for name, path in paths.items()
    }
    return {"tokenizer": tokenizer, "validation": validation, "sets": sets, "corpora": corpora}


def record_start(
    run_dir: RunDir,
    world: World,
    run: RunConfig,
    step: int,
    data: Mapping[str, Any],
    where: dict[str, Any],
    is_local: bool = False,
) -> None:
    """Write to the ledger where and in which environment training starts; log what changed."""
    ranks = gather_values(environment_of_rank(world.device, run), dict[str, str])
    with raise_on_all_ranks():
        if not world.is_main:
            return
        ledger = run_dir.ledger
        environment = environment_of_ranks(ranks)
        before = last_of(ledger.read(), TrainingBegan) if step else None
        if step and before is None:
            logger.warning(
                "%s has no earlier start; what it said, such as rewinds, is lost", ledger.path
            )
        changes = environment_changes(before.environment if before else {}, environment)
        if changes:
            logger.warning(not_bitwise(changes))
        ledger.append(
            TrainingBegan(
                step=step,
                code=code_version(),
                environment=environment,
                changes=changes,
                local=is_local,
                **data,
                **where,
            )
        )


def report_rate(config: RunConfig, run_dir: RunDir, world: World, step: int) -> None:
    """Say where the learning rate jumps because the schedule has changed, as with more steps."""
    with raise_on_all_ranks():
        lines = latest_measurements(run_dir.metrics) if world.is_main and step else iter(())
        lines = takewhile(lambda line: line["step"] >= step, lines)
        for line in (line for line in lines if (line["kind"], line["step"]) == ("train", step)):
            before, planned = line["learning_rate"], learning_rate_at(config.optim, step - 1)
            if not math.isclose(before, planned, rel_tol=1e-6):
                logger.warning(
                    "the schedule of the learning rate has changed: step %d had %.4g, step %d has "
                    "%.4g", step, before, step + 1, learning_rate_at(config.optim, step),
                )  # fmt: skip


def record_out_of_memory(run: RunConfig, run_dir: RunDir, world: World, error: Exception) -> bool:
    """Write to the ledger, on the rank it happened on, what later starts must stay below.

    Returns False for any other error than that memory ran out.
    """
    if not is_out_of_memory(error):
        return False
    per_rank = lanes_of_rank(run, world.rank, world.world_size)
    lanes = len(per_rank) // accumulation_steps(run, world.world_size)
    run_dir.ledger.append(
        OutOfMemory(
            rank=world.rank,
            micro_batch_lanes=lanes,
            settings=memory_settings(run, world.world_size),
            message=str(error).partition("\n")[0],
        )
    )
    logger.warning(
        "recovery: out of memory (OOM) with %d lanes per forward pass; %s from the latest "
        "checkpoint with half as many. Lanes and losses do not change",
        lanes,
        "resuming" if world.world_size == 1 else "the next start resumes",
    )
    return True


def with_fitting_micro_batch(run: RunConfig, world_size: int, ledger: Sequence[Event]) -> RunConfig:
    """The run with a smaller micro-batch than those that ran out of memory with its settings.

    Raises ConfigError if a single lane did.
    """
    settings = memory_settings(run, world_size)
    failed = [
        event.micro_batch_lanes
        for event in events_of(ledger, OutOfMemory)
        if event.settings == settings
    ]
    if not failed:
        return run
    if min(failed) == 1:
        raise ConfigError(
            "a single lane per forward pass runs out of memory; use "
            "engine.activation_checkpointing=full, a higher engine.zero_stage, "
            "shorter segments or memories, or more ranks"
        )
    per_rank = len(lanes_of_rank(run, 0, world_size))
    lanes = max(lanes for lanes in range(1, min(failed) // 2 + 1) if per_rank % lanes == 0)
    return replace(run, engine=replace(run.engine, micro_batch_lanes=lanes))


def memory_settings(run: RunConfig, world_size: int) -> dict[str, Any]:
    """What determines how much memory a lane takes, except the model, which a run never changes."""
    names = (
        "zero_stage", "precision", "activation_checkpointing", "offload_optimizer",
        "offload_memories", "logits_chunk_tokens",
    )  # fmt: skip
    engine = {name: getattr(run.engine, name) for name in names}
    return {"world_size": world_size, "segment_length": run.data.segment_length, **engine}
