"""Sweeps of rates, lengths and variants: plans, their table, best rates, pages; one for real."""

import csv
import json
import math
import re
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from foundation.files import write_text
from foundation.settings import load_config
from pretrain.cli import main
from pretrain.comparisons.comparison import member_name, plan_members, read_comparison
from pretrain.comparisons.members import member_results
from pretrain.comparisons.page import loss_by_memory
from pretrain.config.run import RunConfig
from pretrain.costs.device_memory import checkpoint_bytes
from pretrain.costs.flops import computed_step_flops, run_cost
from pretrain.rundir.events import TrainingBegan
from pretrain.rundir.run_dir import RunDir
from pretrain.scaling.collect import Row, read_rows, with_one_text
from pretrain.scaling.learning_rate import TOLERABLE, best_rate_lines, fit_rates
from pretrain.sweeps.cell_runs import config_of
from pretrain.sweeps.sweep_file import read_sweep
from tests.helpers.checkout import ROOT
from tests.helpers.corpora import make_tiny_corpus
from tests.helpers.scaling import HOFFMANN
from tests.helpers.scaling_runs import EXPERIMENT, command, train_by_the_law

TUNED = """name: base
model: {vocab_size: 300, num_layers: 2, d_model: 32, num_heads: 2, memory_length: 32}
optim: {steps: 1000}
data: {path: absent, segment_length: 32, lanes: 16PHASES}
"""
RATES = [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3]
BEST, LOWEST, BEND = 1.2e-3, 3.0, 0.1


def losses_at(rates, noise=0.0, rng=None) -> list[float]:
    """Losses of a valley whose lowest point is known."""
    exact = LOWEST + BEND / 2 * (np.log(rates) - math.log(BEST)) ** 2
    return list(exact * (1 + noise * rng.standard_normal(len(rates))) if rng else exact)


def planned(tmp_path: Path, *flags: object) -> list[RunConfig]:
    """The runs of a plan of the base with these flags."""
    sweep = tmp_path / "sweep.yaml"
    write_text(tmp_path / "base.yaml", TUNED.replace("PHASES", ""))
    assert command("plan", tmp_path / "base.yaml", *flags, "--output", sweep) == 0
    return [config_of(cell, sweep) for cell in read_sweep(sweep).cells]


def test_cells_differ_in_rate_and_seed_alone_and_more_rates_keep_the_cells_there_are(tmp_path):
    runs = planned(tmp_path, "--rates", *RATES, "--seeds", 1, 2)
    assert len(runs) == len({run.name for run in runs}) == 5 * 2
    assert {(run.optim.learning_rate, run.seed) for run in runs} == {*product(RATES, (1, 2))}
    for run in runs:
        assert (run.optim.steps, run.optim.schedule.warmup_steps) == (1000, 50)
        optim = replace(run.optim, learning_rate=RATES[0])
        assert replace(run, name=runs[0].name, seed=1, optim=optim) == runs[0]
    more = planned(tmp_path, "--rates", *RATES, 8e-3, "--seeds", 1, 2)
    assert [run for run in more if run.optim.learning_rate < 8e-3] == runs
    twice = planned(tmp_path, "data.lanes=32", "optim.steps=500", "--rates", *RATES)
    assert {run_cost(run).tokens for run in twice} == {1000 * 512}


@pytest.mark.parametrize(
    ("flags", "text", "said"),
    [
        ("--rates 1e-3 1e-3 2e-3", "", "at least 3"),
        ("--rates 1e-3 2e-3 4e-3 --memories 8", "", "--memories has no meaning"),
        ("--rates 1e-3 2e-3 4e-3", ", phases: [{from_step: 9, lanes: 8}]", "has 1 phase "),
        ("--segments 24 --memories 0 32", "", " 24 do not divide the 512 "),
        ("--segments 32 32 --memories 8", "", "nothing to compare"),
    ],
)
def test_what_makes_no_sweep_is_refused(tmp_path, capsys, flags, text, said):
    write_text(tmp_path / "base.yaml", TUNED.replace("PHASES", text))
    words = ("plan", tmp_path / "base.yaml", *flags.split(), "--output", tmp_path / "sweep.yaml")
    assert command(*words) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "sweep.yaml").exists()


