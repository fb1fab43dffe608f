"""Plans: legal shapes, whole steps that meet their budget, rates, machines, their sweep file."""

import itertools
import json
import math
import re
from argparse import Namespace
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from foundation.errors import ConfigError
from foundation.files import write_text
from foundation.settings import load_config
from foundation.sizes import amount_of
from foundation.typed_values import to_tree
from foundation.yaml_files import dump_yaml
from pretrain.cli import main
from pretrain.commands.scale import rule_of
from pretrain.config.devices import device_named
from pretrain.config.resolve import with_vocabulary
from pretrain.config.run import DataConfig, ModelConfig, OptimConfig, RunConfig, ScheduleConfig
from pretrain.costs.flops import run_cost
from pretrain.costs.hardware import GIB, USABLE
from pretrain.scaling import simulation
from pretrain.scaling.collect import Row, read_rows, write_rows
from pretrain.scaling.frontier import fit_isoflop
from pretrain.scaling.intervals import Interval
from pretrain.scaling.law import fit_flops_law, fit_parametric
from pretrain.scaling.learning_rate import Rung, TunedRule
from pretrain.scaling.plan import make_sweep, optimum_at_ratio, plan_sizes, spread_sizes
from pretrain.scaling.recipe import FAR_SIZE, RULES, Family, outside_step_law, step_law, with_budget
from pretrain.scaling.simulation import ASSUMED
from pretrain.sweeps.cell_runs import config_of
from pretrain.sweeps.sweep_file import read_sweep, write_sweep
from tests.helpers import scaling_runs
from tests.helpers.scaling import make_points
from tests.helpers.scaling_runs import command, train_by_the_law

BASE = RunConfig(
    name="books",
    model=ModelConfig(vocab_size=8192, num_layers=12, d_model=768, num_heads=12, memory_length=512),
    data=DataConfig(segment_length=512, lanes=64),
)
EXPERIMENT = dump_yaml(to_tree(BASE))


def planned(*, base=BASE, rule="step-law", spread=1.6, holdouts=()):
    optimum = optimum_at_ratio(Family(base=base), 20)
    return plan_sizes(
        Family(base=base),
        (1e17, 1e18),
        spread_sizes(optimum, 5, spread),
        lambda run, budget: (with_budget(run, budget, RULES[rule]), {}),
        seeds=(1,),
        holdouts={budget: optimum(budget) for budget in holdouts},
    )


def family(base=BASE, **model) -> Family:
    return Family(base=replace(base, model=replace(base.model, **model)))


def test_shapes_of_narrow_heads_and_own_feed_forward_width_keep_their_ratios():
    sizes = {"vocab_size": 256, "d_model": 96, "num_heads": 4, "num_layers": 3}
    model = family(**sizes, d_head=32, d_inner=256, memory_length=0).nearest(1e7).model
    assert model.d_model / model.num_heads == 24
    assert model.d_head == 32
    assert model.d_inner / model.d_model == pytest.approx(256 / 96, rel=0.02)


def test_widths_and_numbers_of_heads_are_round_at_every_size():
    grouped = family(vocab_size=32000, num_key_heads=4)  # groups of three heads
    seen = set()
    for step in range(0, 40, 2):
        run = grouped.nearest(2e7 * 1.25**step)
        model = run.model
        assert run_cost(run).parameters == pytest.approx(2e7 * 1.25**step, rel=0.2)
        assert model.d_model == 64 * model.num_heads
        assert model.d_model % (128 if model.d_model >= 512 else 64) == 0
        assert model.num_heads % 2 == 0 or model.num_heads < 8
        assert model.d_model < 2048 or model.d_model % 256 == 0, "3456 is no width"
        assert 64 / 1.45 < model.d_model / model.num_layers < 64 * 1.45
        assert 2 <= model.num_heads / model.num_key_heads <= 4
        seen.add(model.d_model)
    assert len(seen) > 10


