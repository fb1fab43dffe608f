"""Sweeps of rates: the plan's arithmetic, the valley of known losses, and a real sweep."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from foundation.errors import DataError
from foundation.files import write_text
from pretrain.cli import main
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of
from pretrain.rundir.run_dir import RunDir
from pretrain.scaling.collect import Row, write_rows
from pretrain.scaling.comparison_pages import loss_by_rate
from pretrain.scaling.rates import TOLERABLE, fit_rates, verdicts
from pretrain.scaling.sweep_file import config_of, read_sweep
from tests.helpers.corpora import make_tiny_corpus

BASE = """name: base
model: {vocab_size: 300, num_layers: 2, d_model: 32, num_heads: 2, memory_length: 32}
optim: {steps: 1000}
data:
  path: absent
  segment_length: 32
  lanes: 16
"""
RATES = [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3]
BEST, LOWEST, BEND = 1.2e-3, 3.0, 0.1


def losses_at(rates, noise=0.0, rng=None) -> list[float]:
    """Losses of a valley whose lowest point is known."""
    exact = LOWEST + BEND / 2 * (np.log(rates) - math.log(BEST)) ** 2
    return list(exact * (1 + noise * rng.standard_normal(len(rates))) if rng else exact)


def planned(tmp_path: Path, *flags: object, text: str = "") -> list[RunConfig]:
    """The runs of a plan of the base with these flags."""
    experiment, sweep = tmp_path / "base.yaml", tmp_path / "sweep.yaml"
    write_text(experiment, BASE + text)
    words = ["scale", "plan", experiment, *flags, "--output", sweep]
    assert main([str(word) for word in words]) == 0
    return [config_of(cell, sweep) for cell in read_sweep(sweep).cells]


def test_cells_differ_in_rate_lanes_and_seed_alone_and_read_as_many_tokens(tmp_path):
    runs = planned(tmp_path, "--rates", *RATES, "--lanes", 16, 32, "--seeds", 1, 2)
    assert len(runs) == len({run.name for run in runs}) == 5 * 2 * 2
    assert {(run.data.lanes, run.optim.steps) for run in runs} == {(16, 1000), (32, 500)}
    assert {run.optim.learning_rate for run in runs} == set(RATES)
    assert {run.seed for run in runs} == {1, 2}
    for run in runs:
        assert cost_of(run).tokens == 1000 * 512
        assert run.optim.schedule.warmup_steps == 0.05 * run.optim.steps
        assert run.model == runs[0].model
        same = {"steps", "learning_rate", "schedule"}
        for name in vars(run.optim).keys() - same:
            assert getattr(run.optim, name) == getattr(runs[0].optim, name)


@pytest.mark.parametrize(
    ("flags", "text", "said"),
    [
        (["1e-3", "1e-3", "2e-3"], "", "expected at least 3 different positive rates"),
        (["0", "1e-3", "2e-3"], "", "expected at least 3 different positive rates"),
        (["1e-3", "2e-3", "inf"], "", "expected at least 3 different positive rates"),
        (["1e-3", "2e-3", "4e-3", "--lanes", "100000"], "", "less than one step"),
        (["1e-3", "2e-3", "4e-3", "--steps", "0"], "", "--steps=0 must be 1 or more"),
        (["1e-3", "2e-3", "4e-3", "--memories", "8"], "", "--memories has no meaning in a plan"),
        (
            ["1e-3", "2e-3", "4e-3", "--seeds", "1"],
            "  phases: [{from_step: 9, lanes: 8}]\n",
            "phase",
        ),
        (["1e-3", "2e-3", "4e-3"], "  phases: [{from_step: 9, lanes: 8}]\n", "has 1 phase "),
    ],
)
def test_rates_that_make_no_sweep_are_refused(tmp_path, capsys, flags, text, said):
    write_text(tmp_path / "base.yaml", BASE + text)
    words = ["scale", "plan", str(tmp_path / "base.yaml"), "--rates", *flags]
    assert main([*words, "--output", str(tmp_path / "sweep.yaml")]) == 2
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
    for _ in range(200):
        found = fit_rates(512, rates, losses_at(rates, 0.005, rng)).optimum
        held.append(found.rate.low <= BEST <= found.rate.high)
    assert 0.90 <= np.mean(held) <= 1.0


@pytest.mark.parametrize("rate", [BEST * 2, 3.2e-2])
def test_rates_at_which_a_run_diverged_do_not_bend_the_valley(rate):
    found = fit_rates(512, [*RATES, rate, 6.4e-2], [*losses_at(RATES), 9.0, math.inf])
    assert found.optimum.rate.value == pytest.approx(BEST, rel=1e-9)
    assert found.diverged == (rate, 6.4e-2)


def test_a_low_rate_that_ends_far_above_the_lowest_loss_is_slow_and_has_not_diverged():
    found = fit_rates(512, [1e-5, *RATES], [5.0, *losses_at(RATES)])
    assert found.diverged == ()
    assert found.rates_S.min() == 1e-5
    assert found.optimum.rate.value == pytest.approx(BEST, rel=1e-9)


@pytest.mark.parametrize(
    ("diverged", "said"),
    [
        (8e-3, "0.004 is the highest rate that did not diverge: add 0.0057"),
        (6.4e-2, "0.004 is the highest rate that did not diverge: add 0.008"),
    ],
)
def test_a_rate_that_diverged_is_not_advised_again(diverged, said):
    found = fit_rates(512, [1e-3, 2e-3, 4e-3, diverged], [3.3, 3.1, 3.0, math.inf])
    assert said in verdicts([found])[0]


@pytest.mark.parametrize(
    ("rates", "losses", "said"),
    [
        ([1e-4, 1e-2, 1.0], [3.2, 3.1, 3.2], "rates near 0.01 are missing: add 0.005 and 0.02"),
        ([1e-3, 2e-3, 4e-3], [3.0, 3.1, 3.3], "0.001 is the lowest rate tried: add 0.0005"),
        ([1e-3, 2e-3, 4e-3], [3.3, 3.1, 3.0], "0.004 is the highest rate tried: add 0.008"),
        ([1e-3, 2e-3, 4e-3], [3.2, 3.1, 3.2], "no interval: three runs determine a parabola"),
    ],
)
def test_what_a_sweep_cannot_tell_is_said(rates, losses, said):
    (line,) = verdicts([fit_rates(512, rates, losses)])[:1]
    assert said in line


def test_a_plan_with_more_rates_leaves_the_planned_cells_as_they_are(tmp_path, capsys):
    experiment, file = tmp_path / "run.yaml", tmp_path / "s.yaml"
    write_text(experiment, "name: tiny\nmodel: {vocab_size: 300}\ndata: {path: absent}\n")
    plan = ["scale", "plan", str(experiment), "--steps=200", f"--output={file}", "--seeds", "1"]
    assert main([*plan, "--rates", "1e-3", "2e-3", "4e-3"]) == 0
    before = read_sweep(file)
    assert main([*plan, "--rates", "1e-3", "2e-3", "4e-3", "8e-3"]) == 0
    after = read_sweep(file)
    assert (after.name, after.varies) == (before.name, "rates")
    assert after.cells[:3] == before.cells
    assert len(after.cells) == 4


def test_a_parabola_that_contradicts_the_lowest_measured_loss_is_warned_of():
    rates, losses = [1e-3, 2e-3, 4e-3, 8e-3], [6.0237, 5.6421, 5.6611, 5.6665]
    verdict, warning = verdicts([fit_rates(512, rates, losses)])
    assert "optim.learning_rate=0.0041" in verdict
    assert warning.startswith("warning: the lowest measured loss is 5.6421, at 0.002: ")
    assert len(verdicts([fit_rates(512, RATES, losses_at(RATES))])) == 1


def test_fewer_than_three_rates_that_ended_well_are_no_valley():
    with pytest.raises(DataError, match="2 rates ended with a loss, a valley needs 3"):
        fit_rates(512, [1e-3, 2e-3, 4e-3], [3.0, 3.1, math.inf])
    with pytest.raises(DataError, match="0 rates ended with a loss, a valley needs 3"):
        fit_rates(512, [], [])


def test_a_real_sweep_is_planned_trained_and_reported(tmp_path: Path, capsys):
    corpus = make_tiny_corpus(tmp_path / "corpus")
    experiment, sweep = tmp_path / "tiny.yaml", tmp_path / "sweep.yaml"
    write_text(
        experiment,
        f"""name: tiny
