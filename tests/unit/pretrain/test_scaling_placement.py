"""Plans for a machine: every cell fits by `describe`, and what cannot fit is an error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pretrain.commands import scale
from pretrain.commands.describe import describe
from pretrain.costs.devices import GIB, USABLE, Hardware, device_named
from pretrain.scaling.sweep_file import config_of, read_sweep

CONFIGS = Path(__file__).parents[3] / "configs"
BASE = CONFIGS / "models" / "xl_modern_100m.yaml"
H100 = Hardware(nodes=1, ranks_per_node=8, name="H100")


def plan(tmp_path, *arguments: object, base=BASE):
    words = ["plan", base, "--no-checks", *arguments, "--output", tmp_path / "sweep.yaml"]
    return scale.PROGRAM.main([str(word) for word in words])


def cells_of(tmp_path):
    path = tmp_path / "sweep.yaml"
    return [(cell, config_of(cell, path)) for cell in read_sweep(path).cells]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A plan for 8 H100 up to 1e21 FLOPs."""
    path = tmp_path_factory.mktemp("plan")
    budgets = ("--budgets", "1e18", "1e19", "1e20", "1e21", "--holdout-budgets", "3e21")
    assert plan(path, *budgets, "--sizes", 5, "--gpu", "H100", "--gpus", 8) == 0
    return cells_of(path)


def test_every_cell_of_a_plan_up_to_1e21_flops_fits_8_h100_by_describe(planned):
    assert len(planned) == 21
    for cell, run in planned:
        said = describe(run, H100).text
        assert f"per rank, fits in {H100.usable_memory / GIB:.2f} GiB" in said, cell.name
        assert cell.facts["device_gib"] <= H100.usable_memory / GIB
        memory = re.search(r"device memory +([\d.,]+) GiB", said)
        saved = re.search(r"checkpoint +([\d.,]+) GiB ", said)
        assert memory
        assert saved
        assert float(memory[1]) == pytest.approx(cell.facts["device_gib"], abs=0.006)
        assert float(saved[1]) == pytest.approx(cell.facts["checkpoint_gib"], abs=0.006)
        training = re.search(r"\n  run .*\(([\d.,]+) GPU-hours", said)
        assert training
        gpu_hours = float(training[1].replace(",", ""))
        assert gpu_hours == pytest.approx(8 * cell.facts["hours"], abs=0.06)


def test_the_largest_cells_need_and_get_smaller_passes_or_offloading(planned):
    engines = [run.engine for _, run in planned]
    assert any(engine.micro_batch_lanes for engine in engines)
    assert any(not engine.micro_batch_lanes for engine in engines), "the small ones do not"
    assert all(engine.precision == "auto" for engine in engines), "chosen where the cell runs"
    for _, run in planned:
        own, rest = divmod(run.data.lanes, 8)
        assert rest == 0
        assert max(step for step in (1, 2, 4, 8, 16, 32) if own % step == 0) >= own / 16


def test_a_cell_that_cannot_fit_is_one_line_with_the_ranks_that_would_do(tmp_path, capsys):
    arguments = ("--budgets", "3e22", "--sizes", 1, "--gpu", "H100", "--gpus", 1)
    assert plan(tmp_path, *arguments, "--tokens-per-parameter", 2) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(
        r"error: at 3e\+22 FLOPs \d+x\d+ do not fit into 68.5 GiB on each of 1 rank \(H100\): no "
        r"engine setting makes it fit here; use \d+ ranks.*\n",
        said,
    ), said
    assert not (tmp_path / "sweep.yaml").exists()


def test_host_memory_is_checked_if_it_is_known(tmp_path, capsys):
    arguments = ("--budgets", "1e21", "--sizes", 1, "--gpu", "H100", "--gpus", 8)
    assert plan(tmp_path, *arguments, "--host-memory", "1T") == 0
    ((cell, _),) = cells_of(tmp_path)
    assert 10 < cell.facts["host_gib"] < 1e12 / GIB
    assert plan(tmp_path, *arguments, "--host-memory", "150G") == 2
    assert "exceeds --host-memory" in capsys.readouterr().err


def test_a_machine_with_no_gpu_or_half_named_is_refused(tmp_path, capsys):
    assert plan(tmp_path, "--budgets", "1e18", "--nodes", 2) == 2
    assert "need a machine: add --cluster FILE, or --gpu H100 --gpus 8" in capsys.readouterr().err


def test_small_cells_of_a_cluster_get_fewer_nodes(tmp_path, capsys):
    cluster = CONFIGS / "clusters" / "8xh100.yaml"
    budgets = ("--budgets", "1e17", "1e20", "--sizes", 2, "--spread", 4)
    assert plan(tmp_path, *budgets, "--cluster", cluster, "--nodes", 16) == 0
    assert f"--cluster {cluster} --nodes 1:16, then" in capsys.readouterr().out
    nodes = [cell.facts["nodes"] for cell, _ in cells_of(tmp_path)]
    assert nodes[0] < 16
    assert nodes[-1] == 16
    for (cell, run), count in zip(cells_of(tmp_path), nodes, strict=True):
        assert run.data.lanes % (8 * count) == 0, cell.name


def test_ratios_plan_one_size_for_each_at_every_budget(tmp_path):
    assert plan(tmp_path, "--budgets", "1e19", "1e20", "--ratios", 20, 80, 320) == 0
    found = [cell.facts["tokens"] / cell.facts["parameters"] for cell, _ in cells_of(tmp_path)]
    assert found == pytest.approx([320, 80, 20] * 2, rel=0.15)


@pytest.mark.parametrize("flags", [("A100-40",), ("A100", "--gpu-memory", "40GB")])
def test_a_gpu_of_less_memory_gets_cells_that_fit_it_and_is_named_with_what_is_assumed(
    tmp_path, capsys, flags
):
    words = ("--budgets", "1e20", "--sizes", 2, "--gpus", 8, "--gpu", *flags)
    assert plan(tmp_path, *words) == 0
    said = capsys.readouterr().out
    assert re.search(r"disk: each run keeps its last checkpoint alone, [\d.]+ GiB in all", said)
    assert re.search(r"1 x 8 A100\S*: 40 GB, 92% of it usable, and 312 TFLOP/s in bf16 each", said)
    for cell, _ in cells_of(tmp_path):
        assert cell.facts["device_gib"] <= USABLE * 40e9 / GIB


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("nvidia_a100-sxm4-80gb", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("mi300x", "MI300X"),
        ("Tesla V100", ""),
    ],
)
def test_gpus_are_known_by_the_names_of_their_drivers(text, name):
    assert device_named(text) == name
