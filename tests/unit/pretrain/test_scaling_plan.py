"""Plans: legal shapes, whole steps that meet their budget, and a sweep file that says the same."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from foundation.errors import ConfigError
from foundation.files import write_text
from pretrain.commands.scale import rule_of
from pretrain.config.data import DataConfig
from pretrain.config.model import ModelConfig
from pretrain.config.optim import OptimConfig, ScheduleConfig
from pretrain.config.resolve import with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of
from pretrain.scaling.collect import read_rows
from pretrain.scaling.plan import make_sweep, optimum_at_ratio, plan_sizes, spread_sizes
from pretrain.scaling.recipe import (
    FAR_SIZE,
    RULES,
    Family,
    outside_step_law,
    read_ladder,
    step_law,
    with_budget,
)
from pretrain.scaling.sweep_file import config_of, read_sweep, write_sweep
from tests.helpers import scaling_runs
from tests.helpers.scaling_runs import command, train_by_the_law

MODELS = Path(__file__).parents[3] / "configs" / "models"
BASE = RunConfig(
    name="books",
    model=ModelConfig(vocab_size=8192, num_layers=12, d_model=768, num_heads=12, memory_length=512),
    data=DataConfig(segment_length=512, lanes=64),
)
EXPERIMENT = """
name: books
model: {vocab_size: 8192, num_layers: 12, d_model: 768, num_heads: 12, memory_length: 512}
data: {segment_length: 512, lanes: 64}
"""


def planned(*, base=BASE, rule="step-law", spread=1.6, seeds=(1,), holdouts=(), **shapes):
    family = Family(base=base, **shapes)
    optimum = optimum_at_ratio(family, 20)
    return plan_sizes(
        family,
        (1e17, 1e18),
        spread_sizes(optimum, 5, spread),
        lambda run, budget: (with_budget(run, budget, RULES[rule]), {}),
        seeds=seeds,
        holdouts={budget: optimum(budget) for budget in holdouts},
    )


def nearest_shape(base, parameters, **shapes):
    return Family(base=base, **shapes).nearest(parameters)


def test_a_shape_keeps_the_number_of_heads_that_share_a_key():
    grouped = replace(BASE, model=replace(BASE.model, num_heads=8, num_key_heads=2))
    for target in (3e6, 2e7):
        model = nearest_shape(grouped, target).model
        assert model.num_heads == 4 * model.num_key_heads


@pytest.mark.parametrize("target", [3e6, 2e7, 1.5e8, 1e9, 3e10])
def test_the_nearest_shape_is_legal_near_and_of_the_same_proportions(target):
    run = nearest_shape(BASE, target)
    model = run.model
    assert cost_of(run).parameters == pytest.approx(target, rel=0.2)
    assert model.head_width == 64
    assert model.d_model == 64 * model.num_heads
    assert model.num_layers == pytest.approx(max(1, model.d_model / 64), rel=0.45)


def test_depth_is_kept_where_that_is_asked_for():
    runs = planned(keep_layers=True)
    assert {item.run.model.num_layers for item in runs} == {12}
    assert len({item.run.model.d_model for item in runs if item.facts["budget"] == 1e18}) == 5
    middle = optimum_at_ratio(Family(base=BASE, keep_layers=True), 20)(1e18)
    assert runs[7].cost.parameters == pytest.approx(middle, rel=0.15)


def test_shapes_of_narrow_heads_and_own_feed_forward_width_keep_their_ratios():
    narrow = replace(
        BASE,
        model=ModelConfig(
            vocab_size=256, d_model=96, num_heads=4, d_head=32, d_inner=256, num_layers=3
        ),
    )
    model = nearest_shape(narrow, 1e7).model
    assert model.d_model / model.num_heads == 24
    assert model.d_head == 32
    assert model.d_inner / model.d_model == pytest.approx(256 / 96, rel=0.02)


GROUPED = replace(BASE.model, vocab_size=32000, num_key_heads=4)  # groups of three heads


def test_widths_and_numbers_of_heads_are_round_at_every_size():
    family = Family(base=replace(BASE, model=GROUPED))
    seen = set()
    for step in range(40):
        model = family.nearest(2e7 * 1.25**step).model
        assert model.d_model == 64 * model.num_heads
        assert model.d_model % (128 if model.d_model >= 512 else 64) == 0
        assert model.num_heads % 2 == 0 or model.num_heads < 8
        assert model.d_model < 2048 or model.d_model % 256 == 0, "3456 is no width"
        assert 64 / 1.45 < model.d_model / model.num_layers < 64 * 1.45
        assert 2 <= model.num_heads / model.num_key_heads <= 4
        seen.add(model.d_model)
    assert len(seen) > 15


def test_layers_of_several_kinds_and_memory_lengths_come_in_whole_patterns():
    patterns = {"layer_kinds": ("deltanet", "deltanet", "attention"), "memory_length": (0, 512)}
    family = Family(base=replace(BASE, model=replace(BASE.model, **patterns)))
    for size in (3e7, 2e8, 2e9):
        run = family.nearest(size)
        assert run.model.num_layers % 6 == 0
        assert cost_of(run).parameters == pytest.approx(size, rel=0.2)


def test_a_ladder_gives_its_rungs_shapes_and_keeps_the_bases_other_settings():
    rungs = read_ladder([MODELS / f"xl_modern_{size}.yaml" for size in ("100m", "10m", "30m")])
    family = Family(base=BASE, rungs=rungs)
    assert [model.d_model for model in rungs] == [256, 384, 768]
    found = [family.nearest(size).model for size in (1e6, 2e7, 1e9)]
    assert [(model.num_layers, model.num_heads) for model in found] == [(8, 4), (11, 6), (12, 12)]
    assert all(replace(model, num_key_heads=0).vocab_size == 8192 for model in found)
    assert {(model.memory_length, model.feed_forward) for model in found} == {(512, "relu")}
    with pytest.raises(ConfigError, match=r"nearest shape to 1e\+09 parameters has .*a ladder"):
        family.nearest(1e9, FAR_SIZE)


def test_a_size_the_vocabulary_alone_exceeds_is_refused():
    with pytest.raises(ConfigError, match=r"the nearest shape to 1e\+04 parameters has"):
        Family(base=BASE).nearest(1e4, FAR_SIZE)


def test_every_cell_meets_its_budget_within_one_per_cent_by_exact_flops():
    runs = planned(holdouts=(1e19,))
    assert len(runs) == 11
    for item in runs:
        assert item.cost.flops == pytest.approx(item.facts["budget"], rel=0.01)
        assert item.cost == cost_of(item.run)
        assert item.run.optim.schedule.warmup_steps == pytest.approx(
            0.05 * item.run.optim.steps, abs=1
        )
        assert item.run.optim.steps >= 50
    assert [item.holdout for item in runs] == [False] * 10 + [True]


def test_sizes_of_a_budget_are_spread_around_the_optimum():
    runs = [item for item in planned() if item.facts["budget"] == 1e18]
    sizes = [item.cost.parameters for item in runs]
    assert sizes == sorted(sizes)
    middle = optimum_at_ratio(Family(base=BASE), 20)(1e18)
    assert sizes[2] == pytest.approx(middle, rel=0.1)
    assert runs[2].cost.tokens / runs[2].cost.parameters == pytest.approx(20, rel=0.15)
    for smaller, larger in pairwise(sizes):
        assert larger / smaller == pytest.approx(1.6, rel=0.15)


def test_seeds_repeat_every_cell_under_another_name():
    runs = planned(seeds=(1, 2))
    assert len({item.name for item in runs}) == len(runs) == 20
    assert {item.run.seed for item in runs} == {1, 2}


def test_rate_and_batch_follow_the_stated_rule():
    rate, batch = step_law(1e9, 2e10)
    assert rate == pytest.approx(1.79 * 1e9**-0.713 * 2e10**0.307)
    assert batch == pytest.approx(0.58 * 2e10**0.571)
    edge_rate, edge_batch = step_law(60e6, 2e9)
    assert step_law(1e4, 1e10)[0] == step_law(60e6, 1e10)[0], "no higher rate than it measured"
    assert step_law(1e4, 1e9)[0] == edge_rate
    assert step_law(7e9, 1e11)[0] == pytest.approx(1.79 * 7e9**-0.713 * 1e11**0.307), "lower"
    assert step_law(1e8, 1e13)[1] == step_law(1e8, 1e11)[1], "no larger batch than it measured"
    assert step_law(1e8, 1e7)[1] < edge_batch
    item = planned()[-1]
    rate, batch = step_law(item.cost.body_parameters, item.cost.tokens)
    assert item.run.optim.learning_rate == pytest.approx(rate, rel=1e-2)
    assert item.cost.tokens_per_step == pytest.approx(batch, rel=1e-2)
    for item in planned(rule="base"):
        assert item.run.optim.learning_rate == BASE.optim.learning_rate
        assert item.run.data.lanes == 64


def test_cells_outside_step_laws_range_are_counted():
    runs = [item.run for item in planned()]
    inside = with_budget(nearest_shape(BASE, 2e8), 1e19, RULES["step-law"])
    assert outside_step_law([inside]) == []
    (said,) = outside_step_law([inside, *runs])
    assert said.startswith("clipped: 10 of 11 cells, such as ")


def test_what_cannot_be_planned_is_said():
    with pytest.raises(ConfigError, match="does not decay the learning rate"):
        planned(base=replace(BASE, optim=OptimConfig(schedule=ScheduleConfig(shape="constant"))))
    with pytest.raises(ConfigError, match="different legal shapes; use a larger --spread"):
        planned(spread=1.001)
    with pytest.raises(ConfigError, match=r"1e\+13 FLOPs pay for 0\.\d+ steps"):
        with_budget(BASE, 1e13, RULES["base"])
    with pytest.raises(
        ConfigError, match=r"model\.vocab_size is not set and there is no corpus at .*/absent to"
    ):
        with_vocabulary(replace(BASE, model=ModelConfig(), data=DataConfig(path=Path("absent"))))


def test_the_sweep_file_describes_exactly_the_planned_runs(tmp_path):
    experiment = tmp_path / "experiments" / "books.yaml"
    experiment.parent.mkdir()
    write_text(experiment, EXPERIMENT)
    runs = planned(holdouts=(1e19,))
    path = tmp_path / "sweeps" / "books.yaml"
    write_sweep(path, make_sweep("books", experiment, BASE, runs, path.parent, ["a note"]))
    sweep = read_sweep(path)
    assert sweep.notes == ("a note",)
    assert [config_of(cell, path) for cell in sweep.cells] == [item.run for item in runs]
    assert sweep.cells[-1].holdout
    assert sweep.cells[0].facts["flops"] == pytest.approx(runs[0].cost.flops)
    assert not sweep.cells[0].experiment.is_absolute()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "format: 2\nname: x\ncells: [{name: a, experiment: e.yaml}]\n",
            "format=2, this version reads sweeps of format 1",
        ),
        ("format: 1\nname: x\ncells: []\n", "cells is empty"),
        (
            "format: 1\nname: x\ncells: [{name: a, experiment: e}, {name: a, experiment: e}]\n",
            "'a' is used twice",
        ),
        (
            "format: 1\nname: x\ncells: [{name: ../a, experiment: e}]\n",
            "expected 1 to 100 letters, digits",
        ),
        (
            "format: 1\nname: x\ncells: [{name: a, experiment: e, hold: true}]\n",
            r"cells\[0\].*hold: unknown setting; did you mean 'holdout'",
        ),
    ],
)
def test_a_damaged_sweep_file_is_refused(tmp_path, text, said):
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_sweep(path)


COMPARISON = "name: two\nexperiment: e.yaml\nflops: 1e17\nrates: [1e-3]\nseeds: [1]\nmembers: "


@pytest.mark.parametrize(
    "plan",
    [
        ["plan", "e.yaml", "--budgets", "1e14", "--sizes", "2"],
        ["plan", "e.yaml", "--rates", "1e-3", "2e-3", "4e-3"],
        ["plan", "e.yaml", "--segments", "64", "--memories", "0", "64"],
        ["plan", "two.yaml"],
    ],
    ids=["sizes", "rates", "lengths", "variants"],
)
def test_a_sweep_is_named_after_its_file_so_two_plans_have_their_own_runs(
    tmp_path, monkeypatch, plan
):
    monkeypatch.chdir(tmp_path)
    write_text(Path("e.yaml"), EXPERIMENT)
    members = "{a: [model.memory_length=0], b: []}\n"
    write_text(Path("two.yaml"), COMPARISON + members)
    for output in ("adamw.yaml", "sweeps/muon.yaml"):
        assert command(*plan, "--output", output, f"optim.name={Path(output).stem}") == 0
        assert read_sweep(Path(output)).name == Path(output).stem
    assert command(*plan, "--output", "muon.yaml", "--name", "mine") == 0
    assert read_sweep(Path("muon.yaml")).name == "mine"


def test_the_step_law_is_refused_where_one_rate_holds_at_every_width():
    base = replace(BASE, model=replace(BASE.model, base_width=256))
    with pytest.raises(ConfigError, match="use --rule base, or --tuned"):
        rule_of(base, Namespace(tuned=[], rule="step-law"))
    rule = rule_of(base, Namespace(tuned=[], rule="base"))
    shapes = [nearest_shape(base, size) for size in (1e7, 1e8, 1e9)]
    assert {rule(run, 1e9)[0] for run in shapes} == {base.optim.learning_rate}
    assert {run.model.base_width for run in shapes} == {256}
    assert len({run.model.width_multiplier for run in shapes}) == 3


def test_a_plan_checks_its_rates_and_seeds_and_no_law_is_fitted_to_the_other_rates(
    tmp_path, capsys
):
    write_text(tmp_path / "books.yaml", scaling_runs.EXPERIMENT)
    sweep, runs = tmp_path / "sweep.yaml", tmp_path / "runs"
    words = ("plan", tmp_path / "books.yaml", "--budgets", "1e14", "1e15", "--sizes", 3)
    assert command(*words, "--output", sweep) == 0
    part = re.search(
        r"checks: 6 runs of these at other rates and seeds, (\d+)% of the FLOPs", said(capsys)
    )
    assert part
    assert 0 < int(part[1]) < 60
    cells = read_sweep(sweep).cells
    assert len(cells) == 6 + 2 * 2 + 2
    rates = {cell.name: cell.facts["learning_rate"] for cell in cells}
    checks = [cell for cell in cells if "rate_factor" in cell.facts]
    for cell in checks:
        own = rates[cell.name.rpartition("-rate")[0]]
        assert rates[cell.name] == pytest.approx(own * cell.facts["rate_factor"], rel=1e-3)
        assert config_of(cell, sweep).optim.learning_rate == rates[cell.name]
    assert sorted(config_of(cell, sweep).seed for cell in cells) == [1] * 10 + [2, 3]
    assert {config_of(cell, sweep).checkpoint.keep_last for cell in cells} == {1}
    for cell in cells:
        run = config_of(cell, sweep)
        gains = cell.name.startswith("c1e15") and "-rate0.5" in cell.name
        is_middle = cell in checks or cell.name + "-rate0.5" in rates
        loss = 2.94 if gains else 3.0 if is_middle else 3.1
        train_by_the_law(runs / cell.name, run, loss=loss)
    assert command("collect", sweep, "--runs-dir", runs) == 0
    text = said(capsys)
    assert len(re.findall(r"^rate x(0\.5|2) of c1e1", text, re.M)) == 4
    assert "rate x0.5 of c1e15" in text
    assert text.count("loss -2.00%") == 1
    assert re.search(r"warning: another rate is over 0\.5% better at c1e15\S+, and rates", text)
    rows = read_rows(runs / "runs.csv")
    assert [row.name for row in rows if row.excluded] == [cell.name for cell in checks]


def said(capsys) -> str:
    return capsys.readouterr().out
