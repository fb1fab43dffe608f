"""Which approach to rely on: the one that predicted best what it had not seen.

Each approach is fitted to the smaller budgets and predicts the optimum of the others, for up to
MOST_SPLITS splits, and with all budgets it predicts the held-out runs. Its error is the mean
|ln(predicted N* / measured)| plus LOSS_WEIGHT times the mean relative error of its losses: one
percent of the loss counts as much as ten percent of the size.

Few budgets tell approaches apart only roughly, so an approach comes before one of PREFERRED's
earlier ones only where its error is CLEARLY smaller. Both constants were chosen on simulated sweeps
(docs/log.md, 2026-11-23).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pretrain.scaling.checks import relative_error
from pretrain.scaling.estimates import TITLES, Below, Estimates, measured_optimum
from pretrain.scaling.isoflop import IsoflopFit
from pretrain.scaling.law import FlopsLaw
from pretrain.scaling.points import Array, Points

PREFERRED = ("parametric", "isoflop", "envelope")
LOSS_WEIGHT = 10.0
CLEARLY = 1.4
NO_ERROR = 0.02  # errors up to this are equally good
MOST_SPLITS = 3
FEWEST_FITTED = 3  # budgets of a split's fit, but for sweeps of three
Errors = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """An approach's mean errors on what it had not seen; None where nothing could be compared."""

    key: str
    size: float | None  # |ln(predicted N* / measured)|
    loss: float | None  # of left-out budgets and held-out runs, relative
    num_sizes: int
    num_losses: int

    @property
    def error(self) -> float | None:
        """What approaches are ranked by."""
        if self.size is None and self.loss is None:
            return None
        return (self.size or 0.0) + LOSS_WEIGHT * (self.loss or 0.0)


@dataclass(frozen=True)
class Ranking:
    """Approaches from the one to rely on; those without evidence are last."""

    standings: tuple[Standing, ...]

    @property
    def order(self) -> tuple[str, ...]:
        return tuple(item.key for item in self.standings)

    @property
    def reason(self) -> str:
        """Why the first one is first."""
        first = self.standings[0]
        known = [item for item in self.standings if item.error is not None]
        if not known or first.error is None:
            return "no left-out budget or held-out run compares the approaches"
        if len(known) == 1:
            return "no other approach predicts what was left out"
        if any(item.error < first.error for item in known if item.error is not None):
            return f"no other one's error is clearly smaller ({CLEARLY}x)"
        return "it predicted best what was left out"


def rank(
    points: Points, runs: Points, estimates: Estimates, flops_law: FlopsLaw, below: Below
) -> Ranking:
    """Rank the approaches that `points` allow; `runs` has the held-out runs."""
    lines = estimates.lines(flops_law)
    sizes, losses = _left_out_errors(points, flops_law, estimates.isoflop, below)
    for key, errors in _holdout_errors(runs, estimates).items():
        losses.setdefault(key, []).extend(errors)
    standings = [_standing(key, sizes, losses) for key in PREFERRED if key in lines]
    ranked: list[Standing] = []
    while standings:
        ranked.append(chosen := best_of(standings))
        standings.remove(chosen)
    return Ranking(tuple(ranked))


def _standing(key: str, sizes: Mapping[str, list[float]], losses: Errors) -> Standing:
    mine, its_losses = sizes.get(key, []), losses.get(key, [])
    return Standing(
        key=key,
        size=float(np.mean(mine)) if mine else None,
        loss=float(np.mean(its_losses)) if its_losses else None,
        num_sizes=len(mine),
        num_losses=len(its_losses),
    )


def best_of(standings: Sequence[Standing]) -> Standing:
    """The first whose error is not clearly larger than the smallest."""
    errors = [item.error for item in standings if item.error is not None]
    if not errors:
        return standings[0]
    most = max(CLEARLY * min(errors), NO_ERROR)
    return next(item for item in standings if item.error is not None and item.error <= most)


def _left_out_errors(
    points: Points, flops_law: FlopsLaw, isoflop: IsoflopFit | None, below: Below
) -> tuple[Errors, Errors]:
    """Errors of N* and of the least loss at budgets above those fitted, per approach."""
    budgets = points.budgets
    fewest = min(FEWEST_FITTED, len(budgets) - 1)
    sizes: Errors = {}
    losses: Errors = {}
    for count in range(len(budgets) - 1, max(fewest, 2) - 1, -1)[:MOST_SPLITS]:
        lines = below(float(budgets[count])).lines(flops_law)
        for budget in budgets[count:]:
            mine = points.take(points.budget_P == budget)
            measured = measured_optimum(isoflop, mine)
            if measured is None:
                continue
            log_flops = float(np.log(mine.flops_P).mean())
            for key, line in lines.items():
                error = abs(float(line.log_parameters(log_flops)) - np.log(measured[0]))
                sizes.setdefault(key, []).append(float(error))
                error = abs(relative_error(float(line.loss(log_flops)), measured[1]))
                losses.setdefault(key, []).append(error)
    return sizes, losses


def _holdout_errors(runs: Points, estimates: Estimates) -> Errors:
    """Relative errors of the losses of held-out runs, by the approaches that can predict some."""
    held = runs.take(runs.holdout_P)
    predicted: dict[str, Array] = {}
    if estimates.parametric:
        law = estimates.parametric.law
        predicted["parametric"] = law.loss(held.parameters_P, held.tokens_P)
    if estimates.isoflop:
        predicted["isoflop"] = estimates.isoflop.loss_of(held.parameters_P, held.flops_P)
    # Runs far from an optimum, which approach 3 alone predicts, would count against it alone.
    known_P = np.isfinite(list(predicted.values())).all(axis=0) if predicted else held.holdout_P
    return {
        key: np.abs(relative_error(loss_P, held.loss_P))[known_P].tolist()
        for key, loss_P in predicted.items()
    }


def ranking_table(ranking: Ranking) -> list[list[str]]:
    """Heads and rows, from the approach to rely on."""
    heads = ["approach", "error of N*", "on budgets", "error of the loss", "on losses"]
    rows = []
    for item in ranking.standings:
        rows.append(
            [
                TITLES[item.key],
                "-" if item.size is None else f"{np.expm1(item.size):.0%}",
                str(item.num_sizes),
                "-" if item.loss is None else f"{item.loss:.2%}",
                str(item.num_losses),
            ]
        )
    return [heads, *rows]


def ranking_line(ranking: Ranking) -> str:
    """Which approach to rely on, and why."""
    return f"rely on approach {TITLES[ranking.order[0]]}: {ranking.reason}"