def test_layers_of_several_kinds_and_memory_lengths_come_in_whole_patterns():
    kinds = ("deltanet", "deltanet", "attention")
    for size in (3e7, 2e8, 2e9):
        run = family(layer_kinds=kinds, memory_length=(0, 512)).nearest(size)
        assert run.model.num_layers % 6 == 0
        assert run_cost(run).parameters == pytest.approx(size, rel=0.2)


def test_a_size_the_vocabulary_alone_exceeds_is_refused():
    with pytest.raises(ConfigError, match=r" 1e\+04 "):
        family().nearest(1e4, FAR_SIZE)


def test_every_cell_meets_its_budget_within_one_per_cent_by_exact_flops():
    runs = planned(holdouts=(1e19,))
    assert len(runs) == 11
    for item in runs:
        assert item.cost.flops == pytest.approx(item.facts["budget"], rel=0.01)
        assert item.cost == run_cost(item.run)
        optim = item.run.optim
        assert optim.schedule.warmup_steps == pytest.approx(0.05 * optim.steps, abs=1)
        assert optim.steps >= 50
    assert [item.holdout for item in runs] == [False] * 10 + [True]


def test_sizes_of_a_budget_are_spread_around_the_optimum():
    costs = [item.cost for item in planned() if item.facts["budget"] == 1e18]
    sizes = [cost.parameters for cost in costs]
    assert sizes[2] == pytest.approx(optimum_at_ratio(family(), 20)(1e18), rel=0.1)
    assert costs[2].tokens / sizes[2] == pytest.approx(20, rel=0.15)
    for smaller, larger in pairwise(sizes):
        assert larger / smaller == pytest.approx(1.6, rel=0.15)


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
    (said,) = outside_step_law([item.run for item in planned()])
    assert "10 of 10" in said
    assert outside_step_law([with_budget(family().nearest(2e8), 1e19, RULES["step-law"])]) == []
    for item in planned(rule="base"):
        assert item.run.optim.learning_rate == BASE.optim.learning_rate
        assert item.run.data.lanes == 64


def test_what_cannot_be_planned_is_said():
    with pytest.raises(ConfigError, match=r"schedule\.shape=constant"):
        planned(base=replace(BASE, optim=OptimConfig(schedule=ScheduleConfig(shape="constant"))))
    with pytest.raises(ConfigError, match="larger --spread"):
        planned(spread=1.001)
    with pytest.raises(ConfigError, match=r"1e\+13 .* 0\.\d+ "):
        with_budget(BASE, 1e13, RULES["base"])
    absent = replace(BASE, model=ModelConfig(), data=DataConfig(path=Path("absent")))
    with pytest.raises(ConfigError, match=r"vocab_size .*/absent"):
        with_vocabulary(absent)


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


PLANS = [("e.yaml", "--rates", "1e-3", "2e-3", "4e-3"), ("two.yaml",)]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_sweep_is_named_after_its_file_so_plans_have_their_own_runs(tmp_path, monkeypatch, plan):
    monkeypatch.chdir(tmp_path)
    write_text(Path("e.yaml"), EXPERIMENT)
    members = "members: {a: [model.memory_length=0], b: []}\n"
    compared = "name: two\nexperiment: e.yaml\nflops: 1e17\nrates: [1e-3]\nseeds: [1]\n"
    write_text(Path("two.yaml"), compared + members)
    for output, flags, name in (
        ("adamw.yaml", [], "adamw"),
        ("sweeps/muon.yaml", ["optim.name=muon"], "muon"),
        ("muon.yaml", ["--name", "mine"], "mine"),
    ):
        assert command("plan", *plan, "--output", output, *flags) == 0
        assert read_sweep(Path(output)).name == name


