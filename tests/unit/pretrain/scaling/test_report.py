"""Pages and figures that can be decoded: captions, labels apart, legends that cover nothing."""

import json
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from pretrain.reporting.charts import canvas, log_amount_ticks
from pretrain.scaling import fit_charts
from pretrain.scaling.fit import fit_all
from pretrain.scaling.report import fit_parts
from tests.helpers.scaling import simulated, write_points
from tests.helpers.scaling_runs import command


def test_a_page_of_runs_without_intervals_says_so(tmp_path):
    runs = simulated(num_sizes=3, budgets=(1e18, 1e19, 2), noise=0.005, seed=1)
    assert not any(approach.left_out for approach in fit_all(runs).approaches)
    assert command("report", write_points(tmp_path / "runs.csv", runs), "--output", tmp_path) == 0
    page = re.sub("<svg.*?</svg>", "", (tmp_path / "report.html").read_text(), flags=re.DOTALL)
    assert re.search(r"C\^a, no interval", page)
    assert not re.search(r"\bnan\b", page)


def test_report_is_one_file_that_needs_no_network_with_its_pictures_beside_it(collected):
    out = collected / "report"
    arguments = ("--title", "Books")
    assert command("report", collected / "runs.csv", "--output", out, *arguments) == 0
    page = (out / "report.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"|url\((?!#)', page)
    pictures = {path.stem for path in out.glob("*.png")}
    assert pictures == {"isoflop", "frontier", "sizes", "residuals"}
    for form, tables in (("svg", set()), ("pdf", set()), ("csv", {"table-laws"})):
        assert {path.stem for path in out.glob(f"*.{form}")} == pictures | tables
    runs = (out / "isoflop.csv").read_text().splitlines()
    assert runs[0] == "series,x,y"
    assert sum(line.startswith("1e+15,") for line in runs) == 6
    assert page.count("<svg") == len(pictures)
    for picture in out.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    for words in ("<h1>Books</h1>", "Laws", "held out"):
        assert words in page
    numbers = json.loads((out / "fit.json").read_text())
    assert numbers["num_runs"] == 18
    for key, approach in numbers["laws"].items():
        assert [each["flops"] for each in approach["optima"]] == [1e16, 1e17], key
        for optimum in approach["optima"]:
            assert all(optimum[name]["value"] > 0 for name in ("N*", "D*"))
    assert [valley["budget"] for valley in numbers["valleys"]] == numbers["budgets"]
    assert all(valley["parameters"] > 0 for valley in numbers["valleys"])


BANDS = ["frontier", "sizes"]


@pytest.fixture(scope="module")
def fit():
    """Runs at five budgets within one decade, as small sweeps have them."""
    points = simulated(noise=0.004, budgets=(8e10, 7.2e11, 5), num_sizes=5, seed=1)
    return fit_all(points)


def assert_labels_stand_apart(axes) -> None:
    for axis, ends in ((axes.xaxis, ("x0", "x1")), (axes.yaxis, ("y0", "y1"))):
        low, high = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        shown = [tick.label1 for tick in ticks if low <= tick.get_loc() <= high]
        texts = [text for text in shown if text.get_visible() and text.get_text()]
        boxes = [text.get_window_extent() for text in texts]
        spans = sorted(tuple(getattr(box, end) for end in ends) for box in boxes)
        assert len(spans) != 1, "one number is no scale"
        assert all(first[1] < second[0] for first, second in pairwise(spans)), texts


def test_every_figure_names_its_axes_and_legends_and_lines_are_told_apart(fit):
    """Numbers stand apart, a legend covers nothing and explains the bands, and grey keeps lines."""
    titles = {approach.title for approach in fit.approaches}
    parts = fit_parts(fit)
    figures = {name: draw() for part in parts for name, (draw, _) in part.figures.items()}
    assert len(figures) == 4
    for figure in figures.values():
        figure.draw_without_rendering()
        for axes in figure.axes:
            assert axes.get_ylabel()
            assert_labels_stand_apart(axes)
        assert figure.axes[0].get_xlabel()
    for name in BANDS:
        axes, (legend,) = figures[name].axes[0], figures[name].legends
        assert "95%" in legend.get_title().get_text()
        assert any("largest" in text.get_text() for text in legend.get_texts())
        assert legend.get_window_extent().y0 >= axes.get_window_extent().y1
        lines = [line for line in axes.lines if line.get_label() in titles]
        assert len(lines) == 4
        assert len({line.get_linestyle() + str(line._unscaled_dash_pattern) for line in lines}) == 4


@pytest.mark.parametrize("span", [1.05, 1.9, 8.0, 1e3])
def test_a_logarithmic_axis_of_any_length_has_several_numbers(span):
    for start in (1e9, 3.3e9):
        figure, axes = canvas(3.0, "N", "loss")
        axes.set_xscale("log")
        axes.set_xlim(start, start * span)
        log_amount_ticks(axes.xaxis)
        figure.draw_without_rendering()
        assert_labels_stand_apart(axes)
        ticks = [each for each in axes.get_xticks() if start <= each <= start * span]
        texts = [tick.label1.get_text() for tick in axes.xaxis.get_major_ticks()]
        assert len(ticks) >= 2
        assert len(set(texts)) == len(texts)


@pytest.fixture(scope="module")
def held():
    """Runs at six budgets of which the largest is held out."""
    points = simulated(noise=0.004, budgets=(1e18, 1e20, 6), num_sizes=5, seed=1)
    is_last_P = points.budget_P == points.budgets[-1]
    return fit_all(replace(points, holdout_P=is_last_P))


def test_held_out_runs_are_drawn_with_their_own_predictions(held):
    axes = fit_charts.frontier_chart(held).axes[0]
    drawn = [list(line.get_ydata()) for line in axes.lines]
    predicted = [item.predicted.value for item in held.holdouts]
    assert predicted in drawn
    assert [item.measured for item in held.holdouts] in drawn
    assert min(predicted) < max(predicted), "not the frontier's loss"
    (intervals,) = [each for each in axes.collections if hasattr(each, "get_segments")]
    ends = [segment[1][1] for segment in intervals.get_segments()]
    assert ends == [item.predicted.high for item in held.holdouts]


def test_the_caption_names_the_law_that_predicts_held_out_runs(held):
    tied = replace(held, approaches=held.approaches[::-1])
    assert {held.law.key, tied.law.key} == {"parametric", "tied"}
    for fit in (held, tied):
        figures = {name: part.figures[name] for part in fit_parts(fit) for name in part.figures}
        _, title, said = figures["frontier"][1].rpartition(fit.law.title)
        assert title
        assert ("interval" in said) == bool(fit.law.left_out)


def test_a_dozen_budgets_have_a_color_a_marker_and_a_label_each_and_more_some_labels():
    styles = fit_charts.budget_styles(np.geomspace(1e18, 1e21, 12)).values()
    for name in ("color", "marker", "label"):
        assert len({style[name] for style in styles} - {None}) == 12
    many = fit_charts.budget_styles(np.geomspace(1e18, 1e21, 30)).values()
    assert len([style for style in many if style["label"]]) == 10
