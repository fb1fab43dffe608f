"""Questions beyond the compute-optimal run: serving and repeated data."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from data_pipeline.corpora.corpus import Corpus
from foundation.csv_files import write_csv
from foundation.settings import load_config
from pretrain.commands import scale
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of
from pretrain.scaling.frontier import Approach
from pretrain.scaling.law import FlopsLaw, Law, LawLine
from pretrain.scaling.predict import (
    REPEATED_TOKENS,
    best_with_repeats,
    cheapest_at_loss,
    compute_optimal,
    effective,
    effective_tokens,
    loss_with_repeats,
    tokens_at_loss,
)
from pretrain.scaling.sweep_file import read_sweep
from tests.helpers.scaling import HOFFMANN, SIX_N, simulated

# With three digits of the exponents, as Sardana et al. 2023 use them.
CHINCHILLA = Law(E=1.69, A=406.4, B=410.7, alpha=0.336, beta=0.283)
STEEP = FlopsLaw(scale=20.0, power=0.95)


def law_of(law: Law, flops_law: FlopsLaw = SIX_N) -> Approach:
    """Approach 3 as if it were known exactly."""
    exact = LawLine(np.stack([law.theta] * 2), flops_law)
    line = LawLine(law.theta, flops_law)
    return Approach("parametric", "3 parametric", None, line, exact, free=1, loss_free=1)


@pytest.fixture(scope="module")
def chinchilla():
    return law_of(CHINCHILLA)


def test_the_example_of_sardana_et_al_is_reproduced(chinchilla):
    # Figure 1: of a 13B model's quality and 2T served tokens, a 7B model saves 1.7e22 FLOPs (17%).
    flops = 4.49e22
    optimal = compute_optimal(chinchilla, flops, 2e12)
    assert optimal.parameters.value == pytest.approx(13e9, rel=0.01)
    cheapest = cheapest_at_loss(chinchilla, flops, 2e12)
    assert cheapest.parameters.value == pytest.approx(7e9, rel=0.02)
    saved = optimal.total.value - cheapest.total.value
    assert saved == pytest.approx(1.7e22, rel=0.02)
    assert saved / optimal.total.value == pytest.approx(0.17, abs=0.006)
    assert cheapest.loss.value == pytest.approx(optimal.loss.value, rel=1e-9)


@pytest.mark.parametrize("flops_law", [SIX_N, STEEP])
def test_no_other_size_of_the_same_loss_costs_less_in_all(flops_law):
    law = law_of(HOFFMANN, flops_law)
    flops, served = 1e20, 3e11
    cheapest = cheapest_at_loss(law, flops, served)
    size = math.log(cheapest.parameters.value)
    for step in (-0.3, -0.05, 0.05, 0.3):
        theta, goal = law.line.theta, np.log(cheapest.loss.value)
        tokens = math.exp(tokens_at_loss(theta, goal, size + step))
        per_token = flops_law.scale * math.exp(size + step) ** flops_law.power
        assert per_token * (tokens + served / 3) > cheapest.total.value
    n, d = cheapest.parameters.value, cheapest.tokens.value
    assert cheapest.training.value == pytest.approx(flops_law.scale * n**flops_law.power * d)
    assert cheapest.serving.value == pytest.approx(cheapest.training.value * served / d / 3)


def test_without_serving_the_compute_optimal_run_is_the_cheapest(chinchilla):
    found = cheapest_at_loss(chinchilla, 1e20, 0.0)
    optimal = compute_optimal(chinchilla, 1e20, 0.0)
    assert found.parameters.value == pytest.approx(optimal.parameters.value, rel=1e-3)
    assert found.total.value == pytest.approx(1e20, rel=1e-6)


def test_repeated_tokens_are_worth_less_and_less():
    assert effective_tokens(5e9, 1e10) == 5e9
    assert effective_tokens(1e10, 1e10) == 1e10
    # Four epochs are nearly as good as new tokens (section 6), and repeats never more than R*.
    assert effective_tokens(4e10, 1e10) == pytest.approx(0.931 * 4e10, rel=1e-3)
    assert effective_tokens(1e14, 1e10) == pytest.approx((1 + REPEATED_TOKENS) * 1e10)
    worth = np.diff(effective(np.linspace(1, 60, 60), 1.0, REPEATED_TOKENS))
    assert (np.diff(worth) < 0).all()
    assert worth[15] == pytest.approx(math.exp(-1), abs=0.02)


def test_a_small_corpus_makes_the_best_run_smaller_and_its_loss_higher(chinchilla):
    plenty = best_with_repeats(chinchilla, 1e20, 1e12)
    optimal = compute_optimal(chinchilla, 1e20, 0.0)
    assert plenty.parameters.value == pytest.approx(optimal.parameters.value, rel=1e-3)
    assert plenty.loss.value == pytest.approx(optimal.loss.value, rel=1e-6)
    before = plenty
    for unique in (5e9, 1e9):
        found = best_with_repeats(chinchilla, 1e20, unique)
        assert found.loss.value > before.loss.value
        assert found.parameters.value < optimal.parameters.value
        assert found.tokens.value / unique > before.tokens.value / unique
        for step in (0.9, 1.1):
            size = step * found.parameters.value
            logs = np.log([size, 1e20 / 6 / size])
            assert loss_with_repeats(chinchilla.line, *logs, unique) > found.loss.value
        before = found


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    points = simulated(CHINCHILLA, noise=0.001)
    columns = {
        "N": points.parameters_P,
        "D": points.tokens_P,
        "C": points.flops_P,
        "loss": points.loss_P,
    }
    path = tmp_path_factory.mktemp("runs") / "runs.csv"
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    write_csv(path, list(columns), rows)
    return path


def command(*words: object) -> int:
    return scale.PROGRAM.main([str(word) for word in words])


def test_predict_answers_and_writes_the_run_that_is_cheapest_to_train_and_serve(
    table, tmp_path, capsys
):
    experiment = tmp_path / "books.yaml"
    experiment.write_text(
        "name: books\nmodel: {vocab_size: 8192, num_layers: 12, d_model: 768, num_heads: 12}\n"
        "data: {segment_length: 512, path: absent}\n"
    )
    question = ("predict", table, "--flops", "1e20", "--inference-tokens", "200G")
    written = tmp_path / "best.yaml"
    assert command(*question, "--experiment", experiment, "--write", written) == 0
    said = capsys.readouterr().out
    row = re.search(r"least FLOPs in all +([\d.]+)M \[([\d.]+)M, ([\d.]+)M\]", said)
    assert row
    size, low, high = (float(each) * 1e6 for each in row.groups())
    assert low < size < high
    saved = re.search(r"the smaller run saves ([\d.]+)% of the FLOPs in all", said)
    assert saved
    assert 5 < float(saved[1]) < 60
    assert cost_of(load_config(RunConfig, written)).parameters == pytest.approx(size, rel=0.1)
    assert "served: loss" in written.read_text().splitlines()[0]


def test_predict_answers_for_unique_tokens(table, capsys):
    assert command("predict", table, "--unique-tokens", "500M", "--flops", "1e20") == 0
    said = capsys.readouterr().out
    assert re.search(r"with 500M unique tokens: N .*; [\d.]+ epochs, worth [\d.]+G new", said)


def test_far_or_contradictory_questions_are_one_line(table, tmp_path, capsys):
    question = ("predict", table, "--flops", "1e20")
    for words, said in (
        (("--inference-tokens", "1000T"), "prediction rejected as extrapolation"),
        (("--unique-tokens", "-1"), "--unique-tokens -1: expected a number above 0"),
        (("--inference-tokens", "1e300"), "--inference-tokens 1e+300: expected a number"),
        (
            ("--inference-tokens", "1T", "--unique-tokens", "1G", "--experiment", "absent.yaml")
            + ("--write", tmp_path / "x.yaml"),
            "--inference-tokens and --unique-tokens have different answers; give one",
        ),
    ):
        assert command(*question, *words) == 2
        captured = capsys.readouterr()
        assert said in captured.err
        assert captured.err.count("\n") == 1
        assert captured.out == ""
    run = ("predict", table, "--params", "1G", "--tokens", "1G")
    assert command(*run, "--inference-tokens", "1G") == 2
    assert "has no effect with both --tokens and --params" in capsys.readouterr().err


def test_a_plan_may_repeat_a_small_corpus_and_its_cells_note_what_tokens_are_worth(
    corpus, tmp_path, capsys
):
    experiment = tmp_path / "tiny.yaml"
    experiment.write_text(
        "name: tiny\nmodel: {vocab_size: 300, num_layers: 1, d_model: 16, num_heads: 4, "
        "memory_length: 8}\ndata: {segment_length: 4, lanes: 1, "
        f"path: {corpus.directory.parent}}}\n"
    )
    tokens = Corpus.open(corpus.directory.parent / "train").num_tokens
    words = ("plan", experiment, "--rule", "base", "--sizes", 1, "--output", tmp_path / "s.yaml")
    ratio = ("--tokens-per-parameter", 3 * tokens / 8e3)
    budget = ("--no-checks", "--budgets", 3 * tokens * 6 * 8e3)
    assert command(*words, *ratio, *budget) == 2
    assert "1 of 1 cells need more tokens than the corpus has" in capsys.readouterr().err
    assert command(*words, *ratio, *budget, "--max-epochs", 8) == 0
    assert re.search(
        r"1 of 1 cells repeat the corpus's \S+ tokens, up to [\d.]+ epochs", capsys.readouterr().out
    )
    (cell,) = read_sweep(tmp_path / "s.yaml").cells
    assert cell.facts["unique_tokens"] == tokens
    worth = cell.facts["effective_tokens"]
    assert worth == pytest.approx(effective_tokens(cell.facts["tokens"], tokens))
    assert tokens < worth < cell.facts["tokens"]
