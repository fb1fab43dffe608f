"""What a start of a run checks and records besides its settings: the tokenizer, the environment."""

from __future__ import annotations

import logging
from typing import Any

from data_pipeline.corpora.corpus_tokenizer import tokenizer_of
from data_pipeline.corpora.manifest import TOKENIZER_DIRECTORY
from data_pipeline.errors import DataError
from pretrain.config.run import RunConfig
from pretrain.distributed.environment import environment_changes, environment_of_ranks
from pretrain.distributed.world import World
from pretrain.rundir.code_version import code_version
from pretrain.rundir.ledger import last_of
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.training_events import Resumed, Started, TrainingBegan

logger = logging.getLogger(__name__)


def checked_tokenizer(run_dir: RunDir, config: RunConfig) -> str:
    """Return the fingerprint of the corpus' tokenizer.

    DataError if the run has trained with another. Cursors would notice another corpus, but lanes
    that start again have none.
    """
    directory = config.data.directory()
    found = tokenizer_of(directory).fingerprint
    before = last_of(run_dir.ledger.read(), TrainingBegan)
    if before is not None and before.tokenizer not in ("", found):
        raise DataError(
            f"tokenizer {directory / TOKENIZER_DIRECTORY} has fingerprint {found[:16]}, the run in "
            f"{run_dir.path} was trained with {before.tokenizer[:16]}; restore the corpus, or "
            "choose another run directory"
        )
    return found


def record_start(
    run_dir: RunDir, world: World, step: int, tokenizer: str, where: dict[str, Any]
) -> None:
    """Write to the ledger where and in which environment training starts; log what changed."""
    environment = environment_of_ranks(world)
    if not world.is_main:
        return
    ledger = run_dir.ledger
    began: dict[str, Any] = {
        "step": step,
        "code": code_version(),
        "environment": environment,
        "tokenizer": tokenizer,
        **where,
    }
    if not step:
        ledger.append(Started(**began))
        return
    before = last_of(ledger.read(), TrainingBegan)
    changes = environment_changes(before.environment if before else {}, environment)
    resumed = Resumed(**began, changes=changes)
    if changes:
        logger.warning(resumed.not_bitwise)
    ledger.append(resumed)