def test_a_known_valley_is_found_with_the_range_that_loses_half_a_percent():
    found = fit_rates(512, RATES, losses_at(RATES)).optimum
    assert found.rate.value == pytest.approx(BEST, rel=1e-9)
    assert found.loss == pytest.approx(LOWEST, rel=1e-9)
    for edge in (found.low, found.high):
        assert losses_at([edge])[0] == pytest.approx(LOWEST * (1 + TOLERABLE), rel=1e-9)
    assert found.low < BEST < found.high


def test_the_interval_holds_the_best_rate_in_about_95_of_100_noisy_sweeps():
    rng = np.random.default_rng(3)
    rates = [1.5e-4 * 2 ** (index / 2) for index in range(13)]
    held = []
    for _ in range(100):
        found = fit_rates(512, rates, losses_at(rates, 0.005, rng)).optimum
        held.append(found.rate.low <= BEST <= found.rate.high)
    assert 0.90 <= np.mean(held) <= 1.0


@pytest.mark.parametrize("rate", [BEST * 2, 3.2e-2])
def test_rates_at_which_a_run_diverged_do_not_bend_the_valley_and_slow_ones_are_not_such(rate):
    rates, losses = [1e-5, *RATES, rate, 6.4e-2], [5.0, *losses_at(RATES), 9.0, math.inf]
    found = fit_rates(512, rates, losses)
    assert found.optimum.rate.value == pytest.approx(BEST, rel=1e-9)
    assert found.diverged == (rate, 6.4e-2)
    assert found.rates_S.min() == 1e-5


@pytest.mark.parametrize(
    ("rates", "losses", "said"),
    [
        ([1e-4, 1e-2, 1.0], [3.2, 3.1, 3.2], "add 0.005 and 0.02"),
        ([1e-3, 2e-3, 4e-3], [3.0, 3.1, 3.3], "add 0.0005"),
        ([1e-3, 2e-3, 4e-3], [3.3, 3.1, 3.0], "add 0.008"),
        ([1e-3, 2e-3, 4e-3, 8e-3], [3.3, 3.1, 3.0, math.inf], "add 0.0057"),
        ([1e-3, 2e-3, 4e-3], [20.0, 1.9, 1.95], "the losses have no valley"),
        ([1e-3, 2e-3, 4e-3], [3.2, 3.1, 3.2], "no interval: three runs determine a parabola"),
    ],
)
def test_what_a_sweep_cannot_tell_is_said(rates, losses, said):
    assert said in best_rate_lines(fit_rates(512, rates, losses))[0]


def test_a_parabola_that_contradicts_the_lowest_measured_loss_is_warned_of():
    rates, losses = [1e-3, 2e-3, 4e-3, 8e-3], [6.0237, 5.6421, 5.6611, 5.6665]
    verdict, warning = best_rate_lines(fit_rates(512, rates, losses))
    assert "optim.learning_rate=0.0041" in verdict
    assert re.match(r"warning: .* 5\.6421, at 0\.002\b", warning)
    assert len(best_rate_lines(fit_rates(512, RATES, losses_at(RATES)))) == 1


def test_contexts_differ_in_segment_and_memory_alone_at_equal_tokens_and_equal_flops(tmp_path):
    runs = planned(tmp_path, "--segments", 16, 32, 64, "--memories", 0, 32, 128)
    contexts = {(run.data.segment_length, run.model.memory_length) for run in runs}
    assert len(contexts) == 9
    base = run_cost(next(run for run in runs if run.name == "t32-m32"))
    for run in runs:
        cost = run_cost(run)
        assert cost.parameters == base.parameters
        assert run.tokens_per_step == 512
        assert run.optim.learning_rate == runs[0].optim.learning_rate
        if not run.name.endswith("same-flops"):
            assert cost.tokens == base.tokens
        if not run.name.endswith("same-tokens"):
            assert cost.flops == pytest.approx(base.flops, rel=0.01)
    assert len(runs) == len({run.name for run in runs}) == 17


