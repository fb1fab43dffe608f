from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.cli import main
from pretrain.config.data import DataConfig
from pretrain.config.model import ModelConfig
from pretrain.config.run import CheckpointConfig, RunConfig
from pretrain.costs.cluster import ClusterConfig, Hardware
from pretrain.costs.memory import checkpoint_bytes
from pretrain.costs.run_time import SLOWER_WHILE_WRITING, FailureCosts, failure_costs

CONFIGS = Path(__file__).parents[3] / "configs"
HOUR = FailureCosts(between_failures=3600.0, pause=30.0)
RUN = RunConfig(
    model=ModelConfig(vocab_size=1000, num_layers=4, d_model=64, num_heads=4, memory_length=32),
    data=DataConfig(lanes=16, segment_length=32),
)


def test_goodput_without_overlap_is_that_of_daly():
    costs = replace(HOUR, start=300.0)
    # Equation 13: wall time over solve time.
    mean, interval = 3600.0, 450.0
    wall = mean * math.exp(300 / mean) * (math.exp((interval + 30) / mean) - 1) / interval
    assert costs.goodput(interval) == pytest.approx(1 / wall, rel=1e-12)


@pytest.mark.parametrize("costs", [HOUR, replace(HOUR, write=100.0, down=200.0, start=300.0)])
def test_no_other_interval_has_a_higher_goodput(costs):
    best = costs.goodput(costs.best_interval)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert costs.goodput(factor * costs.best_interval) < best


@pytest.mark.parametrize("pause", [1.0, 100.0, 1700.0, 1900.0, 3600.0, 7000.0, 7300.0, 1e5])
def test_the_best_interval_loses_no_goodput_however_long_a_pause_is(pause):
    costs = replace(HOUR, pause=pause)
    best = max(costs.goodput(3.6 * part) for part in range(1, 1001))
    assert costs.goodput(costs.best_interval) >= 0.998 * best


def test_a_save_is_not_started_before_the_one_before_is_written():
    costs = replace(HOUR, pause=1.0, write=200.0)
    assert costs.best_interval == 200.0
    assert costs.goodput(100.0) < costs.goodput(200.0)


def test_costs_follow_from_the_cluster_and_the_size_of_a_checkpoint():
    node = ClusterConfig(ranks_per_node=2, mtbf_hours=1000.0, disk_mib_per_second=1.0)
    hardware = Hardware(nodes=4, ranks_per_node=2, name="cpu", node=node)
    transfer = checkpoint_bytes(RUN) / 4 / (1 << 20)
    blocking = replace(RUN, checkpoint=CheckpointConfig(asynchronous=False))
    assert failure_costs(blocking, hardware) == FailureCosts(
        between_failures=900_000.0, pause=transfer, down=600.0, start=transfer
    )
    assert failure_costs(RUN, hardware) == FailureCosts(
        between_failures=900_000.0, pause=SLOWER_WHILE_WRITING * transfer, write=transfer,
        down=600.0, start=transfer,
    )  # fmt: skip


def described(capsys, tmp_path, *lines: str) -> str:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("\n".join(["gpus_per_node: h100:8", *lines]) + "\n")
    model = str(CONFIGS / "models" / "xl_modern_7b.yaml")
    place = ["--cluster", str(cluster), "--nodes", "64"]
    assert main(["describe", model, *place, "data.lanes=512"]) == 0
    return capsys.readouterr().out


def test_describe_prints_the_best_interval_of_a_cluster_whose_failures_are_known(capsys, tmp_path):
    assert "best interval" not in described(capsys, tmp_path)
    few = described(capsys, tmp_path, "mtbf_hours: 6300")
    assert "4.1 days  on average, one of 64 nodes" in few
    assert "with checkpoint.interval=200" in few
    many = described(capsys, tmp_path, "mtbf_hours: 63")
    steps = [int(text.partition("best interval")[2].split()[0]) for text in (few, many)]
    assert steps[1] == pytest.approx(steps[0] / 10, rel=0.03)  # the root of a hundredth