def test_the_step_law_is_refused_where_one_rate_holds_at_every_width():
    wide = family(base_width=256)
    with pytest.raises(ConfigError, match=r"--rule base.*--tuned"):
        rule_of(wide.base, Namespace(tuned=[], rule="step-law"))
    rule = rule_of(wide.base, Namespace(tuned=[], rule="base"))
    shapes = [wide.nearest(size) for size in (1e7, 1e8, 1e9)]
    assert {rule(run, 1e9)[0] for run in shapes} == {BASE.optim.learning_rate}
    assert {run.model.base_width for run in shapes} == {256}
    assert len({run.model.width_multiplier for run in shapes}) == 3


def test_a_plan_checks_rates_and_seeds_and_no_law_is_fitted_to_the_other_rates(tmp_path, capsys):
    write_text(tmp_path / "books.yaml", scaling_runs.EXPERIMENT)
    sweep, runs = tmp_path / "sweep.yaml", tmp_path / "runs"
    words = ("plan", tmp_path / "books.yaml", "--budgets", "1e14", "1e15", "--sizes", 3)
    assert command(*words, "--output", sweep) == 0
    said = capsys.readouterr().out
    assert 0 < int(re.search(r"checks: 10 .* (\d+)%", said)[1]) < 70
    assert "2 budgets: 'scale fit' gives no interval" in said
    cells = read_sweep(sweep).cells
    assert len(cells) == 6 + 2 * 2 * 2 + 2, "both ends of both budgets, and two more seeds"
    rates = {cell.name: cell.facts["learning_rate"] for cell in cells}
    checks = [cell for cell in cells if "rate_factor" in cell.facts]
    for cell in checks:
        own = rates[cell.name.rpartition("-rate")[0]]
        assert rates[cell.name] == pytest.approx(own * cell.facts["rate_factor"], rel=1e-3)
        assert config_of(cell, sweep).optim.learning_rate == rates[cell.name]
    assert sorted(config_of(cell, sweep).seed for cell in cells) == [1] * 14 + [2, 3]
    assert {config_of(cell, sweep).checkpoint.keep_last for cell in cells} == {1}
    largest = [cell.name for cell in cells if cell.name + "-rate0.5" in rates][-1]
    for cell in cells:
        gains = cell.name == largest + "-rate0.5"
        loss = 2.94 if gains else 3.0 if cell in checks or cell.name + "-rate0.5" in rates else 3.1
        train_by_the_law(runs / cell.name, config_of(cell, sweep), loss=loss)
    assert command("collect", sweep, "--runs-dir", runs) == 0
    text = capsys.readouterr().out
    assert len(re.findall(r"^rate x(0\.5|2) of c1e1", text, re.M)) == 8
    assert f"rate x0.5 of {largest}" in text
    assert text.count("loss -2.00%") == 1
    assert re.search(r"warning: .* 0\.5% .* c1e15", text)
    rows = read_rows(runs / "runs.csv")
    assert [row.name for row in rows if row.excluded] == [cell.name for cell in checks]


CONFIGS = Path(__file__).parents[4] / "configs"
SHIPPED = CONFIGS / "models" / "xl_modern_100m.yaml"


def plan_on(tmp_path, *arguments: object) -> int:
    output = ("--output", tmp_path / "sweep.yaml")
    return command("plan", SHIPPED, "--no-checks", *arguments, *output)


def cells_of(tmp_path):
    path = tmp_path / "sweep.yaml"
    return [(cell, config_of(cell, path)) for cell in read_sweep(path).cells]


