"""Where runs depart from approach 3's law: single outliers with their effect, and trends.

Both are read from the relative errors of the fitted runs, in standard deviations that outliers do
not inflate (`noise_of`). Legend: P points.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from data_pipeline.errors import DataError
from pretrain.scaling.checks import BEYOND, relative_error
from pretrain.scaling.frontier import LawLine
from pretrain.scaling.huber_fit import ParametricFit, fit_parametric
from pretrain.scaling.intervals import as_exponent, as_factor, as_loss, as_size
from pretrain.scaling.isoflop import IsoflopFit, fit_isoflop
from pretrain.scaling.law import FlopsLaw
from pretrain.scaling.points import Array, Points
from pretrain.terminal.text import counted

FAR = 4.5  # standard deviations: of 1,000 sweeps of 240 runs, two have a run this far by chance
GROSS = 0.5  # relative error of an outlier, however few runs there are to measure the noise by
MOST_OUTLIERS = 0.1  # a larger part of the runs (but one) is not a few that went wrong
MOST_NAMED = 5
NUMBERS = 5  # of the law
TOLERATED = 2.5  # standard deviations, more than which no error counts for the noise
PARTS = 5  # of the budgets, whose mean errors are shown
FEWEST_FREE = 3  # degrees of freedom
UNLIKELY = 1e-3  # of a trend by chance
SMALLEST_ERROR = 1e-3  # relative: a smaller one is no outlier, however well the others fit
SMALLEST_TREND = 1e-4


def misfit_warnings(
    points: Points, fit: ParametricFit, flops_law: FlopsLaw, isoflop: IsoflopFit | None = None
) -> list[str]:
    """One line about the outliers, if there are any, and one about a trend.

    The outliers' effect on approach 2 is shown, too, where `isoflop` is its fit.
    """
    predicted_P = fit.law.loss(points.parameters_P, points.tokens_P)
    error_P = relative_error(points.loss_P, predicted_P)
    is_gross_P = np.abs(error_P) > GROSS
    noise = noise_of(error_P[~is_gross_P])
    far_P = is_gross_P | (np.abs(error_P) > max(FAR * noise, SMALLEST_ERROR))
    found = []
    if far_P.sum() > max(1, MOST_OUTLIERS * len(points)):
        far_P = np.zeros(len(points), bool)
    if far_P.any():
        text = _outliers(points, fit, flops_law, far_P, error_P / noise)
        flops = BEYOND * float(points.budgets[-1])
        effect = _effect_on_sizes(points.take(~far_P), isoflop, flops) if isoflop else ""
        wrong = points.names[int(np.abs(np.where(far_P, error_P, 0)).argmax())]
        found.append(
            f"{text}{effect}; if a run went wrong, leave it out with "
            f"--exclude 'name={wrong}: reason'"
        )
    if text := _trend(points.take(~far_P), error_P[~far_P]):
        found.append(text)
    return found


def noise_of(error_P: Array) -> float:
    """The standard deviation of relative errors, of which none counts more than TOLERATED of it."""
    free = max(len(error_P) - NUMBERS, 1)
    scale = float(np.sqrt((error_P**2).sum() / free))
    for _ in range(30):
        bounded = np.minimum(np.abs(error_P), TOLERATED * scale)
        scale = max(float(np.sqrt((bounded**2).sum() / free)), 1e-12)
    return scale


def _outliers(
    points: Points, fit: ParametricFit, flops_law: FlopsLaw, far_P: Array, deviations_P: Array
) -> str:
    """The runs by name, how far off they are, and what the fit is without them."""
    order = np.argsort(-np.abs(deviations_P))[: int(far_P.sum())]
    named = [
        f"{points.names[i]} (loss {as_loss(float(points.loss_P[i]))}, {deviations_P[i]:+.1f})"
        for i in order[:MOST_NAMED]
    ]
    more = f" and {len(order) - MOST_NAMED} more" if len(order) > MOST_NAMED else ""
    text = (
        f"{counted(len(order), 'run')} off the law by over {FAR:g} standard deviations: "
        f"{', '.join(named)}{more}"
    )
    try:
        other = fit_parametric(points.take(~far_P))
    except DataError:
        return text
    log_flops = float(np.log(BEYOND * points.budgets[-1]))
    lines = [LawLine(item.law.theta, flops_law) for item in (fit, other)]
    changes: list[tuple[str, Callable[[float], str], list[float]]] = [
        ("a", as_exponent, [float(line.exponents(flops_law)[0]) for line in lines]),
        (
            f"N* at {np.exp(log_flops):.3g}",
            as_size,
            [float(np.exp(line.log_parameters(log_flops))) for line in lines],
        ),
        *(
            (name, as_factor, [float(getattr(item.law, name)) for item in (fit, other)])
            for name in ("E", "A", "B")
        ),
    ]
    effects = [f"{name} {show(old)} -> {show(new)}" for name, show, (old, new) in changes]
    return f"{text}; without them {', '.join(effects)}"


def _effect_on_sizes(others: Points, isoflop: IsoflopFit, flops: float) -> str:
    """What approach 2 finds with and without the outliers; empty where it needs them."""
    try:
        without = fit_isoflop(others, isoflop.reach)
    except DataError:
        return ""
    old, new = (
        (
            float(item.frontier.power),
            float(np.exp(item.frontier.log_parameters(np.log(flops)))),
            sum(valley.is_used for valley in item.valleys),
        )
        for item in (isoflop, without)
    )
    return (
        f"; approach 2: a {as_exponent(old[0])} -> {as_exponent(new[0])}, N* at {flops:.3g} "
        f"{as_size(old[1])} -> {as_size(new[1])}, by {old[2]} -> {counted(new[2], 'budget')}"
    )


def _trend(points: Points, error_P: Array) -> str:
    """How the errors change with budget and shape, if noise alone is unlikely to do that."""
    from scipy.special import fdtrc

    axes = [np.log(points.flops_P), np.log(points.tokens_P / points.parameters_P)]
    if min(np.ptp(axis) for axis in axes) < SMALLEST_TREND:
        return ""
    c_P, r_P = (2 * (axis - axis.min()) / np.ptp(axis) - 1 for axis in axes)
    powers = ((0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (3, 0), (1, 2))
    terms = np.stack([c_P**i * r_P**j for i, j in powers], axis=1)
    smooth_P = terms @ np.linalg.lstsq(terms, error_P, rcond=None)[0]
    numbers = terms.shape[1] - 1
    free = len(error_P) - NUMBERS - numbers
    if free < FEWEST_FREE or np.abs(smooth_P).max() < SMALLEST_TREND:
        return ""
    within = ((error_P - smooth_P) ** 2).sum() / free
    between = ((smooth_P - error_P.mean()) ** 2).sum() / numbers
    chance = float(fdtrc(numbers, free, between / max(within, 1e-300)))
    if chance > UNLIKELY:
        return ""
    order = np.argsort(points.flops_P, kind="stable")
    parts = np.array_split(order, min(PARTS, len(points.budgets)))
    shown = ", ".join(f"{-error_P[part].mean():+.2%}" for part in parts)
    return (
        f"approach 3's errors have a trend: predicted minus measured {shown} from "
        f"{points.flops_P.min():.3g} to {points.flops_P.max():.3g} FLOPs, and up to "
        f"{np.abs(smooth_P).max():.2%} at one end of the sizes (by chance in {chance:.1g} of "
        "sweeps): the runs do not follow one law; look for a change of recipe, and do not trust "
        "its intervals"
    )
