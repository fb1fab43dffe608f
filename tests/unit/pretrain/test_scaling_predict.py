"""Forecasts, their intervals, and the questions a fit refuses to answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from foundation.errors import ConfigError
from foundation.files import write_text
from pretrain.cli import main
from pretrain.costs.flops import cost_of
from pretrain.rundir.run_dir import RunDir
from pretrain.scaling.fit import fit_all, loss_interval
from pretrain.scaling.law import Law, log_loss, log_optimum
from pretrain.scaling.predict import (
    doubts,
    near_optimal_band,
    optimal_flops,
    preferred,
    refuse_wild,
    run_doubts,
)
from tests.helpers.corpora import make_tiny_corpus
from tests.helpers.scaling import HOFFMANN, SIX_N, make_points, simulated

FURTHER = np.log(1e21)  # ten times the largest budget


@pytest.fixture(scope="module")
def fit():
    return fit_all(simulated(noise=0.001, seed=1))


def test_the_optimum_at_some_flops_is_the_laws_within_its_interval(fit):
    n, d = log_optimum(HOFFMANN.theta, FURTHER, SIX_N)
    least = float(np.exp(log_loss(HOFFMANN.theta, n[None], d[None])[0]))
    found = preferred(fit)
    assert found.key == "parametric"
    for interval, true in (
        (found.parameters(FURTHER), np.exp(n)),
        (found.tokens(FURTHER, SIX_N), np.exp(d)),
        (found.loss(FURTHER), least),
    ):
        assert interval.low < true < interval.high
        assert interval.value == pytest.approx(true, rel=0.1)


@pytest.mark.parametrize("key", ["lowest", "isoflop", "parametric"])
def test_asking_by_tokens_or_parameters_is_the_inverse_of_asking_by_flops(fit, key):
    approach, c = preferred(fit, key), np.log(3e20)
    tokens, size = approach.tokens(c, fit.flops_law).value, approach.parameters(c).value
    assert optimal_flops(approach, fit.flops_law, tokens=tokens) == pytest.approx(3e20)
    assert optimal_flops(approach, fit.flops_law, parameters=size) == pytest.approx(3e20)


def test_sizes_that_do_not_grow_have_no_flops(fit):
    approach = preferred(fit, "isoflop")
    shrinking = replace(approach, line=replace(approach.line, power=np.asarray(-0.1)))
    assert np.isnan(optimal_flops(shrinking, fit.flops_law, parameters=1e9))


def test_every_size_of_the_band_loses_at_most_a_hundredth_and_the_next_ones_lose_more(fit):
    law = fit.approach("parametric").line
    low, high = near_optimal_band(fit, 1e20, preferred(fit, "parametric"))
    least = float(law.loss(np.log(1e20)))

    def loss(size):
        return float(
            np.exp(log_loss(law.theta, np.log(size), SIX_N.log_tokens(np.log(1e20), np.log(size))))
        )

    for edge, beyond in ((low, low / 1.01), (high, high * 1.01)):
        assert loss(edge) <= 1.01 * least < loss(beyond)


def test_a_law_without_an_optimum_has_no_band(fit):
    law = fit.approach("parametric")
    flat = replace(law, line=replace(law.line, theta=law.line.theta * [1, 1, 1, np.nan, 1]))
    assert near_optimal_band(fit, 1e20, flat) is None


def test_the_loss_of_a_single_run_has_an_interval(fit):
    found = loss_interval(fit.law, 2e9, 4e10)
    assert found.low < HOFFMANN.loss(2e9, 4e10) < found.high
    assert run_doubts(fit, 2e9, 4e10) == []


def test_wild_extrapolation_is_refused_and_says_why(fit):
    approach = preferred(fit)
    refuse_wild(doubts(fit, 5e21, approach))
    with pytest.raises(
        ConfigError, match=r"1e\+23 FLOPs are over 100 times outside the fitted range.*--force"
    ):
        refuse_wild(doubts(fit, 1e23, approach))
    with pytest.raises(
        ConfigError, match=r"1e\+15 FLOPs are over 100 times outside .* with 6 budgets"
    ):
        refuse_wild(doubts(fit, 1e15, approach))
    with pytest.raises(ConfigError, match=r"3e\+12 parameters are over 30 times outside"):
        refuse_wild(run_doubts(fit, 3e12, 1e10))


def test_two_budgets_reach_less_far():
    fit = fit_all(simulated(budgets=(1e18, 1e19, 2)))
    assert doubts(fit, 5e19, preferred(fit)) == []
    assert any("over 10 times outside" in doubt for doubt in doubts(fit, 5e20, preferred(fit)))


def test_an_uncertain_optimum_or_approaches_that_differ_are_doubts():
    noisy = fit_all(simulated(noise=0.05, budgets=(1e18, 1e19, 5), num_sizes=5, seed=1))
    law = preferred(noisy, "parametric")
    assert any("the interval of N*" in doubt for doubt in doubts(noisy, 9e20, law))
    differing = fit_all(simulated(noise=0.02, budgets=(1e18, 1e20, 4), num_sizes=5))
    assert any(
        "optimal sizes differ" in doubt for doubt in doubts(differing, 5e21, preferred(differing))
    )


def test_an_approach_the_runs_do_not_allow_cannot_be_asked():
    rng = np.random.default_rng(0)
    size_P, tokens_P = np.exp(rng.uniform(16, 21, 20)), np.exp(rng.uniform(20, 25, 20))
    fit = fit_all(make_points(size_P, tokens_P, HOFFMANN.loss(size_P, tokens_P)))
    with pytest.raises(ConfigError, match="law 'isoflop' is not available for these runs"):
        preferred(fit, "isoflop")


def test_the_experiment_that_predict_writes_is_trained_as_it_is(tmp_path):
    corpus = make_tiny_corpus(tmp_path / "corpus")
    write_text(
        tmp_path / "tiny.yaml",
        f"""name: tiny