def test_a_sweep_of_lengths_becomes_a_table_and_a_page_with_both_comparisons(tmp_path, capsys):
    write_text(tmp_path / "books.yaml", EXPERIMENT + "optim: {steps: 300}\n")
    sweep, runs = tmp_path / "sweep.yaml", tmp_path / "runs"
    lengths = ("--segments", 32, 64, "--memories", 0, 64, "--output", sweep)
    assert command("plan", tmp_path / "books.yaml", *lengths) == 0
    cells = read_sweep(sweep).cells
    for cell in cells[1:]:
        train_by_the_law(runs / cell.name, config_of(cell, sweep))
    assert command("collect", sweep, "--runs-dir", runs) == 0
    rows = read_rows(runs / "runs.csv")
    lengths = {(row.segment_length, row.memory_length) for row in rows[1:]}
    assert lengths == {*product((32, 64), (0, 64))}
    assert {row.varies for row in rows} == {"lengths"}
    capsys.readouterr()
    assert command("report", runs / "runs.csv") == 0
    said = capsys.readouterr().out
    assert f"left out: {cells[0].name}: not started" in said
    page = (runs / "scaling-report" / "report.html").read_text()
    assert all(f"Equal {name}" in page for name in ("tokens", "FLOPs"))
    assert all(f"{row.loss:.4f}" in page for row in rows[1:])
    assert re.search(r"\d{4}-\d\d-\d\d, code ", page)
    names, forms = ("equal-tokens", "equal-flops"), (".png", ".svg", ".pdf", ".csv")
    files = {name + form for name, form in product(names, forms)} | {"report.html"}
    files |= {f"table-{name}{form}" for name, form in product(names, (".csv", ".tex"))}
    assert {path.name for path in (runs / "scaling-report").iterdir()} == files
    at_tokens = [row for row in rows[1:] if not row.name.endswith("same-flops")]
    lines = loss_by_memory(at_tokens).axes[0].get_lines()
    assert [str(line.get_label()) for line in lines] == ["32", "64"]


COMPARISONS = sorted((ROOT / "configs" / "comparisons").glob("*.yaml"))
TINY = """name: tiny
model: {num_layers: 2, d_model: 16, num_heads: 2, memory_length: 8}
data: {path: CORPUS, lanes: 2, segment_length: 8}
engine: {kind: torch}
evaluation: {interval: 0, lanes: 2}
metrics: {tensorboard: false}
"""
TWO = """name: two
experiment: tiny.yaml
flops: 8e7
rates: [1e-5, 4e-3]
seeds: [3, 4]
settings: [evaluation.max_tokens=200]
members:
  no-memory: [model.memory_length=0]
  long: ["model.memory_length=[8, 32]"]
"""


@pytest.mark.parametrize("path", COMPARISONS, ids=lambda path: path.stem)
def test_members_of_the_shipped_comparisons_differ_and_train_for_as_many_flops(path):
    comparison = read_comparison(path, ["model.vocab_size=257"])
    planned = plan_members(comparison, comparison.experiment)
    members = list(comparison.members)
    count = len(members) * len(comparison.rates) * len(comparison.seeds)
    assert len({item.name for item in planned}) == len(planned) == count
    runs = {member_name(item.name): item.run for item in planned[: len(members)]}
    assert [*runs] == members, "they take turns"
    for member, run in runs.items():
        flops = computed_step_flops(run, 1) * run.optim.steps
        assert flops == pytest.approx(comparison.flops, rel=0.01), member
        assert run.tokens_per_step == runs["transformer-xl"].tokens_per_step
    assert len({str(replace(run, name="x")) for run in runs.values()}) == len(runs)


def compare(directory: Path, text: str, *overrides: str) -> int:
    """Plan a comparison whose corpus is absent."""
    write_text(directory / "tiny.yaml", TINY.replace("CORPUS", str(directory / "absent")))
    write_text(directory / "two.yaml", text)
    output = ("--output", directory / "sweep.yaml", "model.vocab_size=300")
    return command("plan", directory / "two.yaml", *output, *overrides)


