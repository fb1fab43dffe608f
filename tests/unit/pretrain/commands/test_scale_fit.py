"""`pretrain scale fit` on runs of a known law: answers, questions, refusals."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from foundation.files import write_text
from foundation.settings import load_config
from pretrain import scaling
from pretrain.config.run import RunConfig
from pretrain.costs.flops import run_cost
from pretrain.scaling.fit import doubts, fit_all, run_doubts
from tests.helpers.scaling import HOFFMANN, PUBLISHED_DATA, make_points, simulated, write_points
from tests.helpers.scaling_runs import command


def answer(capsys, *words: object):
    """What `fit` answers as JSON."""
    assert command("fit", *words, "--json") == 0
    text = capsys.readouterr().out
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_fit_of_the_collected_table_finds_the_law_and_predicts_the_hold_out(collected, capsys):
    tree = answer(capsys, collected / "runs.csv", "--flops", "3e16")
    assert tree["rely_on"] == "parametric"
    assert (tree["num_runs"], len(tree["budgets"])) == (18, 3)
    assert [each["flops"] for each in tree["laws"]["parametric"]["optima"]] == [1e16, 3e16]
    assert tree["laws"]["lowest"]["optima"][0]["a"]["low"] is None
    numbers = tree["laws"]["parametric"]["numbers"]
    assert numbers["alpha"]["value"] == pytest.approx(HOFFMANN.alpha, rel=1e-3)
    assert numbers["E"]["value"] == pytest.approx(HOFFMANN.E, rel=1e-3)
    assert abs(tree["holdouts"][0]["error"]) < 1e-4
    assert "held out" in tree["excluded"][0]["reason"]
    assert command("fit", collected / "runs.csv", "--verbose") == 0
    said = capsys.readouterr().out
    assert "1e+17 FLOPs, 10 times" in said
    assert tree["excluded"][0]["name"] in said


def test_fit_writes_an_experiment_that_is_the_optimum(collected, capsys):
    written = collected / "best.yaml"
    question = (collected / "runs.csv", "--flops", "1e17")
    tree = answer(capsys, *question, "--experiment", collected / "books.yaml", "--write", written)
    best = tree["laws"]["parametric"]["optima"][1]["N*"]["value"]
    cost = run_cost(load_config(RunConfig, written))
    assert cost.flops == pytest.approx(1e17, rel=0.01)
    assert cost.parameters == pytest.approx(best, rel=0.1)
    assert re.match("# .* 1e[+]17 .* parametric: loss ", written.read_text())


def test_fit_answers_for_one_run_and_refuses_wild_questions(collected, capsys):
    runs = collected / "runs.csv"
    found = answer(capsys, runs, "--params", "1e7", "--tokens", "1e9")
    assert found["loss"]["value"] == pytest.approx(float(HOFFMANN.loss(1e7, 1e9)), rel=1e-4)
    assert found["flops"] == pytest.approx(6e16, rel=0.5)
    assert command("fit", runs, "--flops", "1e22") == 2
    refused = capsys.readouterr()
    assert (refused.out, refused.err.count("\n")) == ("", 1)
    assert refused.err.endswith("--force\n")
    assert command("fit", runs, "--flops", "1e22", "--force") == 0
    assert "doubt: 1e+22 FLOPs" in capsys.readouterr().out


def test_no_part_of_it_needs_torch_and_reading_a_sweep_needs_no_numpy():
    home = Path(scaling.__path__[0]).parents[1]
    parts = [
        path for room in ("scaling", "comparisons") for path in home.glob(f"pretrain/{room}/*")
    ]
    modules = [f"pretrain.{path.parent.name}.{path.stem}" for path in parts if path.suffix == ".py"]
    light = ["pretrain.sweeps.cell_runs", "pretrain.commands.scale"]
    for heavy, names in (("torch", modules), ("numpy", light)):
        code = f"import sys, {', '.join(names)}\nassert {heavy!r} not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True, cwd=home)


def test_wrong_questions_and_places_take_one_line_before_the_work(collected, tmp_path, capsys):
    runs, sweep, books = (collected / name for name in ("runs.csv", "sweep.yaml", "books.yaml"))
    file, asked = tmp_path / "file", ("fit", runs, "--flops", "1e16")
    run = ("fit", runs, "--params", "1e6", "--tokens", "1e8")
    write_text(file, "kept")
    for arguments, said in (
        (("fit", runs, "--params", "1e6"), "--flops, or --params and --tokens"),
        ((*run, "--flops", "1e16"), "--flops, or --params and --tokens"),
        ((*asked, "--write", "x.yaml"), "--write needs --experiment"),
        (("fit", runs, "--experiment", books), "add --flops"),
        ((*asked, "--experiment", collected), "is a directory; give a YAML file"),
        ((*run, "--law", "isoflop"), "--law has no effect with --params and --tokens"),
        (("fit", runs, "--flops", "-5"), "--flops -5: give a positive number"),
        (("fit", runs, "--flops", "0"), "--flops 0: give a positive number"),
        (("fit", runs, "--flops", "nan"), "--flops nan: give a positive number"),
        (("fit", runs, "--flops", "1e41"), "of at most 1e+40"),
        (("memory", runs, "--flops", "0", "--force"), "--flops 0: give a positive number"),
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


def test_others_data_are_fitted_with_their_own_column_names(capsys):
    roles = ("--column", "loss=c4_loss", "--column", "name=run")
    found = answer(capsys, PUBLISHED_DATA / "olmo_ladder.csv", *roles)["holdouts"]
    (final,) = (each for each in found if each["name"] == "peteish13_eval_final")
    assert final["measured"] == pytest.approx(2.4379, abs=1e-4)
    assert 2.3 < final["predicted"]["value"] < 2.4


def test_wild_extrapolation_is_doubted():
    fit = fit_all(simulated(noise=0.001, seed=1))
    first = fit.approaches[0]
    assert doubts(fit, 5e21, first) == []
    assert all("over 100 " in doubts(fit, flops, first)[0] for flops in (1e23, 1e15))
    assert any("over 30 " in doubt for doubt in run_doubts(fit, 3e12, 1e10))
    two = fit_all(simulated(budgets=(1e18, 1e19, 2)))
    assert doubts(two, 5e19, two.approaches[0]) == []
    assert "over 10 " in doubts(two, 5e20, two.approaches[0])[0]


def test_an_uncertain_optimum_or_approaches_that_differ_are_doubts():
    noisy = fit_all(simulated(noise=0.05, budgets=(1e18, 1e19, 5), num_sizes=5, seed=1))
    law = noisy.approach("parametric")
    assert any("interval of N*" in doubt for doubt in doubts(noisy, 9e20, law))
    differing = fit_all(simulated(noise=0.02, budgets=(1e18, 1e20, 4), num_sizes=5))
    found = doubts(differing, 5e21, differing.approaches[0])
    assert any("sizes differ" in doubt for doubt in found)
    assert any("sizes differ 2.43x" in warning for warning in differing.warnings)


def test_a_law_the_runs_do_not_allow_cannot_be_asked(tmp_path, capsys):
    rng = np.random.default_rng(0)
    size_P, tokens_P = np.exp(rng.uniform(16, 21, 20)), np.exp(rng.uniform(20, 25, 20))
    points = make_points(size_P, tokens_P, HOFFMANN.loss(size_P, tokens_P))
    table = write_points(tmp_path / "runs.csv", points)
    assert command("fit", table, "--law", "isoflop") == 2
    assert "'isoflop'" in capsys.readouterr().err