model: {{num_layers: 2, d_model: 16, num_heads: 4, memory_length: 8}}
data: {{path: {corpus}, lanes: 4, segment_length: 8}}
engine: {{kind: torch}}
evaluation: {{interval: 0, max_tokens: 200}}
metrics: {{tensorboard: false}}
""",
    )
    # As many parameters as tokens are optimal by this law: at 2e8 FLOPs a few thousand of either.
    points = simulated(
        Law(E=1.5, A=100.0, B=100.0, alpha=0.5, beta=0.5), budgets=(2e7, 2e8, 3), num_sizes=5
    )
    columns = (points.parameters_P, points.tokens_P, points.flops_P, points.loss_P)
    rows = "".join(
        ",".join(f"{value!r}" for value in row) + "\n" for row in np.stack(columns, 1).tolist()
    )
    write_text(tmp_path / "runs.csv", "N,D,C,loss\n" + rows)
    written, run_dir = tmp_path / "best.yaml", tmp_path / "run"
    question = ["scale", "predict", str(tmp_path / "runs.csv"), "--flops", "2.5e8"]
    family = ["--experiment", str(tmp_path / "tiny.yaml"), "--rule", "base", "--keep-layers"]
    assert main([*question, *family, "--write", str(written)]) == 0
    assert main(["train", str(written), "--run-dir", str(run_dir)]) == 0
    torch.set_flush_denormal(False)  # training sets it for its process
    config = RunDir(run_dir).config
    assert config.model.num_layers == 2
    assert cost_of(config).flops == pytest.approx(2.5e8, rel=0.01)
    assert RunDir(run_dir).read_metrics()[-1]["step"] == config.optim.steps


def test_a_fit_without_intervals_answers_with_its_numbers_alone():
    few = fit_all(simulated(num_sizes=3, budgets=(1e18, 1e19, 2), noise=0.005, seed=1))
    assert doubts(few, 2e19, preferred(few)) == []
    assert np.isnan(preferred(few).parameters(np.log(2e19)).low)
    assert run_doubts(few, 2e9, 1e9) == []