def test_every_cell_of_a_plan_up_to_1e21_flops_fits_8_h100_by_describe(tmp_path, capsys):
    budgets = ("--budgets", "1e18", "1e21", "--holdout-budgets", "3e21")
    assert plan_on(tmp_path, *budgets, "--sizes", 3, "--gpu", "H100", "--gpus", 8) == 0
    cells = cells_of(tmp_path)
    assert len(cells) == 7
    capsys.readouterr()
    for cell, run in cells:
        experiment = str((tmp_path / cell.experiment).resolve())
        words = ["describe", experiment, *cell.overrides, "--gpu", "H100", "--gpus", "8"]
        assert main([*words, "--json"]) == 0
        described = json.loads(capsys.readouterr().out)
        assert described["fits"], cell.name
        memory, saved = described["device_bytes"]["total"], described["checkpoint_bytes"]
        assert memory / GIB == pytest.approx(cell.facts["device_gib"])
        assert saved / GIB == pytest.approx(cell.facts["checkpoint_gib"])
        seconds = described["seconds"]["training"]
        assert seconds / 3600 == pytest.approx(cell.facts["hours"], rel=0.02)
        assert run.engine.precision == "auto", "chosen where the cell runs"
        own, rest = divmod(run.data.lanes, 8)
        assert rest == 0
        assert max(step for step in (1, 2, 4, 8, 16, 32) if own % step == 0) >= own / 16
    parts = [bool(run.engine.micro_batch_lanes) for _, run in cells]
    assert (parts[0], any(parts)) == (False, True), "the largest need smaller passes"


def test_a_cell_that_cannot_fit_is_one_line_with_the_ranks_that_would_do(tmp_path, capsys):
    arguments = ("--budgets", "3e22", "--sizes", 1, "--gpu", "H100", "--gpus", 1)
    assert plan_on(tmp_path, *arguments, "--tokens-per-parameter", 2) == 2
    said = capsys.readouterr().err
    assert re.search(r"^.* 68\.5 GiB .* 1 rank .* \d+ ranks.*\n$", said)
    assert not (tmp_path / "sweep.yaml").exists()


def test_small_cells_of_a_cluster_get_fewer_nodes(tmp_path, capsys):
    cluster = CONFIGS / "clusters" / "8xh100.yaml"
    budgets = ("--budgets", "1e17", "1e20", "--sizes", 2, "--spread", 4)
    assert plan_on(tmp_path, *budgets, "--cluster", cluster, "--nodes", 16) == 0
    assert f"--cluster {cluster} --nodes 1:16, then" in capsys.readouterr().out
    assert plan_on(tmp_path, *budgets, "--nodes", 2) == 2, "of no machine"
    nodes = [cell.facts["nodes"] for cell, _ in cells_of(tmp_path)]
    assert nodes[0] < nodes[-1] == 16
    for (cell, run), count in zip(cells_of(tmp_path), nodes, strict=True):
        assert run.data.lanes % (8 * count) == 0, cell.name


def test_a_gpu_of_less_memory_gets_cells_that_fit_and_what_is_assumed_is_said(tmp_path, capsys):
    machine = ("--gpus", 8, "--gpu", "A100", "--gpu-memory", "40GB")
    assert plan_on(tmp_path, "--budgets", "1e20", "--sizes", 2, *machine) == 0
    said = capsys.readouterr().out
    assert re.search(r"disk: .* [\d.]+ GiB", said)
    assert re.search(r"1 x 8 A100\S* 40 GB, 92% .* 312 TFLOP/s", said)
    for cell, _ in cells_of(tmp_path):
        assert cell.facts["device_gib"] <= USABLE * 40e9 / GIB


def test_gpus_are_known_by_the_names_of_their_drivers():
    drivers = ["NVIDIA A100-SXM4-40GB", "nvidia_a100-sxm4-80gb", "NVIDIA GeForce RTX 4090"]
    found = [device_named(name) for name in (*drivers, "mi300x", "Tesla V100")]
    assert found == ["A100-40GB", "A100", "RTX4090", "MI300X", ""]


DEMO = CONFIGS / "experiments" / "demo.yaml"
BUDGETS, TARGET, NOISE = ("1e16", "1e17", "1e18"), 1e20, 0.01
DRAWS = 30
size_in = amount_of("N")


def simulate(path: Path, *flags: object) -> int:
    return command("plan", DEMO, "model.vocab_size=1000", "--output", path, *flags)


