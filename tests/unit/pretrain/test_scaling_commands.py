"""`pretrain scale fit` and `predict` on runs of a known law: answers and refusals."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from foundation.errors import ConfigError
from foundation.files import write_text
from foundation.settings import load_config
from pretrain import scaling
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of
from pretrain.scaling.fit import fit_all
from pretrain.scaling.law import log_loss
from pretrain.scaling.predict import (
    doubts,
    near_optimal_band,
    preferred,
    refuse_wild,
    run_doubts,
)
from pretrain.scaling.sweep_file import read_sweep
from tests.helpers.scaling import (
    HOFFMANN,
    PUBLISHED_DATA,
    SIX_N,
    make_points,
    simulated,
    write_points,
)
from tests.helpers.scaling_runs import command


def test_fit_of_the_collected_table_finds_the_law_and_predicts_the_hold_out(collected, capsys):
    assert command("fit", collected / "runs.csv", "--json") == 0
    text = capsys.readouterr().out
    tree = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert tree["rely_on"] == "parametric"
    assert tree["laws"]["lowest"]["optima"][0]["a"]["low"] is None
    numbers = tree["laws"]["parametric"]["numbers"]
    assert numbers["alpha"]["value"] == pytest.approx(HOFFMANN.alpha, rel=1e-3)
    assert numbers["E"]["value"] == pytest.approx(HOFFMANN.E, rel=1e-3)
    assert abs(tree["holdouts"][0]["error"]) < 1e-4
    assert command("fit", collected / "runs.csv") == 0
    said = capsys.readouterr().out
    assert "18 runs at 3 budgets" in said
    assert "rely on 3 parametric: fitted without 1e+16 FLOPs, it predicts those losses" in said
    assert "at 1e+17 FLOPs, 10 times the largest budget" in said
    assert command("fit", collected / "runs.csv", "--verbose", "--flops", "3e16") == 0
    said = capsys.readouterr().out
    assert "at 3e+16 FLOPs, 3 times the largest budget" in said
    assert re.search(r"left out: c1e17-\S+-holdout: held out: predicted, not fitted", said)
    assert command("fit", collected / "runs.csv", "--flops", "3e16", "--json") == 0
    optima = json.loads(capsys.readouterr().out)["laws"]["parametric"]["optima"]
    assert [each["flops"] for each in optima] == [1e16, 3e16]


def test_predict_writes_an_experiment_that_is_the_optimum(collected, capsys):
    written = collected / "best.yaml"
    question = ("predict", collected / "runs.csv", "--flops", "1e17")
    assert command(*question, "--experiment", collected / "books.yaml", "--write", written) == 0
    said = capsys.readouterr().out
    assert "near-optimal at 1e+17 FLOPs: N from" in said
    run = load_config(RunConfig, written)
    cost = cost_of(run)
    assert cost.flops == pytest.approx(1e17, rel=0.01)
    best = float(re.search(r"3 parametric +([\d.]+)M", said)[1]) * 1e6
    assert cost.parameters == pytest.approx(best, rel=0.1)
    assert command(*question, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["law"], found["flops"]) == ("3 parametric", 1e17)
    assert found["parameters"]["value"] == pytest.approx(best, rel=0.1)
    assert written.read_text().startswith("# The optimum at 1e+17 FLOPs by 3 parametric: loss ")


def test_a_plan_can_be_centered_on_earlier_runs(collected):
    out = collected / "next.yaml"
    around = (
        "--budgets",
        "1e17",
        "--no-checks",
        "--around",
        collected / "runs.csv",
        "--output",
        out,
        "--sizes",
        3,
    )
    assert command("plan", collected / "books.yaml", *around) == 0
    sweep = read_sweep(out)
    assert any("centered on 3 parametric of runs.csv" in note for note in sweep.notes)
    losses = [
        float(HOFFMANN.loss(cell.facts["parameters"], cell.facts["tokens"])) for cell in sweep.cells
    ]
    assert losses[1] == min(losses)


def test_predict_answers_for_one_run_and_refuses_wild_questions(collected, capsys):
    assert command("predict", collected / "runs.csv", "--params", "1e7", "--tokens", "1e9") == 0
    assert re.search(r"loss of N = 10M over D = 1G .*: 4\.\d+\n", capsys.readouterr().out)
    assert command("predict", collected / "runs.csv", "--flops", "1e22") == 2
    assert re.fullmatch(
        r"error: prediction rejected as extrapolation: 1e\+22 FLOPs are .* --force\n",
        capsys.readouterr().err,
    )
    assert command("predict", collected / "runs.csv", "--flops", "1e22", "--force") == 0
    assert "doubt: 1e+22 FLOPs are" in capsys.readouterr().out


def test_no_part_of_it_needs_torch_and_reading_a_sweep_needs_no_numpy():
    modules = [f"pretrain.scaling.{path.stem}" for path in Path(scaling.__path__[0]).glob("*.py")]
    for heavy, names in (
        ("torch", modules),
        ("numpy", ["pretrain.scaling.sweep_file", "pretrain.commands.scale"]),
    ):
        code = f"import sys, {', '.join(names)}\nassert {heavy!r} not in sys.modules"
        subprocess.run(
            [sys.executable, "-c", code], check=True, cwd=Path(scaling.__path__[0]).parents[1]
        )


def test_wrong_questions_and_places_take_one_line_before_the_work(collected, tmp_path, capsys):
    runs, sweep, books = (collected / name for name in ("runs.csv", "sweep.yaml", "books.yaml"))
    file, asked = tmp_path / "file", ("predict", runs, "--flops", "1e16")
    run = ("predict", runs, "--params", "1e6", "--tokens", "1e8")
    write_text(file, "kept")
    for arguments, said in (
        (("predict", runs), "give --flops, or --params and --tokens together"),
        ((*asked, "--write", "x.yaml"), "--write needs --experiment"),
        ((*asked, "--experiment", collected), "is a directory; give a YAML file"),
        ((*run, "--law", "isoflop"), "--law has no effect with --params and --tokens"),
        (("fit", runs, "--flops", "-5"), "--flops -5: give a positive number"),
        (("fit", runs, "--flops", "nan"), "--flops nan: give a positive number"),
        (("predict", runs, "--flops", "1e41"), "of at most 1e+40"),
        (("memory", runs, "--flops", "-1", "--force"), "--flops -1: give a positive number"),
        (("fit", collected), "is a directory; name a file: expected a CSV or JSON file"),
        (("fit", runs, "--column", "size=N"), "expected ROLE=NAME with one of the roles"),
        (("collect", sweep, "--runs-dir", collected / "nowhere"), "is not a directory"),
        (("report", runs, "--output", file), f"--output {file} is a file; name a directory"),
        (("report", runs, "--output", file / "x"), f"{file} is a file, not a directory"),
        (("collect", sweep, "--runs-dir", runs.parent / "runs", "--output", tmp_path), "name a fi"),
        (("plan", books, "--budgets", "1e15", "--output", tmp_path), "is a directory"),
        ((*asked, "--experiment", books, "--write", tmp_path), "--write"),
    ):
        assert command(*arguments) == 2
        printed = capsys.readouterr()
        assert said in printed.err
        assert printed.err.count("\n") == 1
        assert not printed.out
    assert file.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [file]


def test_predict_gives_the_optimum_by_each_law_with_intervals(tmp_path, capsys):
    points = simulated(budgets=(1e14, 1e16, 5), num_sizes=6, noise=0.03, seed=1)
    assert command("predict", write_points(tmp_path / "runs.csv", points), "--flops", 1e15) == 0
    printed = capsys.readouterr().out.splitlines()
    start = next(index for index, line in enumerate(printed) if "by each law" in line)
    _, head, *rows = printed[start : start + 6]
    assert head.split() == ["law", "N*", "D*", "loss"]
    cells = {row[:9]: re.findall(r"(\S+) \[(\S+), (\S+)\]", row) for row in rows}
    assert len(cells["3 paramet"]) == 3
    assert len(cells["2 IsoFLOP"]) == 3
    assert cells["1 lowest "] == []
    assert all(re.fullmatch(r"\d\.\d+", loss) for loss in cells["3 paramet"][-1])


def test_others_data_are_fitted_with_their_own_column_names(capsys):
    roles = ("--column", "loss=c4_loss", "--column", "name=run")
    rows = ("--exclude", "mode=extra: not part of the published fit", "--holdout", "mode=eval")
    assert command("fit", PUBLISHED_DATA / "olmo_ladder.csv", *roles, *rows) == 0
    assert (
        "held out peteish13_eval_final: measured 2.4379, predicted 2.3" in capsys.readouterr().out
    )


FURTHER = np.log(1e21)  # ten times the largest budget


@pytest.fixture(scope="module")
def fit():
    return fit_all(simulated(noise=0.001, seed=1))


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
