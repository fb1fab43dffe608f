"""What a start of a run records besides its settings: data and environment."""

import logging
from collections.abc import Mapping
from typing import Any

from foundation.typed_values import to_tree
from pretrain.config.run import RunConfig
from pretrain.distributed.collectives import gather_values, raise_on_all_ranks
from pretrain.distributed.world import World
from pretrain.recovery.environment import environment_changes, joint_environment, own_environment
from pretrain.rundir.code_version import code_version
from pretrain.rundir.events import TrainingBegan, not_bitwise
from pretrain.rundir.history import recorded_settings
from pretrain.rundir.run_dir import RunDir

logger = logging.getLogger(__name__)


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
                run_settings=None if recorded_settings(ledger.read()) else to_tree(run_dir.config),
                **data,
                **where,
            )
        )
