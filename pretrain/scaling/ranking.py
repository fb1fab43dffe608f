"""Which approach to rely on: the one that predicted best what it had not seen.

Each approach is fitted to the smaller budgets and predicts the optimum of the others, for up to
MOST_SPLITS splits, and with all budgets it predicts the held-out runs. Its error is the mean
|ln(predicted N* / measured)| plus LOSS_WEIGHT times the mean relative error of its losses: one
percent of the loss counts as much as ten percent of the size. Two approaches are compared on what
both predicted.

Few budgets tell approaches apart only roughly, so an approach comes before one of PREFERRED's
earlier ones only where its error is CLEARLY smaller. Both constants were chosen on simulated sweeps
(docs/log.md, 2026-11-23). Approaches without intervals come last: nobody could tell how far to
rely on them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
Errors = Mapping[str, float]  # of what was predicted, by what that was


@dataclass(frozen=True, kw_only=True)
class Standing:
    """An approach's errors on what it had not seen."""

    key: str
    sizes: Errors  # |ln(predicted N* / measured)| of left-out budgets
    losses: Errors  # of left-out budgets and held-out runs, relative
    has_interval: bool = True

    @property
    def size(self) -> float | None:
        """The mean error of N*; None where nothing could be compared."""
        return _mean(self.sizes.values())

    @property
    def loss(self) -> float | None:
        """The mean error of the loss; None where nothing could be compared."""
        return _mean(self.losses.values())

    @property
    def error(self) -> float | None:
        """What approaches are ranked by."""
        if self.size is None and self.loss is None:
            return None
        return (self.size or 0.0) + LOSS_WEIGHT * (self.loss or 0.0)

    def on_what(self, other: Standing) -> Standing:
        """This standing on what the other one has predicted, too."""
        return Standing(
            key=self.key,
            sizes={each: self.sizes[each] for each in self.sizes if each in other.sizes},
            losses={each: self.losses[each] for each in self.losses if each in other.losses},
        )

    def is_clearly_better_than(self, other: Standing) -> bool:
        """Whether its error on what both predicted is clearly smaller; False if that is nothing."""
        mine, its = self.on_what(other).error, other.on_what(self).error
        return mine is not None and its is not None and its > max(CLEARLY * mine, NO_ERROR)

    def tree(self) -> dict[str, Any]:
        """The standing as JSON-able values."""
        return {
            "key": self.key,
            "size": self.size,
            "loss": self.loss,
            "error": self.error,
            "num_sizes": len(self.sizes),
            "num_losses": len(self.losses),
            "has_interval": self.has_interval,
        }


def _mean(errors: Collection[float]) -> float | None:
    return float(np.mean(list(errors))) if errors else None


@dataclass(frozen=True)
class Ranking:
    """Approaches from the one to rely on: those with intervals, then those with evidence."""

    standings: tuple[Standing, ...]

    @property
    def order(self) -> tuple[str, ...]:
        return tuple(item.key for item in self.standings)

    @property
    def reason(self) -> str:
        """Why the first one is first."""
        first, *others = self.standings
        known = [item for item in others if item.error is not None]
        if first.error is None:
            return "no left-out budget or held-out run compares the approaches"
        rivals = [item for item in known if item.has_interval == first.has_interval]
        if not rivals:
            able = " and has intervals" if known else ""
            return f"no other approach predicts what was left out{able}"
        for item in rivals:
            mine, its = first.on_what(item).error, item.on_what(first).error
            if mine is not None and its is not None and its < mine:
                return f"no other one's error is clearly smaller ({CLEARLY}x)"
        return "it predicted best what was left out"


def rank(
    points: Points,
    runs: Points,
    estimates: Estimates,
    flops_law: FlopsLaw,
    below: Below,
    with_interval: Collection[str],
) -> Ranking:
    """Rank the approaches that `points` allow; `runs` has the held-out runs."""
    lines = estimates.lines(flops_law)
    sizes, losses = _left_out_errors(points, flops_law, estimates.isoflop, below)
    for key, errors in _holdout_errors(runs, estimates).items():
        losses.setdefault(key, {}).update(errors)
    standings = [
        Standing(
            key=key,
            sizes=sizes.get(key, {}),
            losses=losses.get(key, {}),
            has_interval=key in with_interval,
        )
        for key in PREFERRED
        if key in lines
    ]
    return Ranking(tuple(ranked(standings)))


def ranked(standings: Iterable[Standing]) -> list[Standing]:
    """Those with intervals first; among equals the best one, then the best of the others."""
    waiting, found = list(standings), []
    while waiting:
        able = [item for item in waiting if item.has_interval] or waiting
        found.append(chosen := best_of(able))
        waiting.remove(chosen)
    return found


def best_of(standings: Sequence[Standing]) -> Standing:
    """The first one with evidence than which no other one is clearly better."""
    known = [item for item in standings if item.error is not None]
    for item in known:
        if not any(other.is_clearly_better_than(item) for other in known):
            return item
    return min(known, key=lambda item: item.error or 0.0, default=standings[0])


def _left_out_errors(
    points: Points, flops_law: FlopsLaw, isoflop: IsoflopFit | None, below: Below
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Errors of N* and of the least loss at budgets above those fitted, per approach."""
    budgets = points.budgets
    fewest = min(FEWEST_FITTED, len(budgets) - 1)
    sizes: dict[str, dict[str, float]] = {}
    losses: dict[str, dict[str, float]] = {}
    for count in range(len(budgets) - 1, max(fewest, 2) - 1, -1)[:MOST_SPLITS]:
        lines = below(float(budgets[count])).lines(flops_law)
        for budget in budgets[count:]:
            mine = points.take(points.budget_P == budget)
            measured = measured_optimum(isoflop, mine)
            if measured is None:
                continue
            what = f"{budget:.6g} FLOPs by the {count} smallest budgets"
            log_flops = float(np.log(mine.flops_P).mean())
            for key, line in lines.items():
                off = abs(float(line.log_parameters(log_flops)) - np.log(measured[0]))
                sizes.setdefault(key, {})[what] = float(off)
                error = abs(relative_error(float(line.loss(log_flops)), measured[1]))
                losses.setdefault(key, {})[what] = error
    return sizes, losses


def _holdout_errors(runs: Points, estimates: Estimates) -> dict[str, dict[str, float]]:
    """Relative errors of the losses of held-out runs, by the approaches that can predict some.

    Runs far from an optimum are predicted by approach 3 alone.
    """
    held = runs.take(runs.holdout_P)
    predicted: dict[str, Array] = {}
    if estimates.parametric:
        law = estimates.parametric.law
        predicted["parametric"] = law.loss(held.parameters_P, held.tokens_P)
    if estimates.isoflop:
        predicted["isoflop"] = estimates.isoflop.loss_of(held.parameters_P, held.flops_P)
    return {
        key: {
            f"held-out run {index}": abs(float(error))
            for index, error in enumerate(relative_error(loss_P, held.loss_P))
            if np.isfinite(error)
        }
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
                str(len(item.sizes)),
                "-" if item.loss is None else f"{item.loss:.2%}",
                str(len(item.losses)),
            ]
        )
    return [heads, *rows]


def ranking_line(ranking: Ranking) -> str:
    """Which approach to rely on, and why."""
    return f"rely on approach {TITLES[ranking.order[0]]}: {ranking.reason}"
