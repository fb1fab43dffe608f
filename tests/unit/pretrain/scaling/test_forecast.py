"""Forecast cards: written before a run, signed in its ledger, graded afterwards."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from foundation.errors import ConfigError, DataError
from foundation.files import sha256_of
from pretrain.config.run import RunConfig
from pretrain.costs.flops import run_cost
from pretrain.rundir.events import Forecast, TrainingBegan
from pretrain.rundir.history import find_events
from pretrain.rundir.run_dir import RunDir
from pretrain.scaling.fit import fit_all
from pretrain.scaling.forecast import coverage_line, grades_table, read_grades
from pretrain.scaling.table import Columns, read_points
from pretrain.terminal.text import fitted_table
from tests.helpers.checkout import ROOT
from tests.helpers.scaling import BESIROGLU, simulated, write_points
from tests.helpers.scaling_runs import command, train_by_the_law
from tests.worked_example import indented

RECORDED = ROOT / "tests" / "data" / "forecasts"  # by examples/forecasts.sh


@pytest.fixture
def table(tmp_path) -> Path:
    points = simulated(BESIROGLU, budgets=(1e13, 1e15, 6), num_sizes=5, noise=0.002, seed=4)
    return write_points(tmp_path / "runs.csv", points)


def forecast_run(config: RunConfig, table: Path, card: Path, *flags: object) -> int:
    cost = run_cost(config)
    asked = ("--params", cost.parameters, "--tokens", cost.tokens)
    return command("forecast", table, *(flags or asked), "-o", card)


def small_run(name: str = "big") -> RunConfig:
    config = RunConfig(name=name)
    model = replace(config.model, vocab_size=512, num_layers=4, d_model=128, num_heads=8)
    data = replace(config.data, segment_length=64, lanes=16)
    return replace(config, model=model, data=data, optim=replace(config.optim, steps=1200))


def signed_run(directory: Path, config: RunConfig, card: Path, loss: float) -> None:
    RunDir(directory).path.mkdir(parents=True)
    RunDir(directory).sign_forecast(card, config)
    train_by_the_law(directory, config, loss=loss)


@pytest.mark.parametrize(("factor", "status"), [(1.0, 0), (1.3, 1), (0.7, 1)])
def test_a_signed_run_is_inside_or_outside_and_the_folder_is_one_page(
    table, tmp_path, capsys, factor, status
):
    cards, config = tmp_path / "cards", small_run()
    cards.mkdir()
    card = cards / "first.yaml"
    # 6 N D of the table are no FLOPs of a Transformer-XL: the run is asked for by its size.
    assert forecast_run(config, table, card, "--params", 1e6, "--tokens", 5e7, "--force") == 0
    assert "backtest: " in capsys.readouterr().out
    written = yaml.safe_load(card.read_text())
    assert written["table_sha256"] == sha256_of(table)
    cost = run_cost(config)
    for name, value in (("parameters", cost.parameters), ("tokens", cost.tokens)):
        written[name] = dict.fromkeys(("value", "low", "high"), float(value))
    written["flops"] = float(cost.flops)
    card.write_text(yaml.safe_dump(written))
    signed_run(tmp_path / "run", config, card, factor * written["loss"]["value"])
    assert command("grade", card, tmp_path / "run") == status
    said = capsys.readouterr().out
    assert said.startswith("OUTSIDE" if status else "inside")
    assert "signed: before the run began" in said
    grade = json.loads((cards / "first.grade.json").read_text())
    assert grade["is_inside"] == (not status)
    assert grade["error"] == pytest.approx(1 / factor - 1)
    assert command("report", cards, "--output", tmp_path / "page") == 0
    assert f"{1 - status} of 1 graded forecast inside" in capsys.readouterr().out
    assert "first" in (tmp_path / "page" / "report.html").read_text()
    card.write_text(card.read_text() + "# afterthought\n")
    assert command("report", cards, "--output", tmp_path / "page2") == 2
    assert "grade it again" in capsys.readouterr().err


def test_a_card_is_written_once_and_needs_a_question_and_an_interval(table, tmp_path, capsys):
    card = tmp_path / "card.yaml"
    assert command("forecast", table, "--flops", 1e16, "-o", card) == 0
    assert command("forecast", table, "--flops", 1e16, "-o", card) == 2
    assert "card.yaml" in capsys.readouterr().err
    assert command("forecast", table, "-o", tmp_path / "other.yaml") == 2
    assert "--flops" in capsys.readouterr().err
    assert command("forecast", table, "--flops", 1e30, "-o", tmp_path / "far.yaml") == 2
    assert not (tmp_path / "far.yaml").exists()
    few = simulated(BESIROGLU, budgets=(1e13, 1e14, 3), num_sizes=5, noise=0.002)
    write_points(tmp_path / "few.csv", few)
    assert (
        command("forecast", tmp_path / "few.csv", "--flops", 1e15, "-o", tmp_path / "x.yaml") == 2
    )
    assert "no interval of the loss" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"flops": 1.0}, "FLOPs, and"),
        ({"format": 9}, "found format 9"),
        ({"law": None}, "is no forecast card"),
        ({"more": 1}, "is no forecast card"),
    ],
)
def test_another_runs_card_or_another_file_is_refused(table, tmp_path, capsys, change, problem):
    card, config = tmp_path / "card.yaml", small_run()
    assert command("forecast", table, "--flops", 1e16, "-o", card) == 0
    card.write_text(yaml.safe_dump(yaml.safe_load(card.read_text()) | change))
    train_by_the_law(tmp_path / "run", config)
    assert command("grade", card, tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1
    assert not (tmp_path / "card.grade.json").exists()


def test_a_run_that_has_begun_is_not_signed_and_one_is_signed_once(tmp_path):
    card, config = tmp_path / "card.yaml", small_run()
    numbers = {name: {"value": 1.0} for name in ("parameters", "tokens")}
    subject = {"format": 1, "is_of_run": False, "flops": float(run_cost(config).flops)}
    card.write_text(yaml.safe_dump(subject | numbers))
    run_dir = RunDir.create(tmp_path / "run", config)
    for _ in range(2):
        run_dir.sign_forecast(card, config)
    (event,) = find_events(run_dir.ledger.read(), Forecast)
    assert event.sha256 == sha256_of(card)
    run_dir.ledger.append(TrainingBegan(step=0, world_size=1))
    run_dir.sign_forecast(card, config)  # the same command again
    card.write_text(card.read_text() + "# afterthought\n")
    with pytest.raises(ConfigError, match="has begun"):
        run_dir.sign_forecast(card, config)
    assert find_events(run_dir.ledger.read(), Forecast) == [event]


@pytest.mark.parametrize("content", ["any: 1\n", "format: 1\nflops: 1.0\n", "{}\n"])
def test_a_start_refuses_what_is_no_card_and_signs_nothing(tmp_path, content):
    card = tmp_path / "card.yaml"
    card.write_text(content)
    run_dir = RunDir.create(tmp_path / "run", small_run())
    with pytest.raises((ConfigError, DataError), match=r"card\.yaml"):
        run_dir.sign_forecast(card, small_run())
    assert not find_events(run_dir.ledger.read(), Forecast)


def test_a_card_of_one_run_is_of_its_size_and_tokens_whatever_its_flops_are_counted_as(
    table, tmp_path, capsys
):
    card, config = tmp_path / "card.yaml", small_run()
    assert forecast_run(config, table, card, "--params", 1e6, "--tokens", 5e7, "--force") == 0
    written, cost = yaml.safe_load(card.read_text()), run_cost(config)
    assert written["law"] == "parametric", "the first law of N and D with an interval"
    for name, value in (("parameters", cost.parameters), ("tokens", cost.tokens)):
        written[name] = dict.fromkeys(("value", "low", "high"), float(value))
    card.write_text(yaml.safe_dump(written | {"flops": 3.0 * cost.flops}))
    signed_run(tmp_path / "run", config, card, written["loss"]["value"])
    assert command("grade", card, tmp_path / "run") == 0
    train_by_the_law(tmp_path / "other", small_run("other"), loss=written["loss"]["value"])
    assert command("grade", card, tmp_path / "other") == 2
    assert "to grade another run, remove it" in capsys.readouterr().err


def test_without_a_law_named_the_first_with_an_interval_forecasts(tmp_path, capsys):
    runs = (
        simulated(BESIROGLU, budgets=(1e18, 1e21, 7), num_sizes=5, noise=0.003, seed=s)
        for s in range(20)
    )
    points = next(points for points in runs if fit_all(points).approaches[0].key == "tied")
    table = write_points(tmp_path / "runs.csv", points)
    assert command("forecast", table, "--flops", 1e22, "-o", tmp_path / "card.yaml") == 0
    assert yaml.safe_load((tmp_path / "card.yaml").read_text())["law"] != "tied"
    assert command("fit", table, "--flops", 1e22, "--ratio", 40) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("with D/N"))
    assert "[" not in line, "the tied law has no interval here either"


def test_a_fixed_ratio_costs_what_the_law_says(table, capsys):
    assert command("fit", table, "--flops", 1e16, "--ratio", 200) == 0
    line = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("with D/N")
    )
    points = read_points(table, Columns.parse([]))
    size = (1e16 / (6 * 200)) ** 0.5
    assert f"N {size / 1e6:#.3g}M" in line
    exact = float(BESIROGLU.loss(size, 200 * size))
    assert float(line.split("loss ")[1].split(" ")[0]) == pytest.approx(exact, rel=0.02)
    assert "+" in line.rpartition(", ")[2]
    assert len(points) == 30
    assert command("fit", table, "--ratio", 200) == 2


def test_the_page_has_every_recorded_forecast_as_it_was_signed_and_came_out():
    graded = read_grades(RECORDED)
    assert len(graded) >= 10
    page = (ROOT / "docs" / "forecasts.md").read_text()
    assert indented(fitted_table(grades_table(graded))) in page
    assert coverage_line(graded) in " ".join(page.split())
    for _, card, grade in graded:
        assert card.table_sha256 == sha256_of(RECORDED / card.table)
        assert grade is None or grade.is_signed
