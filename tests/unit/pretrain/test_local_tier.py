from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from foundation.errors import ConfigError
from foundation.settings import to_tree
from pretrain.checkpoint.destinations import Disk
from pretrain.checkpoint.local_tier import MAY_DIFFER, LocalTier
from pretrain.config.engine import EngineConfig
from pretrain.config.run import CheckpointConfig, RunConfig
from pretrain.distributed.world import World
from pretrain.rundir.events import Restored, Rewind, Spike, TrainingBegan
from pretrain.rundir.ledger import LAST, steps_that_stand
from tests.helpers.checkpoints import publish_step

ID = "0123456789ab"


def tier(disk: Path, world: World, run_id: str = ID) -> LocalTier:
    config = replace(RunConfig(), checkpoint=CheckpointConfig(local=disk))
    return LocalTier(config, Disk(Path(), "attempt", run_id), world, {"before": 15})


def start(attempt: str, step: int) -> TrainingBegan:
    return TrainingBegan(step=step, world_size=2, attempt=attempt)


REWIND = Rewind(spike=Spike(70, 90), to_step=60, segments=(68, 100))
RESTORED = Restored(step=40, url="s3://bucket/run")


@pytest.mark.parametrize(
    ("ledger", "standing"),
    [
        ([], {}),
        ([start("a", 0)], {"a": LAST}),
        ([start("a", 0), start("b", 50)], {"a": 50, "b": LAST}),
        ([start("a", 0), start("b", 50), start("c", 20)], {"a": 20, "b": 20, "c": LAST}),
        ([start("a", 0), start("b", 50), start("c", 80)], {"a": 50, "b": 80, "c": LAST}),
        ([start("a", 0), REWIND], {"a": 60}),
        ([start("a", 0), REWIND, start("a.1", 60)], {"a": 60, "a.1": LAST}),
        ([start("a", 0), start("b", 50), RESTORED], {"a": 40, "b": 40}),
    ],
)
def test_an_attempt_stands_up_to_where_a_later_start_or_a_rewind_went_back_to(ledger, standing):
    assert steps_that_stand(ledger) == standing


def test_a_link_in_the_place_of_a_runs_folder_is_refused_and_the_run_continues(
    world, tmp_path, caplog
):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"run-{ID}").symlink_to(tmp_path / "elsewhere")
    assert tier(tmp_path, world).find(0) is None
    assert str(tmp_path / f"run-{ID}") in caplog.text
    assert not list((tmp_path / "elsewhere").iterdir())


def test_the_id_of_a_run_leads_nowhere_else(world, tmp_path, caplog):
    assert tier(tmp_path / "disk", world, run_id="../../away").find(0) is None
    assert "../../away" in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("step", "num_ranks", "zero_stage", "why"),
    [
        (10, 1, 2, ""),
        (10, 2, 2, "step 10 .* rank 0 of 2, .* rank 0 of 1"),
        (10, 1, 1, r"step 10 .*engine\.zero_stage: 1 -> 2"),
        (20, 1, 2, "step 20 "),
    ],
)
def test_a_step_of_other_ranks_settings_or_history_is_not_used(
    world, tmp_path, caplog, step, num_ranks, zero_stage, why
):
    local = tier(tmp_path, world)
    tree = json.loads(json.dumps(to_tree(RunConfig(engine=EngineConfig(zero_stage=zero_stage)))))
    config = {name: part for name, part in tree.items() if name not in MAY_DIFFER}
    saved = {"attempt": "before", "rank": 0, "world_size": num_ranks}
    root = tmp_path / f"run-{ID}" / "rank-00000"
    publish_step(root, step, num_ranks=1, run=ID, local=saved, config=config)
    found = local.find(6)
    assert (found.step if found else 0) == (0 if why else step)
    if why:
        assert re.search(f"rank 0: {why}.* step 6", caplog.text)
        assert not list(root.glob("step-*")), "the run is about to make those steps again"


def test_local_checkpoints_come_between_the_others_at_an_absolute_path():
    with pytest.raises(ConfigError, match="local_interval=200"):
        CheckpointConfig(local=Path("/nvme"), local_interval=200)
    with pytest.raises(ConfigError, match="nvme"):
        CheckpointConfig(local=Path("nvme"))
