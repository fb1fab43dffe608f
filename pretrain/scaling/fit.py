"""One fit: all approaches on the same runs, with bootstrap intervals, checks and warnings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from data_pipeline.errors import DataError
from pretrain.scaling.checks import Prediction, predict_holdouts, warnings_of
from pretrain.scaling.envelope import envelope_draws
from pretrain.scaling.estimates import TITLES, Estimates, LeftOut, estimate, leave_largest_out
from pretrain.scaling.frontier import Approach, LawLine
from pretrain.scaling.huber_bootstrap import parametric_draws
from pretrain.scaling.isoflop import isoflop_draws
from pretrain.scaling.law import FlopsLaw, fit_flops_law
from pretrain.scaling.points import HELD_OUT, Array, Points, usable
from pretrain.terminal.text import counted

DEFAULT_DRAWS = 1000
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
    warnings: tuple[str, ...]
    num_draws: int
    seed: int

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
    num_draws: int = DEFAULT_DRAWS,
    seed: int = 0,
) -> Fit:
    """Fit every approach; DataError if the runs allow none, or all have the same budget."""
    points = usable(runs)
    refuse_single_budget(points)
    flops_law = fit_flops_law(points.parameters_P, points.tokens_P, points.flops_P)
    estimates = estimate(points, training)
    approaches = _with_draws(points, estimates, flops_law, np.random.default_rng(seed), num_draws)
    if not approaches:
        reasons = "; ".join(
            f"{TITLES[key]}: {reason}" for key, reason in estimates.unavailable.items()
        )
        raise DataError(f"{points.source}: no approach fits these runs ({reasons})")
    law = next((approach for approach in approaches if approach.key == "parametric"), None)
    holdouts: tuple[Prediction, ...] = ()
    if law and isinstance(law.line, LawLine) and isinstance(law.draws, LawLine):
        holdouts = predict_holdouts(runs, law.line, law.draws)
    fit = Fit(
        points=points,
        flops_law=flops_law,
        approaches=approaches,
        estimates=estimates,
        left_out=leave_largest_out(points, flops_law),
        holdouts=holdouts,
        warnings=(),
        num_draws=num_draws,
        seed=seed,
    )
    return replace(fit, warnings=tuple(_warnings(fit)))


def _with_draws(
    points: Points,
    estimates: Estimates,
    flops_law: FlopsLaw,
    rng: np.random.Generator,
    num_draws: int,
) -> tuple[Approach, ...]:
    lines = estimates.lines(flops_law)
    found: list[Approach] = []
    if estimates.envelope:
        draws = envelope_draws(estimates.envelope, rng, num_draws)
        found.append(
            Approach(
                "envelope",
                TITLES["envelope"],
                lines["envelope"],
                draws,
                estimates.envelope.warnings,
            )
        )
    if estimates.isoflop:
        draws = isoflop_draws(points, estimates.isoflop, rng, num_draws)
        found.append(
            Approach(
                "isoflop", TITLES["isoflop"], lines["isoflop"], draws, estimates.isoflop.warnings
            )
        )
    if estimates.parametric:
        draws = LawLine(parametric_draws(points, estimates.parametric, rng, num_draws), flops_law)
        warnings = estimates.parametric.warnings
        found.append(
            Approach("parametric", TITLES["parametric"], lines["parametric"], draws, warnings)
        )
    return tuple(found)


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
    found += warnings_of(fit.approaches, float(fit.points.budgets[-1]))
    return found


def _reasons(points: Points) -> str:
    shown = [f"{item.name}: {item.reason}" for item in points.excluded[:3]]
    more = f" and {len(points.excluded) - 3} more" if len(points.excluded) > 3 else ""
    return "; ".join(shown) + more