def test_flags_give_a_comparison_other_flops_and_seeds(tmp_path):
    assert compare(tmp_path, TWO, "--flops", "1.6e8", "--seeds", "7", "9") == 0
    names = [cell.name for cell in read_sweep(tmp_path / "sweep.yaml").cells]
    assert len(names) == 8
    assert {name.split("-")[0] for name in names} == {"c1.6e08"}
    assert {name.split("-")[-1] for name in names} == {"s7", "s9"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seeds: [3, 4]|seeds: [3, 3]", "different numbers"),
        ("flops: 8e7|flops: 1e6", "c1e06-no-memory-lr1e-05-s3: 1e+06 FLOPs"),
        ("model.memory_length=0|optim.steps=9", "optim.steps=9 follows"),
        ("model.memory_length=0|model.memory=0", "c8e07-no-memory-lr1e-05-s3 (over"),
        ("experiment: tiny|experiment: absent", "does not exist (experiment"),
        ("flops: 8e7|flops: 8e7\nbaseline: x", "baseline=x: expected one of no-memory, long"),
        ("[model.memory_length=0]|3", "members.no-memory is 3;"),
    ],
)
def test_a_wrong_comparison_is_refused_in_a_line(tmp_path, capsys, text, said):
    before, after = text.split("|")
    assert before in TWO
    assert compare(tmp_path, TWO.replace(before, after)) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "sweep.yaml").exists()


def test_overrides_hold_for_all_members_and_those_that_the_plan_makes_are_refused(tmp_path):
    assert compare(tmp_path, TWO, "optim.steps=9") == 2
    assert not (tmp_path / "sweep.yaml").exists()
    assert compare(tmp_path, TWO, "model.d_model=8") == 0
    cells = read_sweep(tmp_path / "sweep.yaml").cells
    assert len(cells) == 8
    assert all({"model.d_model=8", "model.vocab_size=300"} <= {*x.overrides} for x in cells)


def test_intervals_are_planned_unless_all_members_or_one_has_them(tmp_path, capsys):
    text = TWO.replace("[model.memory_length=0]", "[model.memory_length=0, evaluation.interval=5]")
    assert compare(tmp_path, text, "checkpoint.interval=9", "checkpoint.keep_every=9") == 0
    assert "and one per keep_every" in capsys.readouterr().out
    sweep = tmp_path / "sweep.yaml"
    for cell in read_sweep(sweep).cells:
        run = config_of(cell, sweep)
        assert (run.checkpoint.interval, run.checkpoint.keep_every) == (9, 9)
        assert run.evaluation.interval == (5 if "no-memory" in cell.name else 0)


def test_an_extending_files_members_replace_the_bases_whose_experiment_it_finds(tmp_path):
    assert compare(tmp_path, TWO) == 0
    (tmp_path / "own").mkdir()
    write_text(tmp_path / "own" / "a.yaml", "extends: ../two.yaml\nseeds: [3]\nrates: [4e-3]\n")
    members = "members: {mine: [model.d_model=8], long: [model.memory_length=4]}\n"
    write_text(tmp_path / "own" / "b.yaml", f"extends: a.yaml\nbaseline: mine\n{members}")
    for name, expected in (("a", {"no-memory", "long"}), ("b", {"mine", "long"})):
        output = tmp_path / f"{name}-sweep.yaml"
        plan = ("plan", tmp_path / "own" / f"{name}.yaml", "--output", output)
        assert command(*plan, "model.vocab_size=300") == 0
        cells = read_sweep(output).cells
        assert {member_name(cell.name) for cell in cells} == expected
    assert [cell.facts["baseline"] for cell in cells] == [1.0, 0.0]


def ended(member: str, rate: float, loss: float | str, seed: int = 1) -> Row:
    ended = {"progress": 1.0 if loss else 0.5, "excluded": "diverged" * (loss == math.inf)}
    name = f"c1e09-{member}-lr{rate:g}-s{seed}"
    return Row(name=name, loss=loss, learning_rate=rate, seed=seed, **ended)