def test_the_simulated_width_is_that_of_fits_to_drawn_losses(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(simulation, "SWEEPS", 50)
    path = tmp_path / "sweep.yaml"
    flags = ("--budgets", *BUDGETS, "--no-checks", "--simulate", TARGET, "--noise", NOISE)
    assert simulate(path, *flags) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    names, cells = ("parameters", "tokens", "flops", "budget"), read_sweep(path).cells
    facts = [[cell.facts[name] for cell in cells] for name in names]
    size_P, tokens_P, flops_P, budget_P = np.array(facts)
    flops_law = fit_flops_law(size_P, tokens_P, flops_P)
    rng, found = np.random.default_rng(5), {"3": [], "2": []}
    for _ in range(DRAWS):
        loss_P = ASSUMED.loss(size_P, tokens_P) * np.exp(NOISE * rng.standard_normal(len(cells)))
        points = make_points(size_P, tokens_P, loss_P, flops=flops_P, budget=budget_P)
        for title, fit in (("3", fit_parametric), ("2", fit_isoflop)):
            line = fit(points).line(flops_law)
            found[title].append(float(line.log_parameters(np.log(TARGET))))
    for title, sizes in found.items():
        (row,) = (line for line in lines if line[:3] == ["as", "it", "is"] and line[4] == title)
        low, high = (size_in(text.strip("[],")) for text in row[7:9])
        # 30 draws tell a standard deviation to 13%, 50 sweeps the ends of 95% to as much.
        assert np.log(high / low) == pytest.approx(4 * np.std(sizes), rel=0.4)
        assert size_in(row[6]) == pytest.approx(np.exp(np.median(sizes)), rel=0.3)


def test_a_simulated_loss_is_shown_where_fit_would_show_one_and_beside_the_truth(tmp_path, capsys):
    path = tmp_path / "sweep.yaml"
    flags = ("--budgets", *BUDGETS, "1e19", "--no-checks", "--simulate", TARGET)
    assert simulate(path, *flags) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if " 2 IsoFLOP " in line]
    assert [row[-1] == "-" for row in rows] == ["without" in row for row in rows]
    (truth,) = (line.split() for line in lines if line.startswith("the law itself"))
    (whole,) = (line.split() for line in lines if line.startswith("as it is") and " 3 " in line)
    low, high = (float(text.strip("[],")) for text in whole[-2:])
    assert low <= float(truth[-1]) <= high


def test_trunks_of_far_budgets_are_refused_by_the_rule_with_what_works(tmp_path, capsys):
    flags = ("--budgets", "3e19", "6e20", "--trunks", "--no-checks")
    assert command("plan", SHIPPED, "--output", tmp_path / "sweep.yaml", *flags) == 2
    error = capsys.readouterr().err
    assert "--rule base" in error
    assert "--tuned" in error