model: {{num_layers: 1, d_model: 16, num_heads: 2, memory_length: 8}}
data: {{path: {corpus}, lanes: 4, segment_length: 8}}
optim: {{steps: 30, learning_rate: 4e-2, schedule: {{shape: linear, final_fraction: 0.2}}}}
engine: {{kind: torch}}
evaluation: {{interval: 0}}
metrics: {{tensorboard: false}}
""",
    )
    rates = ["4e-3", "1.6e-2", "6.4e-2", "2.56e-1"]  # the ends lose by more than rounding
    plan = ["scale", "plan", str(experiment), "evaluation.max_tokens=200", "--rates", *rates]
    assert main([*plan, "--output", str(sweep)]) == 0
    cells = read_sweep(sweep).cells
    write_text(experiment, experiment.read_text().replace("learning_rate: 4e-2, ", ""))
    for cell in cells:
        run = ["train", str(experiment), "--run-dir", str(tmp_path / "runs" / cell.name)]
        assert main([*run, *cell.overrides]) == 0
    capsys.readouterr()
    assert main(["scale", "collect", str(sweep), "--runs-dir", str(tmp_path / "runs")]) == 0
    assert "next: pretrain scale report" in capsys.readouterr().out
    assert main(["scale", "report", str(tmp_path / "runs" / "runs.csv")]) == 0
    printed = capsys.readouterr().out
    last = {
        cell.name: RunDir(tmp_path / "runs" / cell.name).read_metrics()[-1]["loss"]
        for cell in cells
    }
    page = (tmp_path / "runs" / "scaling-report" / "report.html").read_text()
    for loss in last.values():
        assert f"{loss:.4f}" in printed
        assert f"{loss:.4f}" in page
    assert "32 tokens a step: optim.learning_rate=0.0" in printed
    assert (tmp_path / "runs" / "scaling-report" / "rates.png").stat().st_size > 5_000


def test_plans_for_which_the_corpus_is_too_small_are_refused(tmp_path: Path, capsys):
    corpus = make_tiny_corpus(tmp_path / "corpus")
    experiment = tmp_path / "tiny.yaml"
    write_text(
        experiment,
        f"model: {{num_layers: 1, d_model: 16, num_heads: 2, memory_length: 8}}\n"
        f"data: {{path: {corpus}, lanes: 16, segment_length: 32}}\noptim: {{steps: 4}}\n",
    )
    for command, advice in (
        (["--rates", "0.1", "0.2", "0.4", "--steps", "9999"], "3 of 3 cells need more tokens"),
    ):
        out = ["--output", str(tmp_path / "sweep.yaml")]
        assert main(["scale", "plan", str(experiment), *command, *out]) == 2
        assert advice in capsys.readouterr().err
    assert not (tmp_path / "sweep.yaml").exists()


@pytest.mark.parametrize(("losses", "has_star"), [([3.3, 3.1, 3.0], False), ([3.2, 3, 3.2], True)])
def test_the_picture_names_the_rates_tried_and_explains_no_star_it_has_not(
    losses, has_star, tmp_path: Path
):
    found = [fit_rates(512, [1e-3, 4e-3, 8e-3], losses)]
    (axes,) = loss_by_rate(found).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0.001", "0.004", "0.008"]
    rows = [
        Row(name=f"{rate}", tokens_per_step=512, learning_rate=rate, loss=loss, progress=1.0,
            varies="rates")
        for rate, loss in zip([1e-3, 4e-3, 8e-3], losses, strict=True)
    ]  # fmt: skip
    write_rows(tmp_path / "runs.csv", rows)
    assert main(["scale", "report", str(tmp_path / "runs.csv")]) == 0
    page = (tmp_path / "scaling-report" / "report.html").read_text()
    assert ("star:" in page) == has_star