def test_a_row_that_rests_on_another_text_than_most_is_left_out_of_the_table():
    usual, other = "[[2.0, 50], [2.1, 50]]", "[[2.0, 30]]"
    rows = [replace(ended("a", 1e-3, 2.0, seed), loss_parts=usual) for seed in (1, 2)]
    rows += [replace(rows[0], name="other", loss_parts=other, loss_documents=1)]
    reasons = [row.excluded for row in with_one_text(rows)]
    assert reasons[:2] == ["", ""]
    assert reasons[2].startswith("validated on 30 tokens of 1 document, most runs on another")


def test_a_members_best_rate_has_the_lowest_mean_of_its_seeds_once_all_runs_have_ended():
    seeds = [ended("a", 1e-3, 2.0), ended("a", 2e-3, 1.9), ended("a", 4e-3, math.inf)]
    seeds += [ended("a", 1e-3, 1.9, 2), ended("a", 2e-3, 2.1, 2), ended("a", 4e-3, 0.1, 2)]
    running = [ended("b", 1e-3, 1.0), ended("b", 2e-3, "")]
    diverged = [ended("c", 1e-3, math.inf)]
    (found,) = member_results([*seeds, *running, *diverged])
    assert (found.member, found.seeds.losses) == ("a", {1: 2.0, 2: 1.9})


def test_members_may_have_kinds_of_layers_that_others_lack(tmp_path):
    kinds = "model.layer_kinds=[deltanet, attention]"
    members = {
        "plain": [],
        "whole": [kinds],
        "narrow": [kinds, "model.mixers.deltanet.largest_write=2"],
        "mamba": ["model.layer_kinds=[mamba2, attention]", "model.mixers.mamba2.state_width=4"],
    }
    two = TWO.partition("members:")[0].replace("8e7", "4e8")
    write_text(
        tmp_path / "tiny.yaml", TINY.replace("CORPUS", str(make_tiny_corpus(tmp_path / "c")))
    )
    write_text(tmp_path / "two.yaml", f"{two}members: {json.dumps(members)}\n")
    assert command("plan", tmp_path / "two.yaml", "--output", tmp_path / "sweep.yaml") == 0
    cells = read_sweep(tmp_path / "sweep.yaml").cells
    planned = {
        member_name(cell.name): config_of(cell, tmp_path / "sweep.yaml").model for cell in cells
    }
    assert {name: model.mixers for name, model in planned.items()} == {
        "plain": {},
        "whole": {},
        "narrow": {"deltanet": {"largest_write": 2.0}},
        "mamba": {"mamba2": {"state_width": 4}},
    }


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> Path:
    """A comparison whose cells were planned, trained and probed as `make` does it."""
    directory = tmp_path_factory.mktemp("variants")
    corpus = make_tiny_corpus(directory / "corpus")
    write_text(directory / "tiny.yaml", TINY.replace("CORPUS", str(corpus)))
    write_text(directory / "two.yaml", TWO)
    assert command("plan", directory / "two.yaml", "--output", directory / "sweep.yaml") == 0
    for cell in read_sweep(directory / "sweep.yaml").cells:
        words = ["train", str(directory / "tiny.yaml"), *cell.overrides]
        assert main([*words, "--run-dir", str(directory / "cells" / cell.name)]) == 0
    torch.set_flush_denormal(False)  # training sets it for its process
    runs = sorted((directory / "cells").glob("c*-s*"))
    assert len(runs) == 8
    probe = ["--probe", "needle", "position", "--trials=4", "--longest-distance=32"]
    assert main(["evaluate", *map(str, runs), *probe, "--max-tokens=2000"]) == 0
    return directory


