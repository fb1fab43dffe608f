"""One fit: all approaches on the same runs, with intervals, checks and warnings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from data_pipeline.errors import DataError
from pretrain.scaling.bootstrap import resampled_laws
from pretrain.scaling.checks import Prediction, predict_holdouts, warnings_of
from pretrain.scaling.envelope import NO_INTERVAL
from pretrain.scaling.estimates import (
    TITLES,
    Estimates,
    LeftOut,
    estimate,
    estimates_below,
    leave_largest_out,
)
from pretrain.scaling.frontier import Approach, LawLine, Line
from pretrain.scaling.isoflop import REACH
from pretrain.scaling.law import FlopsLaw, fit_flops_law
from pretrain.scaling.misfit import misfit_warnings
from pretrain.scaling.points import HELD_OUT, Array, Points, usable
from pretrain.scaling.ranking import Ranking, rank
from pretrain.terminal.text import counted

ROUGH_FLOPS_LAW = 0.03


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The result of a fit; `estimates.unavailable` names the approaches that were not possible."""

    points: Points  # those fitted, with the exclusions
    flops_law: FlopsLaw
    approaches: tuple[Approach, ...]
    estimates: Estimates
    left_out: LeftOut | None
    holdouts: tuple[Prediction, ...]
    ranking: Ranking
    warnings: tuple[str, ...]

    @property
    def num_unpredicted(self) -> int:
        """How many runs were held out but not predicted: only approach 3 predicts single runs."""
        held_out = sum(item.reason == HELD_OUT for item in self.points.excluded)
        return held_out - len(self.holdouts)

    def approach(self, key: str) -> Approach | None:
        """The approach of that key, if these runs allow it."""
        return next((approach for approach in self.approaches if approach.key == key), None)


def fit_all(
    runs: Points,
    *,
    training: Mapping[str, Array] | None = None,
    reach: float = REACH,
    report: Callable[[str], None] = lambda _: None,
) -> Fit:
    """Fit every approach; DataError if the runs allow none, or all have the same budget.

    `report` hears what is being done, which takes seconds with a hundred thousand runs.
    """
    points = usable(runs)
    refuse_single_budget(points)
    flops_law = fit_flops_law(points.parameters_P, points.tokens_P, points.flops_P)
    refuse_falling_cost(flops_law, points.source)
    report(f"fitting {counted(len(points), 'run')} by three approaches")
    estimates = estimate(points, training, reach)
    report("finding the intervals")
    approaches = approaches_of(points, estimates, flops_law)
    if not approaches:
        reasons = "; ".join(
            f"{TITLES[key]}: {reason}" for key, reason in estimates.unavailable.items()
        )
        raise DataError(f"{points.source}: no approach fits these runs ({reasons})")
    law = next((approach for approach in approaches if approach.key == "parametric"), None)
    holdouts: tuple[Prediction, ...] = ()
    if law:
        report("predicting held-out runs")
        holdouts = predict_holdouts(runs, law)
    report("predicting the largest budgets from the others")
    below = estimates_below(points, reach)
    fit = Fit(
        points=points,
        flops_law=flops_law,
        approaches=approaches,
        estimates=estimates,
        left_out=leave_largest_out(points, flops_law, estimates.isoflop, below),
        holdouts=holdouts,
        ranking=rank(
            points,
            runs,
            estimates,
            flops_law,
            below,
            {approach.key for approach in approaches if approach.region is not None},
        ),
        warnings=(),
    )
    report("looking for outliers and trends")
    return replace(fit, warnings=tuple(_warnings(fit)))


def approaches_of(
    points: Points,
    estimates: Estimates | None = None,
    flops_law: FlopsLaw | None = None,
) -> tuple[Approach, ...]:
    """Every approach that these runs allow, with its intervals or why it has none."""
    estimates = estimates or estimate(points)
    flops_law = flops_law or fit_flops_law(points.parameters_P, points.tokens_P, points.flops_P)
    lines = estimates.lines(flops_law)
    found: list[Approach] = []
    if estimates.envelope:
        warnings = estimates.envelope.warnings
        found.append(_approach("envelope", lines, lambda: None, warnings, NO_INTERVAL))
    if isoflop := estimates.isoflop:
        found.append(_approach("isoflop", lines, isoflop.lines, isoflop.warnings))
    if parametric := estimates.parametric:

        def laws() -> LawLine:
            return LawLine(resampled_laws(points, parametric), flops_law)

        found.append(_approach("parametric", lines, laws, parametric.warnings))
    return tuple(found)


def _approach(
    key: str,
    lines: Mapping[str, Line],
    region_of: Callable[[], Line | None],
    warnings: tuple[str, ...],
    no_interval: str = "",
) -> Approach:
    try:
        region = region_of()
    except DataError as error:
        region, no_interval = None, str(error)
    return Approach(key, TITLES[key], lines[key], region, no_interval, warnings)


def refuse_single_budget(points: Points) -> None:
    """Raise DataError unless there are two budgets: at one, size and data change together."""
    if not len(points):
        raise DataError(f"{points.source}: no usable runs; {_reasons(points)}")
    if len(points.budgets) < 2:
        raise DataError(
            f"{points.source}: all {len(points)} usable runs share one budget "
            f"({points.budgets[0]:.3g} FLOPs); "
            "a law needs at least two, and a third to check it; add runs at other budgets"
        )


def refuse_falling_cost(flops_law: FlopsLaw, source: str) -> None:
    """Raise DataError unless larger models cost more per token: else none is compute-optimal."""
    if flops_law.power <= 0:
        raise DataError(
            f"{source}: FLOPs per token go as N^{flops_law.power:.3g}, so larger models cost no "
            "more; check which columns are N, D and C (--column ROLE=NAME)"
        )


def _warnings(fit: Fit) -> list[str]:
    found: list[str] = []
    mid_schedule = [
        item.name for item in fit.points.excluded if item.reason.startswith("mid-schedule")
    ]
    if mid_schedule:
        found.append(
            f"{counted(len(mid_schedule), 'mid-schedule point')} left out ({mid_schedule[0]}"
            f"{', ...' if len(mid_schedule) > 1 else ''}): such losses are too high"
        )
    repeated = len(fit.points) - len(set(fit.points.names))
    if repeated:
        found.append(
            f"{counted(repeated, 'row')} with the name of an earlier run: if they are points "
            "along one run, all "
            "but the last are mid-schedule"
        )
    if fit.flops_law.largest_error > ROUGH_FLOPS_LAW:
        found.append(
            f"FLOPs per token differ from a power of N by up to {fit.flops_law.largest_error:.0%} "
            "(shapes, segment or "
            "memory differ between runs): D* and approach 3's optimum carry that error"
        )
    if len(fit.points.budgets) == 2:
        found.append("two budgets: no budget is left to check the fit on")
    if fit.estimates.parametric:
        isoflop = fit.estimates.isoflop
        found += misfit_warnings(fit.points, fit.estimates.parametric, fit.flops_law, isoflop)
    found += warnings_of(fit.approaches, float(fit.points.budgets[-1]))
    return found


def _reasons(points: Points) -> str:
    shown = [f"{item.name}: {item.reason}" for item in points.excluded[:3]]
    more = f" and {len(points.excluded) - 3} more" if len(points.excluded) > 3 else ""
    return "; ".join(shown) + more
