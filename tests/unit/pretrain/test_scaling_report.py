"""The page of a fit: its files, and what it folds and groups."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace

import pytest

from pretrain.scaling.charts import charts_of
from pretrain.scaling.fit import fit_all
from pretrain.scaling.frontier import fit_isoflop
from pretrain.scaling.report import render
from tests.helpers.scaling import simulated
from tests.helpers.scaling_runs import command


@pytest.fixture(scope="module")
def fit():
    return fit_all(simulated(noise=0.002, budgets=(1e18, 1e20, 13), num_sizes=5))


def page_of(fit) -> str:
    return render(fit, "Books", "today", defaultdict(str))


def test_a_long_table_of_costs_is_folded_and_a_short_one_is_not(fit):
    page = page_of(fit)
    assert "<summary>13 budgets, " in page
    short = page_of(replace(fit, points=fit.points.take(fit.points.budget_P < 2e18)))
    assert "<summary>13 budgets" not in short


def test_a_page_of_runs_without_intervals_says_so():
    fit = fit_all(simulated(num_sizes=3, budgets=(1e18, 1e19, 2), noise=0.005, seed=1))
    assert not any(approach.left_out for approach in fit.approaches)
    page = page_of(fit)
    assert "exponent of N* ~ C^a, no interval" in page
    assert not re.search(r"\bnan\b", page)


def test_no_line_of_a_table_ends_within_an_interval(fit):
    page = page_of(fit)
    assert re.search(r"\[[\d.]+,\N{NO-BREAK SPACE}[\d.]+\]</td>", page)
    assert not re.search(r"\[[\d.]+\w?, [\d.]+\w?\]</td>", page)


def test_held_out_runs_are_explained_where_there_are_some(fit):
    _, caption = charts_of(fit)["frontier"]
    assert "held out" not in caption
    is_last_P = fit.points.budget_P == fit.points.budgets[-1]
    _, caption = charts_of(fit_all(replace(fit.points, holdout_P=is_last_P)))["frontier"]
    assert caption.endswith(
        "A diamond is a run that was held out, a dash what approach 3 predicts for it, with its "
        "interval"
    )


def test_budgets_without_a_vertex_are_one_warning():
    points = simulated(budgets=(1e18, 1e20, 5), num_sizes=5)
    is_cut_P = (points.budget_P < 5e18) & (points.parameters_P > 7e7)
    fit = fit_isoflop(points.take(~is_cut_P))
    (line,) = [each for each in fit.warnings if "not used" in each]
    assert line.startswith("2 budgets not used (1e+18: 2 sizes, a parabola needs 3; 3.16e+18: ")


def test_report_is_one_file_that_needs_no_network_with_its_pictures_beside_it(collected):
    out = collected / "report"
    arguments = ("--title", "Books")
    assert command("report", collected / "runs.csv", "--output", out, *arguments) == 0
    page = (out / "report.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"|url\((?!#)', page)
    pictures = {path.stem for path in out.glob("*.png")}
    assert pictures == {
        "isoflop",
        "frontier",
        "sizes",
        "tokens",
        "residuals",
        "contours",
    }
    for form in ("svg", "pdf", "csv"):
        assert {path.stem for path in out.glob(f"*.{form}")} == pictures
    runs = (out / "isoflop.csv").read_text().splitlines()
    assert runs[0] == "series,x,y"
    assert sum(line.startswith("1e+15,") for line in runs) == 6
    assert page.count("<svg") == len(pictures)
    for picture in out.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    for words in (
        f"<h1>Books: {collected.name}/runs.csv</h1>",
        "Laws",
        "Cost",
        "held out",
    ):
        assert words in page
    numbers = json.loads((out / "fit.json").read_text())
    assert numbers["num_runs"] == 18
    for key, approach in numbers["laws"].items():
        assert [each["flops"] for each in approach["optima"]] == [1e16, 1e17], key
        for optimum in approach["optima"]:
            assert all(optimum[name]["value"] > 0 for name in ("N*", "D*"))
    assert [valley["budget"] for valley in numbers["valleys"]] == numbers["budgets"]
    assert all(valley["parameters"] > 0 for valley in numbers["valleys"])