def test_finished_members_are_in_the_table_with_all_of_their_seeds(compared, capsys):
    assert command("collect", compared / "sweep.yaml", "--runs-dir", compared / "cells") == 0
    table, out = compared / "cells" / "runs.csv", compared / "report"
    assert command("report", table, "--output", out) == 0
    said = capsys.readouterr().out
    assert re.search(r"^long +\d\.\d{4} +\d\.\d{4} .* \S+kB ", said, re.M)
    assert re.search(r"^All members: n: 2; validated on: .* tokens .*; rate: 0.004\*", said, re.M)
    found = {each.member: each for each in member_results(read_rows(table))}
    assert set(found) == {"no-memory", "long"}
    assert found["long"].first.lane_bytes == 4 * 16 * (8 + 32) + 4 * 32, "two layers, documents"
    assert found["no-memory"].first.lane_bytes == 0
    assert float(found["no-memory"].first.D) > float(found["long"].first.D), "as many FLOPs"
    for each in found.values():
        assert len(each.seeds.losses) == len(each.seeds.texts) == 2
        assert (each.first.learning_rate, each.is_edge) == (4e-3, True)
        assert set(each.probed("needle")) == {8, 16, 32}
        assert each.tokens_per_second > 0
    page = (out / "report.html").read_text()
    assert all(f"{each.loss:.4f}" in page for each in found.values())
    figures = {"loss-over-tokens", "loss-over-flops", "variants", "differences", "positions"}
    assert {p.stem for p in out.glob("*.png")} == {*figures, "positions-differences"}
    assert "'--probe position', on 2,000 tokens" in said
    lines = (out / "loss-over-flops.csv").read_text().splitlines()
    dots = {f"c8e07-{name}-lr0.004-s{seed} validation loss" for name in found for seed in (3, 4)}
    series = {*found} | {f"{name} seeds" for name in found} | dots
    assert {line.split(",")[0] for line in lines} == {"series", *series}
    drawn = {line.split(",")[0] for line in (out / "variants.csv").read_text().splitlines()}
    assert {"long", "no-memory"} < drawn
    numbers = list(csv.DictReader((out / "table-variants.csv").open()))
    assert [float(row["rate"]) for row in numbers] == [0.004, 0.004]
    (heads,) = re.findall("^member .*", (out / "table-variants.tex").read_text(), re.M)
    assert len(heads.split("&")) == 7
    runs = [str(path) for path in sorted((compared / "cells").glob("c*-s*"))]
    assert main(["report", *runs, "--output", str(out)]) == 0
    members = (out / "members.csv").read_text().splitlines()
    assert len(members) == 1 + 4, "two members at two rates, each with two seeds"
    assert all(",2," in line for line in members[1:])
    drawn = (out / "figures" / "loss.csv").read_text()
    drawn = {line.split(",")[0] for line in drawn.splitlines()}
    assert len(drawn) == 1 + 4 * 4, "of each a mean, a band and two seeds"


def test_probes_that_some_seeds_lack_are_not_in_the_table(compared, tmp_path, capsys):
    for run in (compared / "cells").glob("c*-s*"):
        shutil.copytree(run, tmp_path / run.name)
    (tmp_path / "c8e07-long-lr0.004-s3" / "probes.json").unlink()
    assert command("collect", compared / "sweep.yaml", "--runs-dir", tmp_path) == 0
    assert command("report", tmp_path / "runs.csv") == 0
    assert "not in the row of long, as some seeds lack them: " in capsys.readouterr().out
    numbers = csv.DictReader((tmp_path / "scaling-report" / "table-variants.csv").open())
    assert {row["member"]: bool(row["needle"]) for row in numbers} == {
        "long": False,
        "no-memory": True,
    }
    tex = (tmp_path / "scaling-report" / "table-variants.tex").read_text()
    assert "% All members: n: 2; validated on: " in tex


def test_without_a_finished_member_there_is_no_page(compared, tmp_path, capsys):
    assert command("collect", compared / "sweep.yaml", "--runs-dir", tmp_path) == 0
    assert command("report", tmp_path / "runs.csv") == 2
    assert "no member" in capsys.readouterr().err


