"""What a start of a run checks and records besides its settings: data and environment."""

import logging
from collections.abc import Mapping
from typing import Any

from data_pipeline.corpora.corpus_identity import VALIDATION, corpus_hash, split_hash, tokenizer_of
from data_pipeline.corpora.manifest import TOKENIZER_DIRECTORY
from data_pipeline.corpora.remote_corpus import local_corpus_directory
from foundation.errors import DataError
from foundation.paths import path_text
from foundation.typed_values import to_tree
from pretrain.config.evaluation_sets import hashes_of_sets, splits_of_sets
from pretrain.config.phases import runs_of_phases
from pretrain.config.run import RunConfig
from pretrain.distributed.collectives import gather_values, raise_on_all_ranks
from pretrain.distributed.world import World
from pretrain.recovery.environment import environment_changes, joint_environment, own_environment
from pretrain.rundir.code_version import code_version
from pretrain.rundir.events import Branched, TrainingBegan, not_bitwise
from pretrain.rundir.history import find_events, run_settings
from pretrain.rundir.run_dir import RunDir

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
    for event in find_events(run_dir.ledger.read(), TrainingBegan, Branched):
        # No set can have the name "" or "/".
        before |= {"": event.tokenizer, "/": event.validation, **event.sets}
    validated = f"the validation split of {path_text(config.data.path)}"
    for key, split, own in (
        ("", f"tokenizer {directory / TOKENIZER_DIRECTORY}", tokenizer),
        ("/", validated, validation),
        *((name, f"evaluation.sets.{name}", digest) for name, digest in sets.items()),
    ):
        if before.get(key, "") not in ("", own):
            raise DataError(
                f"{split} has the hash {own[:16] or '(none)'}, the run in {run_dir.path} had "
                f"{before[key][:16]}; restore it, or choose another run directory"
            )
    parts = [part for phase in runs_of_phases(config) for part in phase.data.mixture]
    paths = {path_text(part.path): part.path for part in (config.data, *parts)}
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
    before: Mapping[str, str] | None = None,
    is_local: bool = False,
) -> None:
    """Write to the ledger where training starts, and the environment; log what changed since
    `before`, the last start's environment."""
    ranks = gather_values(own_environment(world.device, run), dict[str, str])
    with raise_on_all_ranks():
        if not world.is_main:
            return
        ledger = run_dir.ledger
        environment = joint_environment(ranks)
        if step and before is None:
            logger.warning(
                "%s has no earlier start; earlier events, such as rewinds, are lost", ledger.path
            )
        changes = environment_changes((before or {}) if step else {}, environment)
        if changes:
            logger.warning(not_bitwise(changes))
        ledger.append(
            TrainingBegan(
                step=step,
                code=code_version(),
                environment=environment,
                changes=changes,
                local=is_local,
                run_settings=None if run_settings(ledger.read()) else to_tree(run_dir.config),
                **data,
                **where,
            )
        )
