"""Which approach a fit relies on, and that whatever answers follows it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pretrain.commands import scale
from pretrain.scaling.fit import fit_all
from pretrain.scaling.predict import near_optimal_band, preferred
from pretrain.scaling.ranking import (
    CLEARLY,
    NO_ERROR,
    PREFERRED,
    Ranking,
    Standing,
    best_of,
    ranked,
)
from tests.helpers.scaling import BESIROGLU, HOFFMANN, make_points, simulated


def joint_law(noise: float = 0.002, seed: int = 0):
    """Runs of Kaplan et al.'s form, where size and data do not add up: approach 3's law is wrong,
    parabolas are not.
    """
    points = simulated(BESIROGLU, budgets=(1e18, 1e21, 6), num_sizes=5)
    law = BESIROGLU
    size, data = law.A * points.parameters_P**-law.alpha, law.B * points.tokens_P**-law.beta
    loss_P = law.E + (size ** (1 / law.beta) + data ** (1 / law.beta)) ** law.beta
    noise_P = noise * np.random.default_rng(seed).standard_normal(len(points))
    return replace(points, loss_P=loss_P * np.exp(noise_P))


def standing(key: str, *sizes: float, **more) -> Standing:
    """The errors of N* at the largest budget, the one before, and so on."""
    named = {f"budget {index}": size for index, size in enumerate(sizes)}
    return Standing(key=key, sizes=named, losses={}, **more)


def test_approach_3_answers_where_its_law_holds():
    fit = fit_all(simulated(noise=0.002))
    assert fit.ranking.order[0] == "parametric"
    assert preferred(fit).key == "parametric"
    assert len(fit.ranking.standings[0].sizes) == 1 + 2 + 3


def test_an_approach_that_predicts_left_out_budgets_better_answers():
    fit = fit_all(joint_law())
    by_key = {item.key: item for item in fit.ranking.standings}
    assert by_key["parametric"].error > 2 * by_key["isoflop"].error
    assert fit.ranking.order[0] == "isoflop"
    assert preferred(fit).key == "isoflop"
    assert preferred(fit, "parametric").key == "parametric"
    assert fit.ranking.reason == "it predicted best what was left out"


def test_an_earlier_approach_stays_unless_another_is_clearly_better():
    near, far = (
        (standing("parametric", 0.1 * CLEARLY + more), standing("isoflop", 0.1))
        for more in (-0.01, 0.01)
    )
    assert best_of(near).key == "parametric"
    assert best_of(far).key == "isoflop"
    tiny = (standing("parametric", 0.9 * NO_ERROR), standing("isoflop", 0.0))
    assert best_of(tiny).key == "parametric"
    assert Ranking(near).reason == f"no other one's error is clearly smaller ({CLEARLY}x)"


def test_approaches_are_compared_on_the_splits_that_both_predicted():
    law, valleys = standing("parametric", 0.1, 0.9), standing("isoflop", 0.1)
    assert law.error > CLEARLY * valleys.error, "its second split was harder"
    assert best_of((law, valleys)).key == "parametric"
    assert best_of((standing("parametric", 0.2, 0.1), valleys)).key == "isoflop"
    assert best_of((law, standing("isoflop"))).key == "parametric", "nothing to compare"
    assert Ranking((law, valleys)).reason == "it predicted best what was left out"


def test_an_approach_without_intervals_comes_after_those_with_some_so_that_predict_answers():
    law, valleys = standing("parametric", 0.9), standing("isoflop", 0.1, has_interval=False)
    assert [item.key for item in ranked((law, valleys))] == ["parametric", "isoflop"]
    reason = "no other approach predicts what was left out and has intervals"
    assert Ranking((law, valleys)).reason == reason
    neither = ranked(replace(each, has_interval=False) for each in (law, valleys))
    assert [item.key for item in neither] == ["isoflop", "parametric"]


def test_two_budgets_and_no_hold_out_compare_nothing():
    fit = fit_all(simulated(budgets=(1e18, 1e19, 2)))
    assert fit.ranking.order[0] == "parametric"
    assert fit.ranking.reason == "no left-out budget or held-out run compares the approaches"


def test_held_out_runs_count_for_the_approaches_that_predict_them():
    points = joint_law()
    top = points.budget_P >= points.budgets[3]
    three = points.take(~top)
    held = replace(points, holdout_P=top)
    alone, checked = fit_all(three), fit_all(held)
    count = {item.key: len(item.losses) for item in checked.ranking.standings}
    assert count["parametric"] == count["isoflop"] == int(top.sum()) + 1
    assert count["envelope"] == 1
    errors = {item.key: item.loss for item in checked.ranking.standings}
    assert (
        errors["parametric"]
        > {item.key: item.loss for item in alone.ranking.standings}["parametric"]
    )


def test_approaches_are_compared_by_the_held_out_runs_that_both_predict():
    points = joint_law()
    held_P = points.budget_P >= points.budgets[4]
    far = int(np.flatnonzero(held_P)[0])
    size_P, tokens_P = points.parameters_P.copy(), points.tokens_P.copy()
    size_P[far], tokens_P[far] = size_P[far] / 50, tokens_P[far] * 50  # over-trained
    fit = fit_all(replace(points, parameters_P=size_P, tokens_P=tokens_P, holdout_P=held_P))
    by_key = {item.key: item for item in fit.ranking.standings}
    law, valleys = by_key["parametric"], by_key["isoflop"]
    assert len(law.losses) == 10 + 1
    assert len(valleys.losses) == 9 + 1, "one of ten is too far for approach 2"
    assert law.on_what(valleys).losses.keys() == valleys.losses.keys()


def test_the_band_of_sizes_is_that_of_the_approach_that_answers():
    fit = fit_all(simulated(noise=1e-4))
    bands = [near_optimal_band(fit, 1e20, preferred(fit, key)) for key in PREFERRED]
    assert bands[2] is None
    assert bands[1] == pytest.approx(bands[0], rel=0.1)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranked") / "runs.csv"
    points = joint_law()
    columns = (points.parameters_P, points.tokens_P, points.flops_P, points.loss_P)
    rows = "".join(",".join(map(repr, row)) + "\n" for row in np.stack(columns, 1).tolist())
    path.write_text("N,D,C,loss\n" + rows)
    return path


def test_fit_and_predict_say_whom_they_rely_on_and_why(table, capsys):
    reason = "rely on approach 2 IsoFLOP: it predicted best what was left out\n"
    assert scale.PROGRAM.main(["fit", str(table)]) == 0
    said = capsys.readouterr().out
    assert reason in said
    assert "approach 2: parabolas through the sizes within 6x of each budget's lowest run" in said
    assert scale.PROGRAM.main(["predict", str(table), "--flops", "2e21"]) == 0
    said = capsys.readouterr().out
    assert reason in said
    assert "loses at most 1% by approach 2 IsoFLOP" in said
    asked = ["predict", str(table), "--flops", "2e21", "--approach", "parametric"]
    assert scale.PROGRAM.main(asked) == 0
    said = capsys.readouterr().out
    assert "approach parametric was asked for" in said
    assert "loses at most 1% by approach 3 parametric" in said


def test_hoffmanns_law_and_its_runs_make_no_difference_of_which_one_answers():
    points = simulated(HOFFMANN, noise=0.0)
    fit = fit_all(make_points(points.parameters_P, points.tokens_P, points.loss_P))
    assert fit.ranking.order[:2] == ("parametric", "isoflop")