def test_a_real_checkpoint_on_a_cpu_has_the_bytes_that_describe_counts_for_fp32(compared):
    assert load_config(RunConfig, compared / "tiny.yaml").engine.precision == "auto"
    run_dir = RunDir(compared / "cells" / "c8e07-no-memory-lr0.004-s3")
    config = run_dir.config
    assert config.engine.precision == "fp32"
    files = run_dir.checkpoints.glob(f"step-{config.optim.steps:08}/*.safetensors")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert tensors.pop("random.cpu").nbytes < 6000
    assert sum(tensor.nbytes for tensor in tensors.values()) == checkpoint_bytes(config)


def test_collected_table_has_exact_costs_and_the_last_evaluations_loss(collected):
    rows = list(csv.DictReader((collected / "runs.csv").read_text().splitlines()))
    sweep = read_sweep(collected / "sweep.yaml")
    assert [row["name"] for row in rows] == [cell.name for cell in sweep.cells]
    for row, cell in zip(rows, sweep.cells, strict=True):
        cost, loss = run_cost(config_of(cell, collected / "sweep.yaml")), float(row["loss"])
        exact = cost.parameters, cost.body_parameters, cost.tokens
        assert tuple(int(row[name]) for name in ("N", "N_body", "D")) == exact
        assert row["tasks/quiz/acc"] == "0.5"
        assert float(row["loss/code"]) == pytest.approx(loss + 1)
        assert float(row["bits_per_byte"]) == pytest.approx(0.4 * loss)
        assert float(row["C"]) == pytest.approx(cost.flops)
        assert loss == pytest.approx(float(HOFFMANN.loss(cost.parameters, cost.tokens)))
        lines = (collected / "runs" / cell.name / "metrics.jsonl").read_text().splitlines()
        assert float(row["seconds"]) == 2.0 * (len(lines) - 1), "of steps alone"
        assert (row["code"], row["progress"]) == ("v1-7-gabc", "1.0")
    assert [row["holdout"] for row in rows].count("yes") == 1


def test_cells_without_a_final_loss_are_in_the_table_with_their_reason(collected, tmp_path, capsys):
    sweep_path, runs = collected / "sweep.yaml", tmp_path / "runs"
    cells = read_sweep(sweep_path).cells
    shutil.copytree(collected / "runs", runs)
    for cell in cells[:3]:
        shutil.rmtree(runs / cell.name)
    train_by_the_law(runs / cells[1].name, config_of(cells[1], sweep_path), until=0.5)
    train_by_the_law(runs / cells[2].name, config_of(cells[2], sweep_path), loss=float("nan"))
    metrics = RunDir(runs / cells[3].name).metrics
    lines = metrics.read_text().splitlines(keepends=True)
    write_text(metrics, "".join(line for line in lines if "evaluation" not in line))
    began = TrainingBegan(step=9, world_size=1, code="v1-8-gdef")
    RunDir(runs / cells[4].name).ledger.append(began)
    output = ("--runs-dir", runs, "--output", tmp_path / "runs.csv")
    assert command("collect", sweep_path, *output) == 0
    rows = csv.DictReader((tmp_path / "runs.csv").read_text().splitlines())
    reasons = {row["name"]: row["excluded"] for row in rows}
    found = [reasons[cell.name] for cell in cells[:4]]
    for reason, kind in zip(
        found, ("not started", "not finished", "diverged", "all steps are made"), strict=True
    ):
        assert reason.startswith(kind)
    said = capsys.readouterr().out
    assert "15 of 19 cells" in said
    assert "2 versions" in said
    assert command("fit", tmp_path / "runs.csv", "--verbose") == 0
    said = capsys.readouterr().out
    assert all(f"left out: {cell.name}: {reasons[cell.name]}" in said for cell in cells[:4])


def test_tables_are_beside_the_sweeps_runs_by_default(collected, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(collected / "runs", tmp_path / "mine")
    assert command("collect", collected / "sweep.yaml", "--runs-dir", "mine") == 0
    table = Path("mine/runs.csv")
    said = capsys.readouterr().out
    assert all(f"scale {action} {table}" in said for action in ("fit", "report"))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