@pytest.mark.parametrize(
    "flags",
    [
        ("--rates", "1e-3", "--simulate", "1e20"),
        ("--budgets", *BUDGETS, "--simulate", "1e20", "--noise", "0"),
        ("--budgets", *BUDGETS, "--simulate", "-1"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(flags, tmp_path, capsys):
    path = tmp_path / "sweep.yaml"
    assert simulate(path, *flags) == 2
    error = capsys.readouterr().err
    assert "--simulate" in error
    assert error.count("\n") == 1
    assert not path.exists()


POWER = -0.4


def best_rate(body: float) -> float:
    return 2e-3 * (body / 1e5) ** POWER


def tuned(directory: Path, width: int, batches=(1024,), lowest=best_rate) -> Path:
    """The table of a sweep of rates whose runs ended in a valley around a rate."""
    path = directory / f"{width}.yaml"
    model = f"vocab_size: 512, num_layers: 2, d_model: {width}, num_heads: {width // 16}"
    data = "data: {segment_length: 64, lanes: 16, path: absent}\noptim: {steps: 200}"
    write_text(path, f"name: books{width}\nmodel: {{{model}, memory_length: 64}}\n{data}\n")
    cost, rng, rows = run_cost(load_config(RunConfig, path)), np.random.default_rng(width), []
    for rate, batch in itertools.product((5e-4, 1e-3, 2e-3, 4e-3, 8e-3), batches):
        apart = math.log(rate / lowest(cost.body_parameters))
        loss = 3 + 0.1 * apart**2 + 1e-3 * rng.standard_normal()
        sizes = {"N_body": cost.body_parameters, "D": cost.tokens, "base_width": 0}
        ended = {"loss": loss, "progress": 1.0, "varies": "rates", "tokens_per_step": batch}
        rows.append(Row(name="a", learning_rate=rate, **sizes, **ended))
    write_rows(directory / f"{width}.csv", rows)
    return directory / f"{width}.csv"


def plan_by(tmp_path, width: int, budgets: tuple[str, ...], *rungs: Path) -> int:
    words = ("plan", tmp_path / f"{width}.yaml", "--budgets", *budgets, "--no-checks", "--sizes", 2)
    return command(*words, "--tuned", *rungs, "--output", tmp_path / "sweep.yaml")


def test_rates_of_two_rungs_give_every_cell_of_a_plan_its_rate(tmp_path, capsys):
    rungs = [tuned(tmp_path, 32), tuned(tmp_path, 128)]
    assert plan_by(tmp_path, 128, ("1e14", "1e15"), *rungs) == 0
    said = capsys.readouterr().out
    for cell, run in cells_of(tmp_path):
        wanted = best_rate(cell.facts["body_parameters"])
        assert run.optim.learning_rate == pytest.approx(wanted, rel=0.06)
        assert run.data.lanes == 16, "the experiment's own"
    assert float(re.search(r"rate: .* N\^(-[\d.]+)", said)[1]) == pytest.approx(POWER, abs=0.05)
    assert "Step Law" not in said
    assert any("tuned by" in note for note in read_sweep(tmp_path / "sweep.yaml").notes)


def test_one_rungs_rate_is_used_at_all_sizes_and_doubted_far_from_it(tmp_path, capsys):
    assert plan_by(tmp_path, 32, ("1e15",), tuned(tmp_path, 32)) == 0
    said = capsys.readouterr().out
    assert re.search(r"warning: 2 of 2 .* 4x ", said)
    assert len({run.optim.learning_rate for _, run in cells_of(tmp_path)}) == 1


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"lowest": lambda _: 1.0}, "no best rate"),
        ({"batches": (1024, 2048)}, "1,024 and 2,048"),
    ],
)
def test_a_table_without_a_best_rate_or_one_batch_is_no_rung(tmp_path, capsys, table, said):
    assert plan_by(tmp_path, 32, ("1e15",), tuned(tmp_path, 32, **table)) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "sweep.yaml").exists()


def rung(body: float, rate: float) -> Rung:
    interval = Interval(rate, rate / 1.2, rate * 1.2)
    return Rung(body_parameters=body, tokens=20 * body, rate=interval, base_width=256)


def test_rates_that_transfer_are_those_of_the_rungs_at_any_width():
    rungs = (rung(1e6, 1e-3), rung(8e6, 1.2e-3))
    model = ModelConfig(vocab_size=512, d_model=1024, num_heads=16, num_layers=8)
    run = RunConfig(model=model, data=DataConfig(lanes=16))
    rate, batch = TunedRule(rungs=rungs, base_width=256)(run, 1e9)
    assert rate == pytest.approx(1.095e-3, rel=1e-3)
    assert batch == 0, "the run's own"
    assert TunedRule(rungs=rungs, base_width=128)(run, 1e9)[0] > 1.2e-3, "another base: a power"
    mixed = (rungs[0], replace(rungs[1], base_width=0))
    assert not TunedRule(rungs=mixed, base_width=256).transfers
