"""Pictures a reader can decode: labels with units that do not run into each other, legends that
cover nothing.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.figure import Figure

from pretrain.reporting.charts import canvas, log_amount_ticks
from pretrain.scaling import charts
from pretrain.scaling.fit import fit_all
from tests.helpers.scaling import simulated

NAMES = ["isoflop", "frontier", "sizes", "tokens", "residuals", "contours"]
BANDS = ["frontier", "sizes", "tokens"]


def drawn(fit, name: str) -> Figure:
    chart, _ = charts.charts_of(fit)[name]
    return chart(fit)


@pytest.fixture(scope="module")
def fit():
    """Runs at five budgets within one decade, as small sweeps have them."""
    points = simulated(noise=0.004, budgets=(8e10, 7.2e11, 5), num_sizes=5, seed=1)
    return fit_all(points)


def assert_labels_stand_apart(axes) -> None:
    for axis, ends in ((axes.xaxis, ("x0", "x1")), (axes.yaxis, ("y0", "y1"))):
        low, high = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        shown = [
            tick.label1
            for tick in ticks
            if tick.label1.get_visible() and low <= tick.get_loc() <= high
        ]
        texts = [text for text in shown if text.get_text()]
        boxes = [text.get_window_extent() for text in texts]
        spans = sorted(tuple(getattr(box, end) for end in ends) for box in boxes)
        assert len(spans) != 1, "one number is no scale"
        assert all(first[1] < second[0] for first, second in pairwise(spans)), [
            text.get_text() for text in texts
        ]


@pytest.mark.parametrize("name", NAMES)
def test_every_picture_names_its_axes_and_its_numbers_stand_apart(fit, name):
    figure = drawn(fit, name)
    figure.draw_without_rendering()
    for axes in figure.axes:
        assert axes.get_ylabel()
        assert_labels_stand_apart(axes)
    assert figure.axes[0].get_xlabel()


@pytest.mark.parametrize("name", BANDS)
def test_bands_are_explained_in_a_legend_that_covers_no_line(fit, name):
    figure = drawn(fit, name)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert "its 95% interval" in legend.get_title().get_text()
    assert "largest run fitted" in {text.get_text() for text in legend.get_texts()}
    assert legend.get_window_extent().y0 >= figure.axes[0].get_window_extent().y1


@pytest.mark.parametrize("name", BANDS)
def test_approaches_are_told_apart_by_their_lines_too_which_grey_keeps(fit, name):
    titles = {approach.title for approach in fit.approaches}
    lines = [line for line in drawn(fit, name).axes[0].lines if line.get_label() in titles]
    assert len(lines) == 4
    assert len({line.get_linestyle() + str(line._unscaled_dash_pattern) for line in lines}) == 4


@pytest.mark.parametrize("span", [1.05, 1.3, 1.9, 3.0, 8.0, 1e3])
def test_a_logarithmic_axis_of_any_length_has_several_numbers(span):
    for start in (1e9, 3.3e9, 8e9):
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
    axes = charts.frontier(held).axes[0]
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert drawn["prediction for that run"] == [item.predicted.value for item in held.holdouts]
    assert drawn["run held out"] == [item.measured for item in held.holdouts]
    assert min(drawn["prediction for that run"]) < max(drawn["prediction for that run"]), (
        "not the frontier's loss"
    )
    (intervals,) = [each for each in axes.collections if hasattr(each, "get_segments")]
    assert [segment[1][1] for segment in intervals.get_segments()] == [
        item.predicted.high for item in held.holdouts
    ]


def test_errors_of_held_out_runs_are_among_the_residuals(held):
    _, diamonds = charts.residuals(held).axes[0].collections
    errors = [100 * item.error for item in held.holdouts]
    assert np.asarray(diamonds.get_offsets())[:, 1].tolist() == pytest.approx(errors)


def test_a_contour_has_the_loss_that_it_is_labeled_with(held):
    axes = charts.equal_losses(held).axes[0]
    (contours,) = [each for each in axes.collections if hasattr(each, "levels")]
    law = held.law.fit.law
    found = 0
    for level, path in zip(contours.levels, contours.get_paths(), strict=True):
        tokens_X, size_X = path.vertices.T
        found += len(size_X)
        assert law.loss(size_X, tokens_X) == pytest.approx(level, rel=2e-3)
    assert found > 100
    assert axes.get_xlim()[1] > max(item.tokens for item in held.holdouts)


def test_a_dozen_budgets_have_a_color_a_marker_and_a_label_each_and_more_some_labels():
    styles = charts.budget_styles(np.geomspace(1e18, 1e21, 12)).values()
    for name in ("color", "marker", "label"):
        assert len({style[name] for style in styles} - {None}) == 12
    many = charts.budget_styles(np.geomspace(1e18, 1e21, 30)).values()
    assert len([style for style in many if style["label"]]) == 10


def test_flops_are_set_as_powers_of_ten():
    assert charts.flops_text(1e11) == "10¹¹"
    assert charts.flops_text(2e12) == "2 \N{MULTIPLICATION SIGN} 10¹²"
    assert charts.flops_text(1000.0) == "10³"
