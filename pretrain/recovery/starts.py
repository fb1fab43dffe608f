"""What a start of a run checks and records besides its settings: data and environment.

What the bits of a result depend on besides the settings: versions, devices, threads.

A resume is bitwise only in the same environment: other versions, instruction sets, GPUs and numbers
of threads add in another order.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch

from data_pipeline.corpora.corpus import VALIDATION, corpus_hash, split_hash, tokenizer_of
from data_pipeline.corpora.manifest import TOKENIZER_DIRECTORY
from data_pipeline.corpora.remote_corpus import local_corpus_directory
from foundation.errors import DataError
from foundation.files import path_text
from pretrain.config.resolve import hashes_of_sets, splits_of_sets
from pretrain.config.run import RunConfig, runs_of_phases
from pretrain.distributed.threads import describe_waiting
from pretrain.distributed.world import World, gather_values
from pretrain.kernels.triton.tiling import table_name
from pretrain.rundir.events import TrainingBegan, not_bitwise
from pretrain.rundir.ledger import events_of, last_of
from pretrain.rundir.run_dir import RunDir, code_version

PACKAGES = ("torch", "numpy", "deepspeed")
WAITING_NAME = "threads wait"  # changes speed, but no bit of a result


def environment_of_rank(device: torch.device) -> dict[str, str]:
    """Return the environment of this process, by name."""
    return {
        **{package: version(package) for package in PACKAGES},
        "CUDA": (torch.version.cuda or "unknown") if device.type == "cuda" else "none",
        "GPU": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "attention tiles": table_name() if device.type == "cuda" else "none",
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        WAITING_NAME: describe_waiting(),
    }


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
    step: int,
    data: Mapping[str, Any],
    where: dict[str, Any],
    is_local: bool = False,
) -> None:
    """Write to the ledger where and in which environment training starts; log what changed.

    Where ranks differ, the environment has all their values.
    """
    ranks = gather_values(environment_of_rank(world.device), dict[str, str])
    if not world.is_main:
        return
    ledger = run_dir.ledger
    environment = {name: ", ".join(sorted({each[name] for each in ranks})) for name in ranks[0]}
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
